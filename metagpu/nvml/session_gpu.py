"""One GPU of an NVML session: its handle, its worker, its registration for events."""

import ctypes

import msgspec

from metagpu.core.model.mig import MigProfile
from metagpu.nvml.answers import NvmlAnswers
from metagpu.nvml.errors import CONCLUSIVE
from metagpu.nvml.queries import Handle
from metagpu.nvml.worker import NvmlWorker


def address_of(handle: Handle) -> int | None:
    """Return a handle's address, which identifies it."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class Registration(msgspec.Struct):
    """The registration of one GPU with the event set.

    Attributes:
        types: the GPU's event types in the set, 0 for none.
        problem: why the GPU's XIDs are not heard, empty where they are.
        refused: whether NVML refused it: only a new event set tries again.
    """

    types: int = 0
    problem: str = "not registered yet"
    refused: bool = False

    def clear(self, problem: str) -> None:
        """Record that the GPU is not in the set; the next registration tries again."""
        self.types, self.problem, self.refused = 0, problem, False


class SessionGpu(msgspec.Struct):
    """A GPU of this session.

    Attributes:
        index: NVML's index of the GPU.
        handle: NVML's handle of the GPU.
        worker: runs the GPU's calls.
        registration: the GPU's registration with the event set.
        lost: whether the GPU must stay out of the event set: with it NVML fails every wait at once.
        needs_recovery: whether the last condition was lost or named a recovery action.
        answers: the answers that the GPU works without.
        sensor_answers: the sensors that the GPU works without.
        mig_profiles: the GPU's MIG profiles and the MIG mode they were read in; `None` while they
            are unknown.
    """

    index: int
    handle: Handle
    worker: NvmlWorker
    registration: Registration = msgspec.field(default_factory=Registration)
    lost: bool = False
    needs_recovery: bool = False
    answers: NvmlAnswers = msgspec.field(default_factory=NvmlAnswers)
    sensor_answers: NvmlAnswers = msgspec.field(
        default_factory=lambda: NvmlAnswers(raised=CONCLUSIVE)
    )
    mig_profiles: tuple[bool, tuple[MigProfile, ...]] | None = None

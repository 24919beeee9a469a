"""One GPU of an NVML session: its handle, worker, registration, and deadlines."""

import ctypes
from typing import Final

import msgspec

from metagpu.core.model.mig import MigProfile
from metagpu.nvml.errors import CONCLUSIVE, NvmlAnswers
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


class NvmlTiming(msgspec.Struct, frozen=True):
    """Seconds of NVML calls that exceed the usual deadline.

    Attributes:
        straggler: that a survey waits for GPUs never read before, once another GPU has answered.
        wait: of one wait for events: NVML's wait cannot be cancelled.
        event_retry: after the first failure of the event set; `event_retry_longest` after many.
        opening: for initialisation: without persistence mode it wakes every GPU in turn.
        mode_change: for a change of MIG mode: NVML may reset the GPU for it.
    """

    straggler: float = 2.0
    wait: float = 1.0
    event_retry: float = 1.0
    event_retry_longest: float = 60.0
    opening: float = 60.0
    mode_change: float = 30.0


TIMING: Final = NvmlTiming()

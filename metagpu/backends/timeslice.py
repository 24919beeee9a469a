"""Time-slices: a GPU offered several times over; its containers take turns on all of it.

What NVIDIA's device plugin calls replicas. Nothing but the driver's turns stands between the
containers of a GPU: neither memory nor faults are kept apart.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import ClassVar, Final

import anyio
import structlog

from metagpu.backends.timeslice_placement import AllocationPolicy, Seat, place
from metagpu.core.backend import OneResourceBackend, OneResourceOptions, Options
from metagpu.core.errors import ToolError, ToolMissing, TooManyReplicas
from metagpu.core.gpu import Gpu
from metagpu.core.injection import Injection
from metagpu.core.model import Share, Verdict, by_gpu
from metagpu.core.served import ServedGpu
from metagpu.core.snapshot import GpuState, Snapshot

_MOST_REPLICAS: Final = 100_000
"""Of one GPU: more than the kubelet takes in a list, and few enough to be counted in no time."""

RETRY: Final = 60.0
"""Seconds between two tries to set the length of a turn."""

log = structlog.get_logger()


class TimeSlice(StrEnum):
    """How long a turn lasts; NVIDIA names the steps and not their milliseconds."""

    DEFAULT = "default"
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


_STEPS: Final = {
    TimeSlice.DEFAULT: "0",
    TimeSlice.SHORT: "1",
    TimeSlice.MEDIUM: "2",
    TimeSlice.LONG: "3",
}
"""The numbers of `nvidia-smi compute-policy --set-timeslice`."""


class TimesliceOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """What a pool may say to time-slices.

    Attributes:
        replicas: how many containers may hold a GPU at once. Required: memory is not divided, so
            only who knows the workloads knows how many fit.
        fail_requests_greater_than_one: whether to refuse a container that asks for more than one;
            two replicas are not twice the time.
        allocation_policy: which GPU comes first.
        time_slice: how long a turn lasts; as the driver has it when not given.
    """

    replicas: int
    resource: str = "nvidia.com/gpu.shared"
    fail_requests_greater_than_one: bool = False
    allocation_policy: AllocationPolicy = AllocationPolicy.DISTRIBUTED
    time_slice: TimeSlice | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= _MOST_REPLICAS:
            raise ValueError(f"replicas is {self.replicas}; allowed: 1 to {_MOST_REPLICAS}")


class TimesliceBackend(OneResourceBackend[TimesliceOptions]):
    """Offers a GPU several times over. Ids are `GPU-<uuid>::t3`."""

    name: ClassVar[str] = "timeslice"
    options_type: ClassVar[type[Options]] = TimesliceOptions

    def __init__(self, options: TimesliceOptions, injection: Injection) -> None:
        super().__init__(options, injection)
        self._warned = False

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Offer a GPU as often as it has replicas; each stands for its part of the memory.

        One in MIG mode has none: CUDA sees its instances only.
        """
        if gpu.mig_enabled:
            return ()

        replicas = self.options.replicas
        return self.equal(gpu, (f"t{at}" for at in range(replicas)), gpu.memory // replicas)

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose by the pool's policy; GPUs that are faulty or in others' hands come last."""
        on_offer = snapshot.offers[self.resource].by_gpu
        must = by_gpu(required)

        seats = []
        for gpu, those in by_gpu([*required, *available]).items():
            state, bound = snapshot.gpus[gpu], must.get(gpu, [])
            seats.append(
                Seat(
                    state.gpu,
                    len(on_offer[gpu]),
                    required=bound,
                    free=those[len(bound) :],
                    # The kubelet may not have heard yet that another backend has the GPU.
                    last=not state.open_to(self.name),
                )
            )
        return place(size, seats, self.options.allocation_policy)

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse more than one replica for a container, where the pool says so.

        Raises:
            TooManyReplicas: in the words of NVIDIA's device plugin.
        """
        del snapshot
        if self.options.fail_requests_greater_than_one and len(shares) > 1:
            raise TooManyReplicas(self.resource, len(shares))

    async def serve(self, served: ServedGpu) -> None:
        """Have turns last as long as the pool says while the GPU is offered; the default after.

        Set anew when the GPU is back from a fault, which a reset may have ended, and tried again
        for as long as it fails: the driver's programs may come later than this daemon.
        """
        length = self.options.time_slice
        if length is None:
            return

        undo, told = False, ""
        try:
            while True:
                verdict = served.state.verdict
                # Who is stopped while the tool runs cannot know whether it took effect.
                before, undo = undo, True
                failure = await self._set(length, served)
                if failure is not None:
                    undo = before
                    if str(failure) != told:
                        told = str(failure)
                        self._complain(length, served.gpu, failure)
                    await anyio.sleep(RETRY)
                    continue

                told = ""
                await served.until(partial(_is_back, verdict))
        finally:
            if undo and length is not TimeSlice.DEFAULT:
                with anyio.CancelScope(shield=True):  # the tool's own deadline ends it
                    failure = await self._set(TimeSlice.DEFAULT, served)
                if failure is not None:
                    self._complain(TimeSlice.DEFAULT, served.gpu, failure)

    async def _set(self, length: TimeSlice, served: ServedGpu) -> ToolError | None:
        """Set how long turns last on a GPU; give what went wrong. NVML has no call for it.

        The command is that of NVIDIA's own DRA driver (`setTimeSlice` in the kubelet plugin's
        nvlib.go, github.com/kubernetes-sigs/dra-driver-nvidia-gpu).
        """
        command = ("compute-policy", "-i", served.gpu.id, "--set-timeslice", _STEPS[length])

        try:
            await served.tools.run("nvidia-smi", *command)
        except ToolError as error:
            return error
        log.info(
            "time-slice set", resource=self.resource, gpu=str(served.gpu), time_slice=str(length)
        )
        return None

    def _complain(self, length: TimeSlice, gpu: Gpu, failure: ToolError) -> None:
        bound = log.bind(
            resource=self.resource, gpu=str(gpu), time_slice=str(length), error=str(failure)
        )
        if not isinstance(failure, ToolMissing):
            bound.warning("the time-slice could not be set; shares are offered")
        elif not self._warned:  # once for all GPUs of the pool
            self._warned = True
            bound.warning(
                "timeSlice has no effect: it is set through nvidia-smi. Give the daemon's "
                "container the `utility` capability of NVIDIA's runtime, name the driver's "
                "root with --dev-root, or leave the option out"
            )


def _is_back(before: Verdict, state: GpuState) -> bool:
    """Tell whether a GPU is sound, and was not so, or not all the time, since a verdict on it."""
    return state.verdict.healthy and state.verdict != before

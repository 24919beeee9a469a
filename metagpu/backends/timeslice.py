"""Time-slices: a GPU offered several times over; its containers take turns on all of it.

What NVIDIA's device plugin calls replicas. Nothing but the driver's turns stands between the
containers of a GPU: neither memory nor faults are kept apart.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final

import anyio
import structlog

from metagpu.backends.timeslice_placement import AllocationPolicy, Seat, place
from metagpu.core.backend import Backend, Options
from metagpu.core.errors import ToolError, ToolMissing, TooManyReplicas
from metagpu.core.injection import Injection
from metagpu.core.model import Gpu, GpuId, Grant, ResourceName, Share, ShareId, Snapshot
from metagpu.core.tools import Tools

_MOST_REPLICAS: Final = 100_000
"""Of one GPU: more than the kubelet takes in a list, and few enough to be counted in no time."""

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


class TimesliceOptions(Options, frozen=True, forbid_unknown_fields=True, rename="camel"):
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


class TimesliceBackend(Backend):
    """Offers a GPU several times over. Ids are `GPU-<uuid>::t3`."""

    name: ClassVar[str] = "timeslice"
    options_type: ClassVar[type[Options]] = TimesliceOptions

    def __init__(self, options: TimesliceOptions, injection: Injection) -> None:
        self._options = options
        self._injection = injection
        self._resource = ResourceName(options.resource)
        self._warned = False

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "TimesliceBackend":
        """Make it from a pool's options."""
        if not isinstance(options, TimesliceOptions):
            raise TypeError(f"timeslice cannot read {type(options).__name__}")
        return cls(options, injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The one resource name of this pool's replicas."""
        return (self._resource,)

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Offer a GPU as often as it has replicas; each stands for its part of the memory.

        One in MIG mode has none: CUDA sees its instances only.
        """
        if gpu.mig_enabled:
            return ()

        memory = gpu.memory // self._options.replicas

        return [
            Share(
                id=ShareId(f"{gpu.id}::t{number}"),
                gpu=gpu.id,
                resource=self._resource,
                backend=self.name,
                number=number,
                footprint=frozenset((f"t{number}",)),
                memory=memory,
            )
            for number in range(self._options.replicas)
        ]

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose by the pool's policy; GPUs that are faulty or in others' hands come last."""
        on_offer = snapshot.offers[self._resource].by_gpu
        must = _by_gpu(required)

        seats = []
        for gpu, those in _by_gpu([*required, *available]).items():
            state, bound = snapshot.gpus[gpu], must.get(gpu, [])
            seats.append(
                Seat(
                    state.gpu,
                    len(on_offer[gpu]),
                    required=bound,
                    free=those[len(bound) :],
                    # The kubelet may not have heard yet that another backend has the GPU.
                    last=not state.verdict.healthy or state.owner not in (None, self.name),
                )
            )
        return place(size, seats, self._options.allocation_policy)

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse more than one replica for a container, where the pool says so.

        Raises:
            TooManyReplicas: in the words of NVIDIA's device plugin.
        """
        del snapshot
        if self._options.fail_requests_greater_than_one and len(shares) > 1:
            raise TooManyReplicas(self._resource, len(shares))

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give each GPU once, however many of its replicas are held, and say their memory."""
        return self._injection.grant_shares(shares, snapshot)

    async def serve(self, gpu: Gpu, tools: Tools) -> None:
        """Have turns last as long as the pool says while the GPU is offered; the default after."""
        length = self._options.time_slice
        if length is None:
            return

        try:
            if await self._set(length, gpu, tools) and length is not TimeSlice.DEFAULT:
                await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):  # the tool's own deadline ends it
                await self._set(TimeSlice.DEFAULT, gpu, tools)
            raise

    async def _set(self, length: TimeSlice, gpu: Gpu, tools: Tools) -> bool:
        """Set how long turns last on a GPU; tell whether that worked. NVML has no call for it.

        The command is that of NVIDIA's own DRA driver (`setTimeSlice` in the kubelet plugin's
        nvlib.go, github.com/kubernetes-sigs/dra-driver-nvidia-gpu).
        """
        step = _STEPS[length]
        bound = log.bind(resource=self._resource, gpu=str(gpu), time_slice=str(length))

        try:
            await tools.run("nvidia-smi", "compute-policy", "-i", gpu.id, "--set-timeslice", step)
        except ToolMissing as error:
            if not self._warned:  # once for all GPUs of the pool
                self._warned = True
                bound.warning(
                    "timeSlice has no effect: it is set through nvidia-smi. Give the daemon's "
                    "container the `utility` capability of NVIDIA's runtime, name the driver's "
                    "root with --dev-root, or leave the option out",
                    error=str(error),
                )
            return False
        except ToolError as error:
            bound.warning("the time-slice could not be set; shares are offered", error=str(error))
            return False

        bound.info("time-slice set")
        return True


def _by_gpu(shares: Sequence[Share]) -> Mapping[GpuId, list[Share]]:
    found: dict[GpuId, list[Share]] = {}

    for share in dict.fromkeys(shares):
        found.setdefault(share.gpu, []).append(share)
    return found

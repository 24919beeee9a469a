"""The backend `timeslice`: replicas of a GPU, shared by the driver's time-slices.

NVIDIA's device plugin calls the same thing replicas. Only the driver's time-slices separate the
containers of a GPU: neither memory nor faults are isolated. The number of containers on each GPU
decides which replica a pod gets.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final

import anyio
import structlog

from metagpu.backends.common.packing import AllocationPolicy, GpuCandidate, candidates_of
from metagpu.core.availability.reasons import open_to
from metagpu.core.contracts.backend import (
    GpuContext,
    OneResourceBackend,
    OneResourceOptions,
    Options,
)
from metagpu.core.contracts.capabilities import (
    DeclaresSharing,
    ManagesGpu,
    NeedsPrivileges,
    SharesClaims,
    SharingStrategy,
)
from metagpu.core.errors import ProgramError, ProgramMissing
from metagpu.core.grants.injection import Injection
from metagpu.core.model.driver_roots import MOUNT_HOST
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.privileges import Privilege
from metagpu.core.model.request_errors import SharingUnavailable, TooManyReplicas
from metagpu.core.model.shares import Share, Verdict
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.runtime.rate_limit import LogOnce

_Rank = tuple[int, ...]


def choose_replicas(
    size: int,
    candidates: Sequence[GpuCandidate],
    policy: AllocationPolicy,
    last: Collection[GpuId] = (),
) -> list[Share]:
    """Choose `size` replicas, or as many as there are, the required ones first.

    The order is that of taking one replica after the other, each from the GPU that then comes
    first by the policy. Equal GPUs are ranked by how few replicas this request got from them, then
    by index. The number of replicas before one on its own GPU tells all of that: one sort does it.

    Args:
        size: the number of replicas, required ones included.
        candidates: the GPUs to take replicas from.
        policy: the GPU that comes first.
        last: the GPUs to take from only when no other GPU has a replica left.
    """
    by_index = sorted(candidates, key=lambda candidate: candidate.gpu.index)
    required = [
        share for candidate in by_index for share in sorted(candidate.required, key=_number)
    ]
    missing = max(0, size - len(required))
    ranked = sorted(_ranked(candidates, _RANKS[policy], last), key=lambda pair: pair[0])

    return [*required[:size], *(share for _, share in ranked[:missing])]


def _ranked(
    candidates: Sequence[GpuCandidate],
    rank: Callable[[GpuCandidate, int, int], _Rank],
    last: Collection[GpuId],
) -> Iterator[tuple[_Rank, Share]]:
    for candidate in candidates:
        free = sorted(
            [free_share for free_share in candidate.free if free_share not in candidate.required]
            if candidate.required
            else candidate.free,
            key=_number,
        )
        taken = candidate.total - len(free)
        for before, share in enumerate(free):
            yield (int(candidate.gpu.id in last), *rank(candidate, taken, before)), share


def _distributed(candidate: GpuCandidate, taken: int, before: int) -> _Rank:
    return taken + before, len(candidate.required) + before, candidate.gpu.index


def _packed(candidate: GpuCandidate, taken: int, before: int) -> _Rank:
    # The GPU that gave the first replica leads by one more: it stays first until it is full.
    return -taken, len(candidate.required), candidate.gpu.index, before


_RANKS: Final = {AllocationPolicy.DISTRIBUTED: _distributed, AllocationPolicy.PACKED: _packed}


def _number(share: Share) -> int:
    return share.number


_MAX_REPLICAS: Final = 70_000
"""Of one GPU: a list of 4 MiB, which is the most that the kubelet takes, has about as many."""

log = structlog.get_logger()


class TimeSlice(StrEnum):
    """The length of a time-slice; NVIDIA names the steps and not their milliseconds."""

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
_LENGTHS: Final = frozenset(map(str, TimeSlice))


class TimesliceOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The options of time-slices.

    Attributes:
        replicas: the number of containers that may hold a GPU at once. Required: memory is not
            divided, so only the operator knows how many of the workloads fit.
        fail_requests_greater_than_one: whether a container that asks for more than one replica is
            refused; two replicas are not twice the time.
        allocation_policy: the GPU that comes first.
        time_slice: the length of a time-slice; the driver's setting stays if not given.
    """

    replicas: int
    resource: str = "nvidia.com/gpu.shared"
    fail_requests_greater_than_one: bool = False
    allocation_policy: AllocationPolicy = AllocationPolicy.DISTRIBUTED
    time_slice: TimeSlice | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= _MAX_REPLICAS:
            raise ValueError(f"replicas is {self.replicas}; allowed: 1 to {_MAX_REPLICAS}")


class TimesliceBackend(
    OneResourceBackend[TimesliceOptions],
    ManagesGpu,
    NeedsPrivileges,
    DeclaresSharing,
    SharesClaims,
):
    """A backend of replicas of a GPU, with ids `GPU-<uuid>::t3`.

    Attributes:
        retry: seconds between two attempts to set the length of a time-slice. The driver's
            programs may be installed later than this agent.
    """

    name: ClassVar[str] = "timeslice"
    options_type: ClassVar[type[Options]] = TimesliceOptions
    sharing_strategy: ClassVar[SharingStrategy] = SharingStrategy.TIME_SLICING
    retry: ClassVar[float] = 60.0

    def __init__(self, options: TimesliceOptions, injection: Injection) -> None:
        super().__init__(options, injection)
        self._missing_program = LogOnce()

    def privileges(self) -> Mapping[Privilege, str]:
        """Return what the driver wants of a caller who sets the length of time-slices."""
        if self.options.time_slice is None:
            return {}
        return {Privilege.SYS_ADMIN: "the length of time-slices"}

    def count_shares(self, gpu: Gpu) -> int:
        """Return the number of replicas: none in MIG mode, where CUDA sees instances only."""
        return 0 if gpu.mig_enabled else self.options.replicas

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return the replicas of a GPU, each with its part of the memory."""
        return self.equal_shares(
            gpu,
            (f"t{number}" for number in range(self.count_shares(gpu))),
            (gpu.memory or 0) // self.options.replicas,
            replica=True,
        )

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose by the pool's policy; faulty GPUs and those of other owners come last.

        The kubelet may not have received yet that another backend owns a GPU.
        """
        candidates = candidates_of(self.resource, available, required, snapshot)
        last = {
            candidate.gpu.id
            for candidate in candidates
            if not open_to(snapshot.gpus[candidate.gpu.id], self.name)
        }
        return choose_replicas(size, candidates, self.options.allocation_policy, last)

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse several replicas for one container, where the options forbid it.

        Raises:
            TooManyReplicas: in the words of NVIDIA's device plugin.
        """
        del snapshot
        if self.options.fail_requests_greater_than_one and len(shares) > 1:
            raise TooManyReplicas(self.resource, len(shares))

    def check_settings(self, settings: str, field: str) -> None:
        """Refuse a length that a ResourceClaim asks for, where the options set none.

        Raises:
            SharingUnavailable: with the option.
        """
        if self.options.time_slice is None and settings != TimeSlice.DEFAULT:
            problem = (
                f"the backend {self.name} of the GPU's pool sets no length of time-slices; give it "
                "the option `timeSlice: default`, or remove the field"
            )
            raise SharingUnavailable(field, problem)

    async def serve(self, context: GpuContext) -> None:
        """Set the length of time-slices while the GPU is offered; reset it afterwards.

        A ResourceClaim that has the GPU may ask for a length of its own. The backend sets the
        length again when the GPU is back from a fault, which a reset may have ended. A failure
        is tried again for as long as it lasts.
        """
        configured = self.options.time_slice
        if configured is None:
            return

        to_undo, failures, unknown = False, LogOnce(), LogOnce()
        try:
            while True:
                verdict, length = context.state.verdict, _length(context.state, configured)
                asked = _asked_length(context.state)
                if asked and asked not in _LENGTHS and unknown.is_new(context.gpu.id, asked):
                    log.warning(
                        "time-slice length of a claim unknown",
                        gpu=str(context.gpu),
                        asked=asked,
                        effect=f"its GPU has time-slices of the length {length}",
                        fix="run the version of metagpu that prepared the claim",
                    )
                # A call that is cancelled while the program runs cannot know its effect.
                before, to_undo = to_undo, to_undo or length is not TimeSlice.DEFAULT
                failure = await self._set(length, context)
                if failure is None:
                    to_undo, longest = length is not TimeSlice.DEFAULT, math.inf
                    failures.clear(length)
                else:
                    to_undo, longest = before, self.retry
                    if failures.is_new(length, str(failure)):
                        self._log_failure(length, context.gpu, failure)

                with anyio.move_on_after(longest):
                    await _change(context, verdict, length, configured)
        finally:
            if to_undo:
                with anyio.CancelScope(shield=True):  # the program's own deadline ends it
                    failure = await self._set(TimeSlice.DEFAULT, context)
                if failure is not None:
                    self._log_failure(TimeSlice.DEFAULT, context.gpu, failure)

    async def _set(self, length: TimeSlice, context: GpuContext) -> ProgramError | None:
        """Set the length of time-slices of a GPU; return the failure.

        NVML has no call for it. The command is that of NVIDIA's own DRA driver (`setTimeSlice` in
        the kubelet plugin's nvlib.go, github.com/kubernetes-sigs/dra-driver-nvidia-gpu).
        """
        command = ("compute-policy", "-i", context.gpu.id, "--set-timeslice", _STEPS[length])

        try:
            await context.programs.run("nvidia-smi", *command)
        except ProgramError as error:
            return error
        log.info(
            "time-slice set", resource=self.resource, gpu=str(context.gpu), time_slice=str(length)
        )
        return None

    def _log_failure(self, length: TimeSlice, gpu: Gpu, failure: ProgramError) -> None:
        bound = log.bind(
            resource=self.resource, gpu=str(gpu), time_slice=str(length), error=str(failure)
        )
        if not isinstance(failure, ProgramMissing):
            bound.warning("time-slice setting failed")
        elif self._missing_program.is_new(self.resource, "missing"):  # once for the pool's GPUs
            bound.warning(
                "time-slice setting unavailable",
                fix=(
                    f"timeSlice needs nvidia-smi: {MOUNT_HOST} in the container, name the "
                    "driver's root with --driver-root, or leave the option out"
                ),
            )


async def _change(
    context: GpuContext, verdict: Verdict, length: TimeSlice, configured: TimeSlice
) -> None:
    """Wait until a GPU is back from a fault, or its claim wants another length."""
    await context.wait_until(
        lambda state: _is_back(verdict, state) or _length(state, configured) is not length
    )


def _length(state: GpuState, configured: TimeSlice) -> TimeSlice:
    """Return the length that a GPU's ResourceClaim asks for, or the configured one."""
    asked = _asked_length(state)
    return TimeSlice(asked) if asked in _LENGTHS else configured


def _asked_length(state: GpuState) -> str:
    """Return the length that a GPU's ResourceClaim asks for, empty without one.

    A newer metagpu may have prepared the claim, with a length that is unknown here.
    """
    leases = state.leases.values()
    asked = (lease.settings for lease in leases if lease.share.backend == TimesliceBackend.name)
    return next(filter(None, asked), "")


def _is_back(before: Verdict, state: GpuState) -> bool:
    """Return whether a GPU is healthy, and was not since an earlier verdict."""
    return state.verdict.healthy and state.verdict != before

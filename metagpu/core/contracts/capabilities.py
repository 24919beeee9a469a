"""Optional abilities of a backend, one base class each; callers ask `isinstance`.

The classes are nominal, not protocols: `isinstance` on a runtime-checkable Protocol compares all
members at each call, and Allocate asks too.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import ClassVar, Final

from metagpu.core.contracts.backend import Backend, GpuContext, Options
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover
from metagpu.core.contracts.programs import Daemons
from metagpu.core.grants.grant import Grant
from metagpu.core.model.backend_reports import BackendMetric, FreeCapacity, MetricKind
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import MigInstance
from metagpu.core.model.offers import OfferRule, RequestRule
from metagpu.core.model.privileges import Privilege
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import GpuState, Snapshot


class MemoryGuard(StrEnum):
    """The mechanism that keeps a container within its share of a GPU's memory.

    The enforcer judges containers under `ENFORCER` alone. Hardware and MPS refuse too much memory
    themselves, and a container that has a GPU for itself takes no other container's memory. Where
    the driver holds a container of `ENFORCER` to its limit, the reports show `DRIVER`; no backend
    declares `DRIVER`.
    """

    ENFORCER = "enforcer"
    DRIVER = "driver"
    MPS = "mps"
    MIG = "mig"
    EXCLUSIVE = "exclusive"


class SharingStrategy(StrEnum):
    """The strategy by which the containers of one GPU share it.

    Names and values are those of the label `nvidia.com/gpu.sharing-strategy`, of NVIDIA's GPU
    Feature Discovery.
    """

    NONE = "none"
    TIME_SLICING = "time-slicing"
    MPS = "mps"


class DeclaresSharing(Backend):
    """A backend that declares how its containers share a GPU.

    Attributes:
        guard: the mechanism that keeps its containers within `Share.memory`.
        sharing_strategy: the strategy in NVIDIA's words.
    """

    guard: ClassVar[MemoryGuard] = MemoryGuard.ENFORCER
    sharing_strategy: ClassVar[SharingStrategy] = SharingStrategy.NONE


@cache  # for each lease; `issubclass` of an abstract class is slow
def guard_of(kind: type[Backend]) -> MemoryGuard:
    """Return the guard that a backend declares; the enforcer for other backends."""
    return kind.guard if issubclass(kind, DeclaresSharing) else MemoryGuard.ENFORCER


def sharing_strategy_of(kind: type[Backend]) -> SharingStrategy:
    """Return the sharing strategy that a backend declares; `NONE` for other backends."""
    return kind.sharing_strategy if issubclass(kind, DeclaresSharing) else SharingStrategy.NONE


class DiagnosesGpu(Backend):
    """A backend that knows why a GPU has none of its shares, or will give none."""

    def misfit_reason(
        self,
        gpu: Gpu,  # noqa: ARG002 - for backends whose options name what a GPU must have
    ) -> str:
        """Return why a GPU can have none of the shares, in any state or mode.

        Empty if it may have some.

        A configuration of which no GPU can have anything is refused; one that waits is not.
        """
        return ""

    def no_shares_reason(self, gpu: Gpu) -> str:
        """Return why a GPU has none of this backend's shares."""
        return _no_shares_reason(gpu)

    def expected_problem(
        self,
        gpu: Gpu,  # noqa: ARG002 - for backends whose GPUs have to be in a mode
    ) -> str:
        """Return why a GPU will give no share in its present state; empty if it may.

        For commands such as `metagpu explain`, which read a node without serving it. While the
        agent serves the node, `ManagesGpu.serve` reports the same by `GpuContext.suspend`.
        """
        return ""


def misfit_reason(backend: Backend, gpu: Gpu) -> str:
    """Return why a GPU can never have a share of a backend; empty if it may."""
    return backend.misfit_reason(gpu) if isinstance(backend, DiagnosesGpu) else ""


def no_shares_reason(backend: Backend, gpu: Gpu) -> str:
    """Return why a GPU has none of a backend's shares."""
    if isinstance(backend, DiagnosesGpu):
        return backend.no_shares_reason(gpu)
    return _no_shares_reason(gpu)


def _no_shares_reason(gpu: Gpu) -> str:
    return "MIG mode is on" if gpu.mig_enabled else "too small for its backends"


class LimitsRequests(Backend):
    """A backend that refuses some sets of free shares, such as parts of two GPUs.

    Free shares that no request could take together are held back, by the rule that it states.
    """

    @property
    @abstractmethod
    def request_rule(self) -> RequestRule:
        """The sets of shares that `check` accepts and `prefer` finds, if there are any."""

    def max_containers(self, gpu: Gpu) -> int | None:  # noqa: ARG002 - for backends with a limit
        """Return the most containers that a GPU serves at once, `None` without a limit."""
        return None


def offer_rule(backend: Backend, gpus: Iterable[Gpu]) -> OfferRule:
    """Return the rule by which a backend's free shares of some GPUs are held back."""
    if not isinstance(backend, LimitsRequests):
        return OfferRule()
    limits = {gpu.id: backend.max_containers(gpu) for gpu in gpus}
    return OfferRule(
        backend.request_rule, {gpu: most for gpu, most in limits.items() if most is not None}
    )


class PreparesContainers(Backend):
    """A backend whose containers need preparation before each start."""

    @abstractmethod
    async def prepare(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Prepare the shares of a container before each of its starts, within 30 s.

        No barrier: a kubelet that has just restarted starts containers without this call.

        Raises:
            RequestError: if the container cannot start; the kubelet tries again.
        """


class NeedsPrivileges(Backend):
    """A backend that needs capabilities of the kernel beside the user root."""

    @abstractmethod
    def privileges(self) -> Mapping[Privilege, str]:
        """Return the capabilities that its options need, each with what it is needed for."""


class ManagesGpu(Backend):
    """A backend that puts its GPUs into a state of its own, and undoes it.

    Attributes:
        needs_setup: whether `serve` sets a GPU up. Its shares begin suspended, until `serve`
            calls `GpuContext.resume`.
        needs_cleanup: whether `serve` cleans a GPU after its last lease. No other backend gets
            the GPU before.
    """

    needs_setup: ClassVar[bool] = False
    needs_cleanup: ClassVar[bool] = False

    @abstractmethod
    async def serve(self, context: GpuContext) -> None:
        """Keep one GPU in this backend's state until cancelled; then undo the state.

        The backend runner calls `serve` once for each GPU of the backend, while the layout has
        the GPU and the backend together. A reload that changes neither the GPU nor the options
        leaves the call running, on the instance where it began: what the call learns must not
        live on `self`. A reload that changes the options cancels the call and waits for its end
        before the next one begins. The next one finds the GPU as it is: leased, waiting for its
        cleanup, or idle. Shares are on offer meanwhile; suspended shares are listed as unhealthy.

        An agent that was killed may have left the hardware in any state. After a start, leases are
        known only once the kubelet has reported them.

        A backend with `needs_cleanup` waits until the GPU is due (`GpuContext.cleanup_due_since`),
        cleans it, and calls `GpuContext.cleanup_done`. The runner cancels it only when the GPU is
        not its own any more, another instance of the same backend takes over, or the agent stops.

        The runner logs an error and calls `serve` again after a back-off. With `needs_setup` or
        `needs_cleanup`, `serve` does not return.
        """


class Provisions(ManagesGpu):
    """A backend that creates hardware devices for its shares, such as MIG instances.

    `serve` creates the devices of leased shares and reports them by `GpuContext.report`. Before
    `grant`, Allocate waits until the snapshot has all of them (`GpuState.provisioned`).
    """

    @property
    @abstractmethod
    def provision_timeout(self) -> float:
        """The seconds that the devices of a container may take."""

    @property
    def provisions_at_start(self) -> bool:
        """True if the start of a container, not Allocate, waits for its devices.

        `grant` then answers with names that stay right however often a device is created again.
        A failure keeps the container from starting, and not the pod from being admitted.
        """
        return False


class SharesClaims(Backend):
    """A backend by which the containers of one ResourceClaim may share a whole GPU.

    The claim has all shares of the GPU, and its parameters say how: `ClaimSharing.settings`.
    """

    def check_settings(self, settings: str, field: str) -> None:
        """Refuse settings that the backend's options do not allow.

        Raises:
            RequestError: names the field of the claim, and the option.
        """

    def with_settings(
        self,
        grant: Grant,
        settings: str,  # noqa: ARG002 - for backends that limit containers
    ) -> Grant:
        """Return the grant of all shares of a GPU with the settings of a claim."""
        return grant


class OffersExisting(Backend):
    """A backend that may offer MIG instances that exist already."""

    @property
    @abstractmethod
    def offers_existing(self) -> bool:
        """True if the options ask for that; resources then follow from shares."""

    @abstractmethod
    def with_existing(
        self, gpu: Gpu, instances: Mapping[Gpu, Sequence[MigInstance]]
    ) -> tuple[Options, Backend]:
        """Return the backend and options of one GPU, by its pool's instances."""

    @abstractmethod
    def existing_resources(
        self, instances: Mapping[Gpu, Sequence[MigInstance]]
    ) -> Sequence[ResourceName]:
        """Return the resources that these instances have for themselves."""


class HasMetrics(Backend):
    """A backend with metrics that the number of its shares does not tell.

    Attributes:
        metric_kinds: the kinds of its metrics.
    """

    metric_kinds: ClassVar[tuple[MetricKind, ...]] = ()

    @abstractmethod
    def metrics(self, states: Sequence[GpuState]) -> Iterable[BackendMetric]:
        """Return metrics of its GPUs, of the kinds in `metric_kinds`. Pure.

        Called in a worker thread for each scrape.
        """


def metric_kinds_of(kinds: Iterable[type[Backend]]) -> list[MetricKind]:
    """Return the kinds of all metrics that some backends have."""
    return [
        metric_kind
        for kind in kinds
        if issubclass(kind, HasMetrics)
        for metric_kind in kind.metric_kinds
    ]


class ReportsCapacity(Backend):
    """A backend whose shares overlap: their number is not the free capacity."""

    @abstractmethod
    def free_capacity(self, states: Sequence[GpuState]) -> Sequence[FreeCapacity]:
        """Return the free capacity of its GPUs. Pure."""


class LeavesOnNode(Backend):
    """A backend of which something outlives the daemon, on the node or in its GPUs."""

    @classmethod
    @abstractmethod
    async def find_leftovers(cls, node: AbandonedNode) -> Sequence[Leftover]:
        """Find what the backend left, on all GPUs of the node. No daemon runs meanwhile."""

    @classmethod
    async def is_left_on(cls, gpu: Gpu, run_dir: str, daemons: Daemons) -> bool:  # noqa: ARG003
        """Return whether pods of an earlier daemon may still need the backend on a GPU.

        The backend serves the GPU with its default options then until no container may hold a
        share, where no pool of the GPU has the backend.
        """
        return False


CAPABILITIES: Final = (
    *(DeclaresSharing, DiagnosesGpu, LimitsRequests, PreparesContainers),
    *(NeedsPrivileges, ManagesGpu, SharesClaims),
    *(Provisions, OffersExisting, HasMetrics, ReportsCapacity, LeavesOnNode),
)
"""All optional abilities."""


def members_without_effect(kind: type[Backend]) -> list[str]:
    """Return members of abilities that a backend defines without the ability's class."""
    return [
        f"{name} needs {ability.__name__}"
        for ability in CAPABILITIES
        if not issubclass(kind, ability)
        for name in vars(ability)
        if not name.startswith("_") and hasattr(kind, name)
    ]

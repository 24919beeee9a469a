"""The backend `mps`: containers compute on one GPU at once, each in its part.

NVIDIA's Multi-Process Service has one control daemon for each GPU. A container becomes a client of
the daemon through shared directories, and the container's environment sets its limits. The owner of
a GPU looks after its control daemon, its compute mode, and the cleanup.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Final

import anyio
import structlog
from anyio import to_thread

from metagpu.backends.common.mps_daemon.control import (
    DEFAULT_UNITS,
    MAX_CLIENTS,
    MAX_UNITS,
    SERVER_MEMORY,
    SHARED_MEMORY,
    MpsDirectories,
    check_number,
    check_shared_memory,
    control_daemon_spec,
    format_pids,
    grant_to_client,
    limit_clients,
    max_clients_of,
    usable_memory,
)
from metagpu.backends.common.mps_daemon.decisions import PRIVILEGES, MpsDaemonTiming
from metagpu.backends.common.mps_daemon.supervisor import (
    LEAVE_DEADLINE,
    DaemonSupervisor,
    find_control_daemons,
)
from metagpu.backends.common.packing import (
    PlacementPolicy,
    candidates_of,
    choose_shares_or_fallback,
)
from metagpu.core.availability.reasons import count_free, open_to
from metagpu.core.config.units import Bytes
from metagpu.core.contracts.backend import (
    GpuContext,
    OneResourceBackend,
    OneResourceOptions,
    Options,
)
from metagpu.core.contracts.capabilities import (
    DeclaresSharing,
    HasMetrics,
    LeavesOnNode,
    LimitsRequests,
    ManagesGpu,
    MemoryGuard,
    NeedsPrivileges,
    SharesClaims,
    SharingStrategy,
)
from metagpu.core.contracts.driver import ComputeMode
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover
from metagpu.core.contracts.programs import Daemons
from metagpu.core.errors import DriverError, ProgramError, ProgramMissing
from metagpu.core.grants.grant import Grant
from metagpu.core.model.backend_reports import BackendMetric, MetricKind
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.offers import OfferPolicy, RequestRule
from metagpu.core.model.privileges import Privilege
from metagpu.core.model.request_errors import MultipleDevices, TooManyClients
from metagpu.core.model.resource_claims import MpsLimits
from metagpu.core.model.shares import Share, ShareId, by_gpu, count_containers
from metagpu.core.model.snapshot import GpuState, Snapshot

log = structlog.get_logger()


async def run_gpu_owner(
    context: GpuContext, directories: MpsDirectories, timing: MpsDaemonTiming, shared_memory: int
) -> None:
    """Keep a control daemon for a GPU until cancelled.

    At the end the daemon quits if it is unused. If it has clients, or a container holds a share,
    or another metagpu takes the GPU over, it goes on, and the next owner of the GPU adopts it.

    Raises:
        OSError: if its directories cannot be created.
    """
    await to_thread.run_sync(directories.create)
    name, device = str(context.gpu), context.gpu.id
    supervisor = DaemonSupervisor(
        context, device, directories, timing, name=name, shared_memory=shared_memory
    )

    owner = _GpuOwner(context, directories, timing, supervisor)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.run)
            group.start_soon(owner.run)
    finally:
        if not context.hands_over:
            with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVE_DEADLINE):
                await owner.release()


class _GpuOwner:
    """The compute mode of a GPU: exclusive while shares are held, then restored."""

    def __init__(
        self,
        context: GpuContext,
        directories: MpsDirectories,
        timing: MpsDaemonTiming,
        supervisor: DaemonSupervisor,
    ) -> None:
        self._context = context
        self._directories = directories
        self._timing = timing
        self._supervisor = supervisor
        self._log = log.bind(gpu=str(context.gpu))

    async def run(self) -> None:
        """Make the GPU exclusive while containers hold shares; clean it up after."""
        context = self._context
        await self._supervisor.checked.wait()
        await self._restore_leftover_mode()

        while True:
            # A reset GPU has forgotten its mode: the loop sets it again when the GPU recovers.
            await context.wait_until(lambda state: self._owns(state) and state.verdict.healthy)
            if not await self._make_exclusive():
                await anyio.sleep(self._timing.period)
                continue
            await context.wait_until(
                lambda state: (
                    not self._owns(state) or not state.verdict.healthy or self._needs_cleanup(state)
                )
            )
            if (since := context.cleanup_due_since) is not None:
                await self._clean_up(since)

    async def release(self) -> None:
        """Quit an unused control daemon, and put the compute mode back."""
        if await self._supervisor.release():
            try:
                await self._restore_mode()
            except DriverError as error:
                self._log.warning("compute mode not restored", error=str(error))

    def _owns(self, state: GpuState) -> bool:
        return state.owner == self._context.backend

    def _needs_cleanup(self, state: GpuState) -> bool:
        return self._context.backend in state.cleanup.since

    async def _make_exclusive(self) -> bool:
        """Keep programs that are no MPS clients off the GPU, and save the previous mode.

        Returns:
            Whether the mode could be read; one that cannot be set is left as it is.
        """
        mode: ComputeMode | None = None
        try:
            mode = await self._context.compute_mode()
            if mode not in (None, ComputeMode.EXCLUSIVE_PROCESS):
                await to_thread.run_sync(self._directories.save_compute_mode, mode.name)
                await self._context.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        except DriverError as error:
            if mode is not None:  # otherwise an earlier one may be saved
                await to_thread.run_sync(self._directories.discard_compute_mode)
            self._log.warning("exclusive compute mode not set", error=str(error))
            return mode is not None
        return True

    async def _restore_mode(self) -> None:
        saved = await to_thread.run_sync(self._directories.read_compute_mode)
        if saved is not None:
            await self._context.set_compute_mode(
                ComputeMode.__members__.get(saved, ComputeMode.DEFAULT)
            )
            await to_thread.run_sync(self._directories.discard_compute_mode)

    async def _restore_leftover_mode(self) -> None:
        """Restore the mode that a killed agent changed, once MPS does not have the GPU."""
        context, logged = self._context, False
        while await to_thread.run_sync(self._directories.read_compute_mode) is not None:
            await context.wait_until(lambda state: self._owns(state) or not context.leased)
            if self._owns(context.state):
                return  # its cleanup restores it
            try:
                if await self._supervisor.is_unused():
                    await self._restore_mode()
                    return
            except (ProgramError, DriverError) as error:
                if not logged:
                    self._log.warning("compute mode not restored", error=str(error))
                logged = True
            await anyio.sleep(self._timing.retry)

    async def _clean_up(self, since: float) -> None:
        """Return the GPU once no process is on it; stop if a container is given a share."""
        began, logged = anyio.current_time(), False

        while self._context.cleanup_due_since == since:
            try:
                remaining = await self._remaining_processes()
                if not remaining:
                    await self._restore_mode()
                    await self._supervisor.empty_shared_memory()
                    self._context.cleanup_done(since)
                    return
            except (ProgramError, DriverError) as error:
                remaining = str(error)
            if not logged and anyio.current_time() - began > self._timing.start_timeout:
                logged = True
                self._log.warning("mps cleanup delayed", waits_for=remaining)
            await anyio.sleep(self._timing.retry)

    async def _remaining_processes(self) -> str:
        """End servers without clients; return the remaining processes, empty if none."""
        if remaining := await self._supervisor.end_idle_servers():
            return remaining
        pids = [process.pid for process in await self._context.processes()]
        return f"processes {format_pids(pids)}" if pids else ""


DAEMON_UP: Final = MetricKind(
    "mps_control_daemon_up",
    "Whether the MPS control daemon of the GPU answers and takes clients, 1 or 0.",
)


class MpsOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The options of the backend `mps` in a pool.

    Attributes:
        units_per_gpu: the units of each GPU, 100 unless `replicas` is given; a container may take
            several units of one GPU.
        replicas: instead, the equal parts of each GPU, at most as many as it serves clients.
        placement: the policy for choosing among several GPUs.
        max_clients: how many containers a GPU serves at once; by default as many as its
            architecture allows.
        server_memory: the memory that the MPS server needs, so that all parts fit.
        shared_memory: the size of /dev/shm, which all containers of a GPU share.
        offer: whether free units are held back that no container could take together; by default
            those of `units_per_gpu`: a container takes one of `replicas`.
    """

    resource: str = "nvidia.com/gpu.mps"
    units_per_gpu: int | None = None
    replicas: int | None = None
    placement: PlacementPolicy = PlacementPolicy.BINPACK
    max_clients: int | None = None
    server_memory: Bytes = SERVER_MEMORY
    shared_memory: Bytes = SHARED_MEMORY
    offer: OfferPolicy | None = None

    def __post_init__(self) -> None:
        if self.units_per_gpu is not None and self.replicas is not None:
            raise ValueError("unitsPerGpu and replicas contradict each other; give one of them")
        check_number("unitsPerGpu", self.units_per_gpu, MAX_UNITS)
        check_number("replicas", self.replicas, MAX_CLIENTS)
        check_number("maxClients", self.max_clients, MAX_CLIENTS)
        check_shared_memory(self.shared_memory)


class MpsBackend(
    OneResourceBackend[MpsOptions],
    ManagesGpu,
    NeedsPrivileges,
    DeclaresSharing,
    LimitsRequests,
    HasMetrics,
    LeavesOnNode,
    SharesClaims,
):
    """The backend of units of threads and memory. Share ids are `GPU-<uuid>::p12`."""

    name: ClassVar[str] = "mps"
    options_type: ClassVar[type[Options]] = MpsOptions
    needs_setup: ClassVar[bool] = True
    needs_cleanup: ClassVar[bool] = True
    guard: ClassVar[MemoryGuard] = MemoryGuard.MPS
    sharing_strategy: ClassVar[SharingStrategy] = SharingStrategy.MPS
    metric_kinds: ClassVar[tuple[MetricKind, ...]] = (DAEMON_UP,)
    timing: ClassVar[MpsDaemonTiming] = MpsDaemonTiming()

    def metrics(self, states: Sequence[GpuState]) -> Iterable[BackendMetric]:
        """Return whether control daemons serve: otherwise the backend is suspended."""
        return [
            BackendMetric(DAEMON_UP, state.gpu.id, self.name not in state.suspended)
            for state in states
        ]

    def privileges(self) -> Mapping[Privilege, str]:
        """Return what control daemons, their mounts and the compute mode want of a caller."""
        uses = "MPS: a /dev/shm for the clients of a GPU, its compute mode"
        return {Privilege.SYS_ADMIN: uses, **PRIVILEGES}

    @property
    def request_rule(self) -> RequestRule:
        """One GPU; any GPUs where nothing is held back."""
        options = self.options
        by_default = OfferPolicy.EXACT if options.replicas is None else OfferPolicy.ALL
        exact = (options.offer or by_default) is OfferPolicy.EXACT
        return RequestRule.ONE_GPU if exact else RequestRule.ANY

    def max_containers(self, gpu: Gpu) -> int:
        """Return how many clients a GPU has at most."""
        return self.clients_of(gpu)

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return equal parts of a GPU without the MPS server's memory; none in MIG mode.

        A GPU has no more replicas than it serves clients.
        """
        units, replicas = self.options.units_per_gpu or DEFAULT_UNITS, self.options.replicas
        count = units if replicas is None else min(replicas, self.clients_of(gpu))
        memory = self._usable_memory(gpu) // count
        if gpu.mig_enabled or memory < MIB:
            return ()

        return self.equal_shares(gpu, (f"p{number:02d}" for number in range(count)), memory)

    def clients_of(self, gpu: Gpu) -> int:
        """Return how many containers a GPU serves at once, with one process each."""
        return max_clients_of(gpu, self.options.max_clients)

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose units of one GPU that takes another client; others come last."""
        candidates = candidates_of(self.resource, available, required, snapshot)
        open_candidates = [
            candidate
            for candidate in candidates
            if candidate.required or self._takes_more(snapshot.gpus[candidate.gpu.id])
        ]
        return choose_shares_or_fallback(
            size, open_candidates, candidates, self.options.placement, largest=size
        )

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse units of several GPUs, and one container more than a GPU serves.

        Raises:
            MultipleDevices: with the free units of each GPU.
            TooManyClients: with the number of clients that the GPU serves.
        """
        taken = by_gpu(shares)
        if len(taken) > 1:
            offered = snapshot.offers[self.resource].by_gpu
            chosen = {snapshot.gpus[gpu].gpu.index: len(units) for gpu, units in taken.items()}
            free = {
                state.gpu.index: count_free(state, self.resource)
                for state in snapshot.gpus.values()
                if state.gpu.id in offered
            }
            raise MultipleDevices(
                self.resource,
                len(shares),
                _format_counts(chosen),
                _format_counts(free),
                most=max(map(len, offered.values())),
            )

        for gpu, units in taken.items():
            state = snapshot.gpus[gpu]
            # The units of an init container go to the next container: no client is added.
            others = state.leases.keys() - {share.id for share in units}
            if self._count_clients(state, others) >= self.clients_of(state.gpu):
                raise TooManyClients(self.resource, f"GPU {state.gpu}", self.clients_of(state.gpu))

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Grant the GPU, its control daemon's directories, and the limits of the units."""
        base = self.injection.grant_shares(shares, snapshot)
        [(gpu, held)] = by_gpu(shares).items()
        # Another pool may have divided the GPU, under the same resource name.
        units = len(snapshot.offers[self.resource].by_gpu[gpu])
        return grant_to_client(base, self._directories(gpu), held, units)

    def with_settings(self, grant: Grant, settings: str) -> Grant:
        """Return the grant with the limits of each client of a claim."""
        return limit_clients(grant, MpsLimits.parse(settings))

    async def serve(self, context: GpuContext) -> None:
        """Keep a control daemon for the GPU while it has clients or a pool wants it."""
        most = self.clients_of(context.gpu)
        if most < (self.options.replicas or 0):
            log.warning(
                "mps replicas limited to the clients of a gpu",
                gpu=str(context.gpu),
                offered=most,
                replicas=self.options.replicas,
            )
        directories, shared = self._directories(context.gpu.id), self.options.shared_memory
        await run_gpu_owner(context, directories, self.timing, shared)

    @classmethod
    async def find_leftovers(cls, node: AbandonedNode) -> Sequence[Leftover]:
        """Find all control daemons, those of MIG instances too."""
        return await find_control_daemons(node)

    @classmethod
    async def is_left_on(cls, gpu: Gpu, run_dir: str, daemons: Daemons) -> bool:
        """Return whether the GPU has a control daemon, or another compute mode by it."""
        directories = MpsDirectories.for_device(run_dir, gpu.id)
        if await to_thread.run_sync(directories.read_compute_mode) is not None:
            return True
        with suppress(ProgramMissing):
            return await daemons.find(control_daemon_spec(gpu.id, directories, 0)) is not None
        return False

    def _usable_memory(self, gpu: Gpu) -> int:
        # Units are parts of a known amount of memory: without one there are none.
        total = (gpu.memory or 0) - (gpu.reserved or 0)
        return usable_memory(total, self.options.server_memory)

    def _directories(self, gpu: GpuId) -> MpsDirectories:
        return MpsDirectories.for_device(self.injection.run_dir, gpu)

    def _takes_more(self, state: GpuState) -> bool:
        clients = self._count_clients(state, state.leases.keys())
        return open_to(state, self.name) and clients < self.clients_of(state.gpu)

    def _count_clients(self, state: GpuState, ids: Iterable[ShareId]) -> int:
        """Count the containers that hold these shares, as far as the shares are of MPS."""
        leases = [state.leases[share_id] for share_id in ids]
        return count_containers(lease for lease in leases if lease.share.backend == self.name)


def _format_counts(by_index: Mapping[int, int]) -> str:
    return ", ".join(f"GPU {index}: {count}" for index, count in sorted(by_index.items()))

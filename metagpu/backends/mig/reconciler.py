"""The reconciler of one GPU's instances: created for leases, removed when idle.

Level-triggered: each round compares NVML's list with the leases, and starts what is missing. The
reconciler reports the inventory as one `ProvisionedState` as soon as it changes, and before NVML is
asked: no share is given of what is about to go.

Freed slices have room for an instance of any profile, and pods of several profiles may wait for
them. A scheduler that reads of all profiles at once sends one pod for each at the same moment, and
all but one of these pods fail. So they are offered one profile after the other (`OfferStagger`).
"""

from dataclasses import dataclass, field

import anyio
import structlog
from msgspec.structs import replace

from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.mig.inventory import InstanceInventory, InstanceSettings, MigTiming
from metagpu.backends.mig.layout_inventory import LayoutInventory, provisioned_state
from metagpu.backends.mig.mps_daemons import MigDevice, MpsDaemons, mig_devices, mps_devices
from metagpu.backends.mig.provisioner import (
    Blocker,
    InstanceProvisioner,
    MigModePolicy,
    pids_by_instance,
)
from metagpu.core.availability.conflict import unavailable_shares
from metagpu.core.contracts.backend import GpuContext
from metagpu.core.errors import DriverError
from metagpu.core.model.mig import profile_of, slot_of
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ProvisionedState, Share, ShareId
from metagpu.core.model.snapshot import GpuState
from metagpu.core.runtime.rate_limit import LogOnce


@dataclass(slots=True)
class OfferStagger:
    """The shares of one GPU that are on offer again since their slices became free.

    At the first report all shares are. Times are those of the event loop.

    Attributes:
        timing: its `stagger` is the time between two profiles.
        offered: the free shares on offer, the held ones, and those just released.
        next_at: when the next profile is offered.
        waiting: whether a profile waits for that.
    """

    timing: MigTiming = field(default_factory=MigTiming)
    offered: frozenset[ShareId] | None = None
    next_at: float = 0.0
    waiting: bool = False

    def apply(
        self, provisioned: ProvisionedState, state: GpuState, backend: str, now: float
    ) -> ProvisionedState:
        """Add the shares not on offer yet; held and just released ones always are.

        The scheduler sends a pod for a share that was just released before the kubelet reports
        its end. The largest profile comes first: smaller ones find room more often. By DRA
        nothing is delayed: the scheduler itself allocates the places one by one.
        """
        if state.api is Api.DRA:
            return provisioned
        mine = [share for share in state.shares if share.backend == backend]
        leases = state.leases
        unavailable = unavailable_shares(
            state.shares, leases, state.cleanup.since, {**state.provisioned, backend: provisioned}
        )
        free = {share.id: share for share in mine if share.id not in leases.keys() | unavailable}
        released = {share for share, device in provisioned.devices.items() if device.reusable}
        always = {share.id for share in mine if share.id in leases or share.id in released}
        if self.offered is None:
            self.offered = frozenset(free)

        offered = (self.offered & free.keys()) | always
        delayed = free.keys() - offered
        if delayed and not self.waiting:
            self.next_at = max(self.next_at, now + self.timing.stagger)
        while delayed and now >= self.next_at:
            profile = profile_of(max(delayed, key=lambda share_id: _size(free[share_id])))
            offered |= {share_id for share_id in delayed if profile_of(share_id) == profile}
            delayed = free.keys() - offered
            self.next_at = now + self.timing.stagger
        self.offered, self.waiting = frozenset(offered), bool(delayed)
        return replace(provisioned, delayed=frozenset(share.id for share in mine) - self.offered)

    def seconds_to_next(self, now: float) -> float:
        """Return the seconds until the next profile is offered, infinite if none waits."""
        return max(0.0, self.next_at - now) if self.waiting else float("inf")


def _size(share: Share) -> tuple[int, str]:
    return len(share.footprint), share.id


log = structlog.get_logger()


class MigReconciler:
    """The reconcile loop of one GPU; it lives as long as `Backend.serve`.

    It observes the provisioner (`ProvisionerObserver`) and the MPS daemons (`DaemonObserver`).
    """

    def __init__(
        self,
        context: GpuContext,
        settings: InstanceSettings,
        mode: MigModePolicy,
        run_dir: str,
        mps_timing: MpsDaemonTiming,
    ) -> None:
        self._context = context
        self._settings = settings
        self._timing = settings.timing
        self._mode = mode
        self._triggered = anyio.Event()
        self._stagger = OfferStagger(settings.timing)
        self._exclusive = False
        self._problems = LogOnce()
        self._group = anyio.create_task_group()
        kind = InstanceInventory if settings.layout is None else LayoutInventory
        self._inventory = kind(settings, context.backend)
        self._daemons = MpsDaemons(
            context,
            run_dir,
            mps_timing,
            self,
            self._group,
            shared_memory=settings.shared_memory,
        )
        self._provisioner = InstanceProvisioner(context, self._inventory, self._daemons, self)

    async def run(self) -> None:
        """Reconcile until cancelled; then remove idle instances that nobody else manages.

        A layout has its instances, and another metagpu that takes the GPU over adopts all.
        """
        try:
            async with self._group:
                while True:
                    self._triggered = anyio.Event()
                    seen = _triggers(self._context.state)
                    delay = await self._reconcile()
                    await self._wait(seen, delay)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(self._timing.shutdown):
                on_demand = self._settings.layout is None and not self._context.hands_over
                for slot in list(self._inventory.idle) if on_demand else []:
                    await self._provisioner.remove(slot)

    def change_began(self, slot: str) -> None:  # noqa: ARG002 - the whole inventory is reported
        """Report the inventory: an instance is about to be created or removed."""
        self._report()

    def change_ended(self, slot: str) -> None:  # noqa: ARG002 - as above
        """Report the inventory, and start the next round."""
        self._report()
        self._triggered.set()

    async def rescan(self) -> None:
        """Read the instances and the processes on unleased ones; report the inventory.

        Raises:
            DriverError: if NVML does not list them.
        """
        inventory, context = self._inventory, self._context

        async with self._provisioner.lock:
            owned, lost = set(inventory.owned), inventory.lost
            listed = await context.mig.instances(context.gpu.id)
            inventory.update_instances(context.state, listed, anyio.current_time())
        pids = await pids_by_instance(context) if inventory.unleased(context.state) else {}
        inventory.update_processes(context.state, pids, anyio.current_time())
        self._daemons.follow(mig_devices(inventory), mps_devices(inventory, context.state))
        self._daemons.end_idle_servers(inventory.processes)
        self._report()

        for device in inventory.owned - owned:
            log.info("mig instance adopted", gpu=self._gpu, device=device)
        for share in inventory.lost - lost:
            log.warning("mig instance lost; containers of its pod fail", share=share)

    def daemon_changed(self, device: MigDevice, problem: str) -> None:
        """Record why an instance's MPS daemon takes no clients, empty if it does."""
        if self._inventory.daemon_problems.get(device.uuid) == problem:
            return
        self._inventory.daemon_problems[device.uuid] = problem
        if problem:
            log.warning("mps suspended", gpu=self._gpu, instance=device.slot, reason=problem)
        else:
            log.info("mps ready", gpu=self._gpu, instance=device.slot)
        self._report()

    @property
    def _gpu(self) -> str:
        return str(self._context.state.gpu)

    async def _wait(self, seen: object, delay: float) -> None:
        """Wait for a trigger or a change of the GPU's state, at most `delay` seconds."""
        async with anyio.create_task_group() as group:

            async def changed() -> None:
                await self._context.wait_until(lambda state: _triggers(state) != seen)
                group.cancel_scope.cancel()

            group.start_soon(changed)
            with anyio.move_on_after(delay):
                await self._triggered.wait()
            group.cancel_scope.cancel()

    async def _reconcile(self) -> float:
        """Run one round; return after how many seconds there may be more to do."""
        context = self._context
        released_at = context.cleanup_due_since  # this scan does not see what is released later
        try:
            blocker = self._profile_blocker() or await self._mode.ensure()
            self._exclusive = self._mode.enables and blocker is None
            await self.rescan()
        except DriverError as error:
            self._scan_failed(error)
            return self._timing.poll
        if blocker is not None:
            context.suspend(blocker.reason, reset=blocker.needs_reset)
            if not blocker.empties:
                return self._timing.scan

        self._problems.clear("scan")
        self._start_changes()
        if reason := self._inventory.waiting_reason(context.state):
            context.suspend(reason)
        elif blocker is None:
            context.resume()
        used = self._provisioner.changing or self._inventory.processes
        if released_at is not None and not used:
            context.cleanup_done(released_at)
        now = anyio.current_time()
        to_check = self._inventory.seconds_to_check(context.state, now)
        return min(to_check, self._stagger.seconds_to_next(now))

    def _start_changes(self) -> None:
        """Start to create the instances that are missing, and to remove those not needed."""
        context, inventory = self._context, self._inventory
        for lease in list(inventory.pending_leases(context.state)):
            # Several replicas may wait for one instance: the first of them starts its creation.
            self._provisioner.start_creation(self._group, slot_of(lease.share.id), lease)
        for slot in inventory.missing_instances(context.state, anyio.current_time()):
            self._provisioner.start_creation(self._group, slot)
        for slot in inventory.removable(context.state, anyio.current_time()):
            self._group.start_soon(self._provisioner.remove, slot)

    def _profile_blocker(self) -> Blocker | None:
        """Return a blocker if the GPU has no profile of its pool: its mode then stays."""
        names = {profile.name for profile in self._context.state.gpu.mig_profiles}
        if not self._settings.allowed or names & self._settings.allowed:
            return None
        return Blocker("it has none of the MIG profiles of its pool")

    def _scan_failed(self, error: DriverError) -> None:
        self._inventory.outage = True
        if self._problems.is_new("scan", str(error)):
            log.warning("mig instance scan failed", gpu=self._gpu, error=str(error))
        if not self._inventory.scanned:
            self._context.suspend(str(error))

    def _report(self) -> None:
        """Report the inventory; an Allocate in the same step of the loop rests on it."""
        state = self._context.state
        self._inventory.record_leases(state)
        provisioned = provisioned_state(self._inventory, state, exclusive=self._exclusive)
        if self._settings.layout is None:  # instances of a layout do not compete for slices
            now = anyio.current_time()
            provisioned = self._stagger.apply(provisioned, state, self._context.backend, now)
        self._context.report(provisioned)


def _triggers(state: GpuState) -> object:
    """Return the part of the GPU's state that starts a round when it changes."""
    leases = frozenset((i, lease.since, lease.holder is None) for i, lease in state.leases.items())
    return (
        leases,
        state.kubelet.mig_devices_of_other_plugins,
        state.gpu,
        state.verdict.healthy,
        state.mig_faults,
    )

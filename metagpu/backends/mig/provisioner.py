"""MIG on one GPU: its mode, turned on or off, and instances, created and removed.

The mode of unused GPUs changes as the configuration says. The driver may be busy for long; the
provisioner then asks again.
"""

from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Final, NamedTuple, Protocol

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from metagpu.backends.mig.inventory import InstanceInventory, identity
from metagpu.backends.mig.mps_daemons import MpsDaemons
from metagpu.core.contracts.backend import GpuContext
from metagpu.core.errors import DriverError, InsufficientResources, InUse
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import MigInstance, Placement
from metagpu.core.model.shares import Lease, ProvisionedState
from metagpu.core.runtime.rate_limit import Backoff

_RESET_ARCHITECTURES: Final = frozenset(("ampere",))
"""Architectures on which a change of the mode takes effect at a reset, as NVIDIA's MIG guide says;
from Hopper on it takes effect at once."""


class Blocker(NamedTuple):
    """A reason why a GPU has not the mode that its pool wants.

    Attributes:
        needs_reset: whether the reason lasts until the GPU is reset.
        empties: whether the GPU's idle instances are removed meanwhile.
    """

    reason: str
    needs_reset: bool = False
    empties: bool = False


class MigModePolicy(Protocol):
    """The MIG mode that a pool wants of one GPU.

    Attributes:
        enables: whether the pool wants MIG on: no other backend can use the GPU then.
    """

    enables: ClassVar[bool]

    async def ensure(self) -> Blocker | None:
        """Change the mode if allowed and possible; return why it is not the wanted one.

        Raises:
            DriverError: if NVML cannot report the mode.
        """
        ...


def expected_problem(gpu: Gpu, *, enable: bool, disable: bool = False) -> str:
    """Return why a GPU is not used as its pool wants in its present mode. Pure.

    Empty where the mode is right, or where metagpu changes it as soon as the GPU is unused.
    """
    if gpu.mig_enabled is None and not disable:
        return _NO_MIG
    if not (gpu.mig_enabled or enable or disable):
        return _disabled(gpu)
    if gpu.mig_enabled is disable and gpu.architecture in _RESET_ARCHITECTURES:
        change = LEAVING if disable else ENTERING
        return f"{change}; the GPU then needs a reset: {_reset_command(gpu)}"
    return ""


class MigModeEnabler(msgspec.Struct, frozen=True):
    """The policy of a GPU with instances; `enable` allows metagpu to turn MIG on."""

    enables: ClassVar[bool] = True
    context: GpuContext
    enable: bool

    async def ensure(self) -> Blocker | None:
        """Enable MIG if allowed and possible; return why it is off, `None` if it is on.

        Raises:
            DriverError: if NVML cannot report the mode.
        """
        gpu = self.context.state.gpu
        mode = await self.context.mig.mode(gpu.id)

        if mode is None:
            return Blocker(_NO_MIG)
        if mode.enabled:
            return None
        if mode.pending:
            return _reset(gpu, "it is switched on")
        if not self.enable:
            return Blocker(_disabled(gpu))
        return await self._enable()

    async def _enable(self) -> Blocker | None:
        context = self.context
        if context.state.kubelet.mig_devices_of_other_plugins is None:
            return Blocker(
                "MIG mode is off; metagpu enables it after the kubelet has reported which pods "
                "hold the GPU"
            )

        # Reported before the check for use: from now on no container is given another share, and
        # the check sees every earlier lease.
        context.report(ProvisionedState(exclusive=True))
        blocker = await _change_mode(context, _use(context), enable=True)
        if blocker is not None:
            context.report(ProvisionedState())  # other backends may use the GPU while this fails
        return blocker


class MigModeDisabler(msgspec.Struct, frozen=True):
    """The policy of a GPU that leaves MIG mode."""

    enables: ClassVar[bool] = False
    context: GpuContext

    async def ensure(self) -> Blocker | None:
        """Disable MIG if possible; return a blocker until the GPU is known without it.

        Raises:
            DriverError: if NVML cannot report the mode.
        """
        context, gpu = self.context, self.context.state.gpu
        mode = await context.mig.mode(gpu.id)

        if mode is None or not (mode.enabled or mode.pending):
            # By the facts of the last check it is on: no other backend offers the GPU yet.
            return Blocker(_LEFT) if gpu.mig_enabled else None
        if not mode.pending:
            return _reset(gpu, "it is switched off")
        return await _change_mode(context, self._use(), enable=False) or Blocker(_LEFT)

    async def _use(self) -> str:
        """Return what keeps MIG on, empty for nothing."""
        context = self.context
        if context.state.kubelet.mig_devices_of_other_plugins is None:
            return "the kubelet has not reported yet which pods hold it"
        if use := await _use(context, any_backend=True):
            return use
        if instances := await context.mig.instances(context.state.gpu.id):
            return f"it has {len(instances)} instances"
        return ""


async def _change_mode(context: GpuContext, use: Awaitable[str], *, enable: bool) -> Blocker | None:
    """Change the mode of an unused GPU; return what keeps it, `None` for nothing."""
    gpu = context.state.gpu
    failed = f"MIG mode is {'off and cannot be enabled' if enable else 'on and cannot be disabled'}"
    try:
        if used := await use:
            return Blocker(f"{ENTERING if enable else LEAVING}: {used}", empties=not enable)
        mode = await context.mig.set_mode(gpu.id, enabled=enable)
    except DriverError as error:
        return Blocker(f"{failed}: {error}")
    if mode.enabled is enable:
        log.info("mig mode changed", gpu=str(gpu), enabled=enable)
        return None
    if mode.pending is not enable:
        return Blocker(f"{failed}: {mode.reason}")
    return _reset(gpu, f"it was switched {'on' if enable else 'off'}, but {mode.reason}")


async def _use(context: GpuContext, *, any_backend: bool = False) -> str:
    """Return what uses the GPU, empty if it is unused."""
    for lease in context.state.leases.values():
        # A lease of ours has no instance while MIG is off, as after a reboot: it waits for it.
        if any_backend or lease.share.backend != context.backend:
            return f"{lease.holder or 'a pod that is being admitted'} holds {lease.share.id}"
    for process in await context.processes():
        return f"process {process.pid} runs on it"
    return ""


ENTERING: Final = "MIG mode is off; metagpu enables it once the GPU is unused"
LEAVING: Final = "MIG mode is on; metagpu turns it off once the GPU is unused"
_LEFT: Final = "MIG mode is off now; other backends offer the GPU after the next check of all GPUs"
_NO_MIG: Final = "the GPU does not support MIG"


def _disabled(gpu: Gpu) -> str:
    return (
        f"MIG mode is off; turn it on (`nvidia-smi -i {gpu.index} -mig 1`), "
        "or let metagpu do so for idle GPUs with `enableMig: true`"
    )


def _reset(gpu: Gpu, cause: str) -> Blocker:
    text = f"MIG mode waits for a reset: {cause}; {_reset_command(gpu)}"
    return Blocker(text, needs_reset=True)


def _reset_command(gpu: Gpu) -> str:
    return (
        "when no program uses the GPU, run "
        f"`nvidia-smi --gpu-reset -i {gpu.index}`, or reboot the node"
    )


log = structlog.get_logger()


class ProvisionerObserver(Protocol):
    """The reconciler of a GPU, as its provisioner sees it."""

    def change_began(self, slot: str) -> None:
        """Report the inventory: a share of this slot must not be given now."""
        ...

    def change_ended(self, slot: str) -> None:
        """Report the inventory, and check whether there is more to do."""
        ...

    async def rescan(self) -> None:
        """Read the instances again: another program must have changed them."""
        ...


class InstanceProvisioner:
    """The creations and removals of one GPU's instances, one at a time in each slot.

    Attributes:
        lock: held from a request to NVML until its result is in the inventory.
    """

    def __init__(
        self,
        context: GpuContext,
        inventory: InstanceInventory,
        daemons: MpsDaemons,
        observer: ProvisionerObserver,
    ) -> None:
        self.lock = anyio.Lock()
        self._context = context
        self._inventory = inventory
        self._daemons = daemons
        self._observer = observer
        self._timing = inventory.settings.timing
        self._changes: dict[str, anyio.Event] = {}
        """Set when the creation or removal in a slot has ended."""

    @property
    def changing(self) -> bool:
        """True while an instance is being created or removed."""
        return bool(self._changes)

    def start_creation(self, group: TaskGroup, slot: str, lease: Lease | None = None) -> None:
        """Start to create an instance for a lease or a layout, unless the slot changes."""
        if slot in self._changes:
            return
        self._inventory.creating.add(slot)
        self._begin(slot)  # a later owner of the GPU learns from the report whose instance it is
        group.start_soon(self._create, slot, lease)

    async def remove(self, slot: str) -> DriverError | None:
        """Remove an owned instance that has no lease by now; return the error if it stays."""
        inventory = self._inventory
        if slot in self._changes or not inventory.is_unleased(self._context.state, slot):
            return None

        instance = inventory.present[slot]
        self._begin(slot)  # before the request to the driver, so that no share is given meanwhile
        try:
            await self._daemons.stop(slot)
            async with self.lock:
                if inventory.present.get(slot) != instance:
                    return None  # it went meanwhile, and its number may be another's by now
                await self._destroy(instance)
                del inventory.present[slot]
        except DriverError as error:
            return await self._removal_failed(slot, instance, error)
        else:
            for record in (inventory.idle, inventory.processes, inventory.removal_failures):
                record.pop(slot, None)
            device = identity(instance)
            self._context.instance_removed(device)
            log.info("mig instance removed", gpu=self._gpu, instance=slot, device=device)
            return None
        finally:
            self._end(slot)

    @property
    def _gpu(self) -> str:
        return str(self._context.state.gpu)

    async def _create(self, slot: str, lease: Lease | None) -> None:
        """Create an instance, or record why that failed."""
        began = anyio.current_time()

        try:
            instance = await self._create_by(slot, began + self._inventory.settings.deadline)
        except DriverError as error:
            if lease is not None:
                self._inventory.record_lease_failure(lease, str(error))
            self._inventory.record_creation_failure(slot, str(error), anyio.current_time())
            log.warning(
                "mig instance creation failed", gpu=self._gpu, instance=slot, error=str(error)
            )
        else:
            took = f"{anyio.current_time() - began:.3f}s"
            device = identity(instance)
            log.info("mig instance created", gpu=self._gpu, instance=slot, device=device, took=took)
        finally:
            self._end(slot)

    async def _create_by(self, slot: str, deadline: float) -> MigInstance:
        """Create an instance, and try again while the driver is busy.

        Raises:
            DriverError: if that fails, or does not succeed by the deadline; names what occupies
                the slices.
        """
        profile, placement = self._request(slot)
        backoff = Backoff(self._timing.busy, self._timing.longest_busy)

        while True:
            try:
                await self._free_slices(slot)
                return await self._request_instance(slot, profile, placement, deadline)
            except InUse:
                delay = backoff.next()
                if anyio.current_time() + delay > deadline:
                    raise
            except InsufficientResources as error:
                await self._observer.rescan()  # another program has changed the instances
                found = self._inventory.overlapping(self._context.state, slot)
                occupants = ", ".join(found) or "no instance"
                raise InsufficientResources(f"{error}; on its slices: {occupants}") from None
            await anyio.sleep(delay)

    def _request(self, slot: str) -> tuple[int, Placement]:
        """Return NVML's number of a slot's profile, and the placement.

        Raises:
            DriverError: if the GPU does not have them now.
        """
        name, _, start = slot.rpartition("@")
        for profile in self._context.state.gpu.mig_profiles:
            for placement in profile.placements:
                if (profile.name, placement.start) == (name, int(start)):
                    return profile.number, placement
        raise DriverError(f"the GPU does not have the MIG profile of {slot} now")

    async def _request_instance(
        self, slot: str, profile: int, placement: Placement, deadline: float
    ) -> MigInstance:
        async with self.lock:
            left = max(deadline - anyio.current_time(), self._timing.busy)
            gpu = self._context.gpu.id
            try:
                instance = await self._context.mig.create(gpu, profile, placement, left)
            except InsufficientResources:
                raise  # NVML has created nothing: an instance that appears is another program's
            except DriverError:
                self._inventory.unsettled.add(slot)  # NVML may have created it all the same
                raise
            self._inventory.present[slot] = instance
            self._inventory.owned.add(identity(instance))
            return instance

    async def _free_slices(self, wanted: str) -> None:
        """Remove the idle instances on the slices of a slot.

        Raises:
            DriverError: if an instance stays.
        """
        inventory = self._inventory
        for slot in inventory.overlapping(self._context.state, wanted):
            if slot in self._changes and slot != wanted:
                await self._changes[slot].wait()
            if slot not in inventory.present:
                continue
            if not inventory.is_unleased(self._context.state, slot):
                raise InsufficientResources(
                    f"instance {slot} is in use, or was not created by metagpu"
                )
            if (error := await self.remove(slot)) is not None:
                raise error

    async def _destroy(self, instance: MigInstance) -> None:
        """Destroy an instance; an error of NVML counts only while the instance is listed.

        Raises:
            DriverError: the instance stays, or may.
        """
        if (await self._listed()).get(instance.number) != identity(instance):
            return  # it is gone, and its number may be another's
        try:
            await self._context.mig.destroy(self._context.gpu.id, instance.number)
        except DriverError:
            with suppress(DriverError):
                if instance.number not in await self._listed():
                    return
            raise

    async def _listed(self) -> Mapping[int, str]:
        """Return the identities of the GPU's instances, by NVML's number."""
        listed = await self._context.mig.instances(self._context.gpu.id)
        return {instance.number: identity(instance) for instance in listed}

    async def _removal_failed(
        self, slot: str, instance: MigInstance, error: DriverError
    ) -> DriverError:
        """Record a failed removal, with the processes on the instance if they cause it."""
        with suppress(DriverError):
            pids = (await pids_by_instance(self._context)).get(instance.number, ())
            if pids and isinstance(error, InUse):
                error = InUse(f"{error}: process {', '.join(map(str, pids))} runs on {slot}")

        self._inventory.half_removed[slot] = instance.number
        now = anyio.current_time()
        if self._inventory.record_removal_failure(slot, str(error), now):
            log.warning(
                "mig instance removal failed", gpu=self._gpu, instance=slot, error=str(error)
            )
        return error

    def _begin(self, slot: str) -> None:
        self._changes[slot] = anyio.Event()
        self._inventory.changing.add(slot)
        self._observer.change_began(slot)

    def _end(self, slot: str) -> None:
        self._inventory.changing.discard(slot)
        self._inventory.creating.discard(slot)
        self._changes.pop(slot).set()
        self._observer.change_ended(slot)


async def pids_by_instance(context: GpuContext) -> Mapping[int | None, Sequence[int]]:
    """Return the processes on a GPU, by NVML's number of their GPU instance.

    Raises:
        DriverError: if NVML does not list them.
    """
    found: defaultdict[int | None, list[int]] = defaultdict(list)
    for process in await context.processes():
        found[process.gpu_instance].append(process.pid)
    return found

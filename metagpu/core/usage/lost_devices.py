"""Detection of containers whose allocated GPUs or MIG devices no longer exist.

A reset and a reboot remove all instances; an exchanged GPU has another uuid. The kubelet keeps the
answer to Allocate for the life of the pod, and uses it again at each start of the container:
nothing that the daemon does reaches that container. So it is with a GPU whose device node has
another number, and with a prepared ResourceClaim whose GPU is gone; its MIG devices are made again.
The loss is reported once as an Event, and in the status as long as it lasts.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from time import time

import anyio
import msgspec
import structlog

from metagpu.core.availability.conflict import shares_of_moved_nodes
from metagpu.core.contracts.driver import Driver, read_instances
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder, Lease, ShareId, gpu_of, holders_of
from metagpu.core.model.snapshot import Snapshot, once
from metagpu.core.reports.schema.daemon import LostDevicesReport
from metagpu.core.state.events import DevicesLost
from metagpu.core.state.registry import Registry
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming

log = structlog.get_logger()


class AllocatedDevices(msgspec.Struct, frozen=True):
    """Answer to a container's Allocate of one resource, as the kubelet keeps it.

    Attributes:
        shares: ids of the shares.
        devices: the GPUs and MIG devices in the answer, by uuid.
    """

    pod_uid: str
    container: str
    shares: frozenset[ShareId]
    devices: frozenset[str]


class LostDevices(msgspec.Struct, frozen=True, order=True):
    """A container, and those of its devices that no longer exist."""

    namespace: str
    pod: str
    container: str
    pod_uid: str
    devices: tuple[str, ...]

    @property
    def holder(self) -> Holder:
        """The container."""
        return Holder(self.namespace, self.pod, self.container)

    @property
    def fix(self) -> str:
        """The command that fixes the loss."""
        return f"kubectl delete pod -n {self.namespace} {self.pod}"


AllocationReader = Callable[[], Awaitable[Iterable[AllocatedDevices] | None]]
"""Reads the allocations that the kubelet keeps; returns `None` where they cannot be read."""


def describe_loss(container: str, devices: Iterable[str], fix: str) -> str:
    """Describe cause and fix of a loss in one sentence."""
    return (
        f"container {container} holds {', '.join(devices)}, gone or another's after a reset, a "
        f"reboot or a change of the node's GPUs; restarting the container does not help: run {fix}"
    )


def find_lost_devices(
    allocated: Iterable[AllocatedDevices],
    leases: Mapping[ShareId, Lease],
    existing: AbstractSet[str],
    unknown: AbstractSet[GpuId] = frozenset(),
) -> frozenset[LostDevices]:
    """Return the containers that hold devices that no longer exist. Pure.

    Args:
        allocated: the allocations that the kubelet keeps, also of pods that have ended.
        leases: the leases that have not changed since `allocated` was read.
        existing: all GPUs and MIG devices of the node.
        unknown: GPUs whose MIG devices NVML could not list.
    """
    found = set()
    for grant in allocated:
        holders = {leases[share].holder if share in leases else None for share in grant.shares}
        [holder] = holders if len(holders) == 1 else [None]
        gone = grant.devices - existing
        known = unknown.isdisjoint(map(gpu_of, grant.shares))
        if holder is not None and holder.container == grant.container and gone and known:
            devices = tuple(sorted(gone))
            where = holder.namespace, holder.pod, holder.container
            found.add(LostDevices(*where, grant.pod_uid, devices))
    return frozenset(found)


@once
def find_lost_gpus(snapshot: Snapshot) -> frozenset[LostDevices]:
    """Return the containers whose claims' GPUs are gone, or that get others' nodes."""
    found = defaultdict[Holder, set[str]](set)
    for state in snapshot.gpus.values():
        moved = shares_of_moved_nodes(state)
        for named, ids in state.kubelet.nodes.items():
            for lease in (state.leases[i] for i in ids & moved):
                for holder in holders_of(lease):
                    found[holder] |= {f"/dev/nvidia{number}" for number in named}
    for _, lease in snapshot.claim_leases:
        if snapshot.lacks(lease.share.gpu):
            for holder in holders_of(lease):
                found[holder].add(lease.share.gpu)
    pods = {holder: snapshot.pods.find(holder, None) for holder in found}
    return frozenset(
        LostDevices(
            holder.namespace,
            holder.pod,
            holder.container,
            "" if (pod := pods[holder]) is None else pod.uid,
            tuple(sorted(devices)),
        )
        for holder, devices in found.items()
    )


@once
def _held_leases(snapshot: Snapshot) -> Mapping[ShareId, Lease]:
    """Return the leases of Allocate's answers, and those of GPUs that are gone.

    A GPU that nobody can read is not gone, and has no uuid yet.
    """
    gone = {i: lease for i, lease in snapshot.vanished.items() if snapshot.lacks(lease.share.gpu)}
    found = gone | {i: lease for gpu in snapshot.gpus.values() for i, lease in gpu.leases.items()}
    return {i: lease for i, lease in found.items() if lease.resource_claim is None}


@once
def _held_gpus(snapshot: Snapshot) -> frozenset[GpuId]:
    return frozenset(map(gpu_of, _held_leases(snapshot)))


class LostDeviceWatch:
    """A watch for lost devices of containers that the kubelet lists.

    Attributes:
        found: losses that the last two checks have found.
    """

    def __init__(
        self,
        driver: Driver,
        registry: Registry,
        read: AllocationReader,
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.found: frozenset[LostDevices] = frozenset()
        self._driver = driver
        self._registry = registry
        self._read = read
        self._timing = timing

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        before = frozenset[LostDevices]()

        while True:
            await anyio.sleep(self._timing.lost_period)
            seen = await self._check()
            if seen is None:
                continue
            found = seen & before
            for loss in sorted(found - self.found):
                self._report_loss(loss)
            self.found, before = found, seen

    def report(self) -> list[LostDevicesReport]:
        """Return the losses, each with its fix."""
        return [
            LostDevicesReport(
                holder=str(loss.holder),
                pod_uid=loss.pod_uid,
                devices=list(loss.devices),
                reason=describe_loss(loss.container, loss.devices, loss.fix),
                fix=loss.fix,
            )
            for loss in sorted(self.found)
        ]

    async def _check(self) -> frozenset[LostDevices] | None:
        """Return the present losses, `None` where allocations cannot be read."""
        snapshot = self._registry.snapshot
        gpus, lost = snapshot.gpus, find_lost_gpus(snapshot)
        before, held = _held_leases(snapshot), _held_gpus(snapshot)
        leased = {gpu for gpu in held if gpu in gpus and gpus[gpu].gpu.mig_profiles}
        if not leased and held <= gpus.keys():
            return lost
        allocated = await self._read()
        if allocated is None:
            return None

        existing, unknown = set[str](gpus), set[GpuId]()
        for gpu, answer in (await read_instances(self._driver.mig, leased)).items():
            if isinstance(answer, DriverError):
                unknown.add(gpu)  # the health watch reports the error
            else:
                existing |= {
                    part.uuid for instance in answer for part in instance.compute_instances
                }
        now = _held_leases(self._registry.snapshot)
        still = now
        if now is not before:
            still = {share: lease for share, lease in now.items() if before.get(share) == lease}
        return lost | find_lost_devices(allocated, still, existing, unknown)

    def _report_loss(self, loss: LostDevices) -> None:
        log.warning(
            "devices lost",
            container=str(loss.holder),
            devices=", ".join(loss.devices),
            fix=loss.fix,
        )
        self._registry.events.publish(
            DevicesLost(loss.holder, loss.pod_uid, loss.devices, loss.fix, at=time())
        )

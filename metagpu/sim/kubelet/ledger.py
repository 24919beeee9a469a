"""What the simulated kubelet knows of devices: sets and a checkpoint, no I/O.

Mirrors the state of Kubernetes' `ManagerImpl` (pkg/kubelet/cm/devicemanager), the two ways of
going stale included: a device chosen for an allocation that never came to be stays in `allocated`
until the next recount, and what an ended pod held is freed only when somebody looks.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from metagpu.plugins.pb import v1beta1

if TYPE_CHECKING:
    from metagpu.sim.kubelet.wire import Plugin

HEALTHY = "Healthy"
NO_NODE = -1


class Entry(msgspec.Struct, frozen=True):
    """What one container holds of one resource: ids per NUMA node, and the stored answer."""

    devices: Mapping[int, tuple[str, ...]]
    response: v1beta1.ContainerAllocateResponse

    @property
    def ids(self) -> frozenset[str]:
        """The held ids; one on several NUMA nodes counts once."""
        return frozenset(device for devices in self.devices.values() for device in devices)


@dataclass(slots=True)
class Endpoint:
    """A resource's plugin. One restored from the checkpoint has no plugin, no options (§2)."""

    plugin: "Plugin | None"
    options: v1beta1.DevicePluginOptions | None
    stopped_at: float | None = None


def nodes_of(device: v1beta1.Device | None) -> frozenset[int]:
    """Name the NUMA nodes of a device; none when it is unknown or says nothing."""
    topology = device.topology if device is not None else None
    return frozenset(node.id for node in topology.nodes) if topology is not None else frozenset()


class Ledger:
    """The device sets of one kubelet lifetime (kubelet.md §1.4, §1.5, §2).

    `ready` is false while the config sources are not: nothing is freed before.
    """

    def __init__(self, *, clock: Callable[[], float], stop_grace: float) -> None:
        self._clock = clock
        self._stop_grace = stop_grace
        self.endpoints: dict[str, Endpoint] = {}
        self.devices: dict[str, dict[str, v1beta1.Device]] = {}
        self.healthy: dict[str, set[str]] = {}
        self.unhealthy: dict[str, set[str]] = {}
        self.allocated: dict[str, set[str]] = {}
        self.entries: dict[tuple[str, str, str], Entry] = {}
        self.pending: str | None = None
        self.ready = True

    # ---- endpoints -------------------------------------------------------------------------

    def connected(
        self, resource: str, plugin: "Plugin", options: v1beta1.DevicePluginOptions
    ) -> None:
        """Take a registration; the newest wins. Devices come with the first list only."""
        self.endpoints[resource] = Endpoint(plugin, options)

    def received(self, resource: str, devices: Iterable[v1beta1.Device]) -> None:
        """Replace the whole list of a resource. A repeated id may land in both sets."""
        known = self.devices[resource] = {}
        healthy: set[str] = set()
        unhealthy: set[str] = set()
        for device in devices:
            known[device.id] = device
            (healthy if device.health == HEALTHY else unhealthy).add(device.id)
        self.healthy[resource] = healthy
        self.unhealthy[resource] = unhealthy

    def disconnected(self, resource: str) -> None:
        """Stop an endpoint: every device unhealthy, the grace period begins."""
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            return
        healthy = self.healthy.get(resource, set())
        self.unhealthy[resource] = self.unhealthy.get(resource, set()) | healthy
        self.healthy[resource] = set()
        endpoint.stopped_at = self._clock()

    def expire(self) -> set[str]:
        """Forget the resources whose grace period is over; name them (case 20)."""
        gone = {resource for resource in self.healthy if self._is_expired(resource)}
        for resource in gone:
            self.endpoints.pop(resource, None)
            self.healthy.pop(resource, None)
            self.unhealthy.pop(resource, None)
        return gone

    def _is_expired(self, resource: str) -> bool:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            return True
        stopped = endpoint.stopped_at
        return stopped is not None and self._clock() - stopped > self._stop_grace

    # ---- numbers ---------------------------------------------------------------------------

    def capacity(self) -> dict[str, int]:
        """Count all devices per resource."""
        return {
            resource: len(healthy) + len(self.unhealthy.get(resource, ()))
            for resource, healthy in self.healthy.items()
        }

    def allocatable(self) -> dict[str, int]:
        """Count the healthy devices per resource, held ones included."""
        return {resource: len(healthy) for resource, healthy in self.healthy.items()}

    def is_ours(self, resource: str) -> bool:
        """Tell whether a resource is a device plugin's: registered, or held by some pod."""
        return resource in self.healthy or resource in self.allocated

    def available(self, resource: str) -> set[str]:
        """Name the healthy devices that nobody holds."""
        return self.healthy.get(resource, set()) - self.allocated.get(resource, set())

    # ---- holders ---------------------------------------------------------------------------

    def held(self, uid: str, container: str, resource: str) -> frozenset[str] | None:
        """Name the ids that a container holds; None when it was never given any."""
        entry = self.entries.get((uid, container, resource))
        return entry.ids if entry is not None else None

    def holds(self, uid: str) -> bool:
        """Tell whether any container of the pod has an entry."""
        return any(key[0] == uid for key in self.entries)

    def of_container(self, uid: str, container: str) -> dict[str, Entry]:
        """Give the entries of a container, by resource."""
        return {key[2]: entry for key, entry in self.entries.items() if key[:2] == (uid, container)}

    def record(
        self,
        key: tuple[str, str, str],
        ids: Iterable[str],
        response: v1beta1.ContainerAllocateResponse,
    ) -> None:
        """Enter an allocation under (pod uid, container, resource)."""
        known = self.devices.get(key[2], {})
        by_node: dict[int, list[str]] = {}
        for device in ids:
            for node in nodes_of(known.get(device)) or {NO_NODE}:
                by_node.setdefault(node, []).append(device)
        self.entries[key] = Entry({n: tuple(ids) for n, ids in by_node.items()}, response)

    def recount(self) -> None:
        """Make `allocated` what the entries say, dropping ids that a failed try left in it."""
        allocated: dict[str, set[str]] = {}
        for (_, _, resource), entry in self.entries.items():
            allocated.setdefault(resource, set()).update(entry.ids)
        self.allocated = allocated

    def free(self, active: Collection[str]) -> None:
        """Drop what ended pods hold. Without an ended pod nothing is recounted: the leak stays."""
        if not self.ready:
            return
        ended = {key for key in self.entries if key[0] not in active and key[0] != self.pending}
        if not ended:
            return
        for key in ended:
            del self.entries[key]
        self.recount()

    # ---- checkpoint ------------------------------------------------------------------------

    def checkpoint(self) -> str:
        """Write the state as `kubelet_internal_checkpoint` has it (§2)."""
        data = {
            "PodDeviceEntries": [
                {
                    "PodUID": uid,
                    "ContainerName": container,
                    "ResourceName": resource,
                    "DeviceIDs": {str(node): list(ids) for node, ids in entry.devices.items()},
                    "AllocResp": base64.b64encode(bytes(entry.response)).decode(),
                }
                for (uid, container, resource), entry in self.entries.items()
            ],
            "RegisteredDevices": {name: sorted(ids) for name, ids in self.healthy.items()},
        }
        return json.dumps({"Data": data, "Checksum": _checksum(data)})

    def restore(self, text: str) -> None:
        """Take up a checkpoint: holders as they were, every resource stopped with 0/0 devices.

        One that is damaged is passed over, and the devices of running pods may be given out
        again: that is what the kubelet does.
        """
        try:
            document = json.loads(text)
            data = document["Data"]
            if document["Checksum"] != _checksum(data):
                return
            entries = dict(map(_entry, data["PodDeviceEntries"]))
            registered = list(data["RegisteredDevices"])
        except (ValueError, KeyError, TypeError, binascii.Error):
            return
        self.entries = entries
        self.recount()
        for resource in registered:
            self.healthy[resource] = set()
            self.unhealthy[resource] = set()
            self.endpoints[resource] = Endpoint(None, None, stopped_at=self._clock())


def _entry(raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], Entry]:
    response = v1beta1.ContainerAllocateResponse.parse(base64.b64decode(raw["AllocResp"]))
    devices = {int(node): tuple(ids) for node, ids in raw["DeviceIDs"].items()}
    return (raw["PodUID"], raw["ContainerName"], raw["ResourceName"]), Entry(devices, response)


def _checksum(data: object) -> int:
    """Sum up the data. The kubelet hashes a Go dump of it; nobody else may read the file."""
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())

"""The state of the simulated device manager: device sets and a checkpoint, no I/O.

Mirrors the state of Kubernetes' `ManagerImpl` (pkg/kubelet/cm/devicemanager), with its two ways
of going stale: a device chosen for an allocation that failed stays in `allocated` until the next
rebuild, and an ended pod's devices are released only by the next admission or List.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from metagpu.plugins.kubelet.pb import v1beta1

if TYPE_CHECKING:
    from metagpu.sim.kubelet.transport import PluginClient

HEALTHY = "Healthy"
NO_NODE = -1


class DeviceAllocation(msgspec.Struct, frozen=True):
    """One container's devices of one resource, by NUMA node, and the stored answer."""

    devices: Mapping[int, tuple[str, ...]]
    response: v1beta1.ContainerAllocateResponse

    @property
    def ids(self) -> frozenset[str]:
        """Return the held ids; an id on several NUMA nodes counts once."""
        return frozenset(device for devices in self.devices.values() for device in devices)


@dataclass(slots=True)
class EndpointInfo:
    """A resource's plugin; an endpoint from the checkpoint has no client (§2)."""

    plugin: "PluginClient | None"
    options: v1beta1.DevicePluginOptions | None
    stopped_at: float | None = None


def nodes_of(device: v1beta1.Device | None) -> frozenset[int]:
    """Return the NUMA nodes of a device; none without a topology."""
    topology = device.topology if device is not None else None
    return frozenset(node.id for node in topology.nodes) if topology is not None else frozenset()


class DeviceManagerState:
    """The device sets of one kubelet process (kubelet.md §1.4, §1.5, §2).

    `ready` is false until the config sources are ready: no device is released before.
    """

    def __init__(self, *, clock: Callable[[], float], stop_grace: float) -> None:
        self._clock = clock
        self._stop_grace = stop_grace
        self.endpoints: dict[str, EndpointInfo] = {}
        self.devices: dict[str, dict[str, v1beta1.Device]] = {}
        self.healthy: dict[str, set[str]] = {}
        self.unhealthy: dict[str, set[str]] = {}
        self.allocated: dict[str, set[str]] = {}
        self.allocations: dict[tuple[str, str, str], DeviceAllocation] = {}
        self.pending_pod: str | None = None
        self.ready = True

    # ---- endpoints -------------------------------------------------------------------------

    def set_endpoint(
        self, resource: str, plugin: "PluginClient", options: v1beta1.DevicePluginOptions
    ) -> None:
        """Set the endpoint of a registration; the newest wins. Its devices come later."""
        self.endpoints[resource] = EndpointInfo(plugin, options)

    def replace_devices(self, resource: str, devices: Iterable[v1beta1.Device]) -> None:
        """Replace the device list of a resource. A repeated id may be in both sets."""
        known = self.devices[resource] = {}
        healthy: set[str] = set()
        unhealthy: set[str] = set()
        for device in devices:
            known[device.id] = device
            (healthy if device.health == HEALTHY else unhealthy).add(device.id)
        self.healthy[resource] = healthy
        self.unhealthy[resource] = unhealthy

    def stop_endpoint(self, resource: str) -> None:
        """Stop an endpoint: every device is unhealthy, and the grace period begins."""
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            return
        healthy = self.healthy.get(resource, set())
        self.unhealthy[resource] = self.unhealthy.get(resource, set()) | healthy
        self.healthy[resource] = set()
        endpoint.stopped_at = self._clock()

    def remove_expired(self) -> set[str]:
        """Remove the resources whose grace period is over; return their names (case 20)."""
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
        """Return the number of devices per resource."""
        return {
            resource: len(healthy) + len(self.unhealthy.get(resource, ()))
            for resource, healthy in self.healthy.items()
        }

    def allocatable(self) -> dict[str, int]:
        """Return the number of healthy devices per resource, held ones included."""
        return {resource: len(healthy) for resource, healthy in self.healthy.items()}

    def is_known_resource(self, resource: str) -> bool:
        """Return whether a device plugin has the resource, or a pod holds its devices."""
        return resource in self.healthy or resource in self.allocated

    def available(self, resource: str) -> set[str]:
        """Return the healthy devices that no container holds."""
        return self.healthy.get(resource, set()) - self.allocated.get(resource, set())

    # ---- holders ---------------------------------------------------------------------------

    def devices_of(self, uid: str, container: str, resource: str) -> frozenset[str] | None:
        """Return the ids that a container holds; None without an allocation."""
        entry = self.allocations.get((uid, container, resource))
        return entry.ids if entry is not None else None

    def has_allocations(self, uid: str) -> bool:
        """Return whether any container of the pod has an allocation."""
        return any(key[0] == uid for key in self.allocations)

    def allocations_of(self, uid: str, container: str) -> dict[str, DeviceAllocation]:
        """Return the allocations of a container, by resource."""
        return {
            key[2]: entry for key, entry in self.allocations.items() if key[:2] == (uid, container)
        }

    def record_allocation(
        self,
        key: tuple[str, str, str],
        ids: Iterable[str],
        response: v1beta1.ContainerAllocateResponse,
    ) -> None:
        """Record an allocation under (pod uid, container, resource)."""
        known = self.devices.get(key[2], {})
        by_node: dict[int, list[str]] = {}
        for device in ids:
            for node in nodes_of(known.get(device)) or {NO_NODE}:
                by_node.setdefault(node, []).append(device)
        self.allocations[key] = DeviceAllocation(
            {n: tuple(ids) for n, ids in by_node.items()}, response
        )

    def rebuild_allocated(self) -> None:
        """Rebuild `allocated` from the allocations, without ids of failed tries."""
        allocated: dict[str, set[str]] = {}
        for (_, _, resource), entry in self.allocations.items():
            allocated.setdefault(resource, set()).update(entry.ids)
        self.allocated = allocated

    def release_ended_pods(self, active: Collection[str]) -> None:
        """Release the devices of ended pods; without an ended pod a leak stays."""
        if not self.ready:
            return
        ended = {
            key for key in self.allocations if key[0] not in active and key[0] != self.pending_pod
        }
        if not ended:
            return
        for key in ended:
            del self.allocations[key]
        self.rebuild_allocated()

    # ---- checkpoint ------------------------------------------------------------------------

    def checkpoint(self) -> str:
        """Return the state in the format of `kubelet_internal_checkpoint` (§2)."""
        data = {
            "PodDeviceEntries": [
                {
                    "PodUID": uid,
                    "ContainerName": container,
                    "ResourceName": resource,
                    "DeviceIDs": {str(node): list(ids) for node, ids in entry.devices.items()},
                    "AllocResp": base64.b64encode(bytes(entry.response)).decode(),
                }
                for (uid, container, resource), entry in self.allocations.items()
            ],
            "RegisteredDevices": {name: sorted(ids) for name, ids in self.healthy.items()},
        }
        return json.dumps({"Data": data, "Checksum": _checksum(data)})

    def restore(self, text: str) -> None:
        """Restore a checkpoint: holders as before, every resource stopped, no devices.

        A damaged checkpoint is ignored, as the kubelet does: the devices of running pods may be
        allocated again.
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
        self.allocations = entries
        self.rebuild_allocated()
        for resource in registered:
            self.healthy[resource] = set()
            self.unhealthy[resource] = set()
            self.endpoints[resource] = EndpointInfo(None, None, stopped_at=self._clock())


def _entry(raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], DeviceAllocation]:
    response = v1beta1.ContainerAllocateResponse.parse(base64.b64decode(raw["AllocResp"]))
    devices = {int(node): tuple(ids) for node, ids in raw["DeviceIDs"].items()}
    return (raw["PodUID"], raw["ContainerName"], raw["ResourceName"]), DeviceAllocation(
        devices, response
    )


def _checksum(data: object) -> int:
    """Return a checksum of the data.

    The kubelet hashes a Go dump of the data; no other program may read the file.
    """
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())

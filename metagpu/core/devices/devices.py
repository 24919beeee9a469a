"""Devices: shares of a GPU under the names that ResourceClaims have. Pure.

A device is one thing that the scheduler may allocate. Equal shares of a GPU are one device, of
which a ResourceClaim consumes a part; a whole GPU or a MIG instance is a device of its own.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import is_mig, share_suffix, slot_of
from metagpu.core.model.offers import Api
from metagpu.core.model.request_errors import SharingUnavailable, UnknownDevice
from metagpu.core.model.resource_claims import ClaimSharing
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import GpuState, Snapshot

SHARES: Final = "shares"
SLICES: Final = "slices"
MEMORY: Final = "memory"
WHOLE_TYPE: Final = "gpu"
MIG_TYPE: Final = "mig"
MONITOR_TYPE: Final = "monitor"
"""Of the device by which claims with adminAccess look at a GPU: the scheduler counts counters and
capacity for them too, and this device has none."""
GPU_GONE: Final = "the node no longer has this GPU"
NO_SUCH_GPU: Final = "the node has no such GPU; delete the ResourceClaim to get another device"
_GPU_NAME: Final = len("gpu-00000000-0000-0000-0000-000000000000")
"""Characters of a GPU, with which the names of its devices begin."""


class Device(msgspec.Struct, frozen=True):
    """One device of a GPU.

    Attributes:
        name: a DNS label, unique on the node: the GPU, and what of it.
        type: the attribute `type`, by which DeviceClasses select.
        resource: the resource name of its shares in the configuration.
        shares: the shares that it stands for, in order.
        capacity_name: the capacity that ResourceClaims consume; `None` for a device that one
            ResourceClaim has alone.
        unit: the amount of that capacity in each share; bytes of memory, else 1.
    """

    name: str
    gpu: GpuId
    type: str
    backend: str
    resource: ResourceName
    shares: tuple[Share, ...]
    capacity_name: str | None = None
    unit: int = 1

    def count_shares(self, consumed: int | None) -> int:
        """Return the number of shares in an amount of the consumed capacity."""
        if self.capacity_name is None:
            return len(self.shares)
        return -(-(self.unit if consumed is None else consumed) // self.unit)


def pool_name(node: str) -> str:
    """Return the name of the ResourceSlice pool of a node's GPUs."""
    return node


def monitor_pool_name(node: str) -> str:
    """Return the name of the ResourceSlice pool of the devices for monitoring."""
    return f"{node}/{MONITOR_TYPE}"


def devices_of(state: GpuState) -> tuple[Device, ...]:
    """Return the devices of a GPU, in the order in which the scheduler tries them.

    A GPU of a pool with another API has none.
    """
    return _devices(state.shares) if state.api is Api.DRA else ()


def monitor_device(gpu: GpuId) -> Device:
    """Return the device by which claims look at a GPU: it has no share."""
    name = f"{gpu.lower()}-{MONITOR_TYPE}"
    return Device(name, gpu, MONITOR_TYPE, "", ResourceName(""), ())


def find_device(snapshot: Snapshot, pool: str, device: str) -> Device:
    """Find the device of an allocation by its name, which says the GPU.

    Of any pool: an earlier metagpu had a pool for each GPU.

    Raises:
        UnknownDevice: no GPU of this node has it on offer; the pod's events show the text.
    """
    state = snapshot.gpus.get(gpu_of_device(device))
    if state is None:
        raise UnknownDevice(pool, device, NO_SUCH_GPU)
    found = next((published for published in devices_of(state) if published.name == device), None)
    if found is None:
        offered = "offers other devices now" if devices_of(state) else "offers no devices now"
        reason = f"GPU {state.gpu} {offered}; delete the ResourceClaim to get another device"
        raise UnknownDevice(pool, device, reason)
    return found


def gpu_of_device(device: str) -> GpuId:
    """Return the GPU of a device, by its name, which never changes its meaning."""
    return GpuId(device[:_GPU_NAME].replace("gpu-", "GPU-", 1))


def type_of(device: str) -> str:
    """Return the type of a device, by its name."""
    return device[_GPU_NAME:].removeprefix("-").partition("-")[0] or WHOLE_TYPE


def shared_device(device: Device, state: GpuState, sharing: ClaimSharing) -> Device:
    """Return a whole GPU with all shares that another backend has of it.

    Raises:
        SharingUnavailable: the GPU's pool does not have the backend.
    """
    shares = tuple(share for share in state.shares if share.backend == sharing.backend)
    if shares:
        first = shares[0]
        return replace(device, backend=first.backend, resource=first.resource, shares=shares)
    if sharing.required:
        raise SharingUnavailable(
            sharing.field,
            f"the pool of GPU {state.gpu} has no backend {sharing.backend}; add one, or remove the "
            "field",
        )
    return device


@lru_cache(maxsize=64)  # of each GPU: every claim, and every change of a GPU, asks
def _devices(shares: tuple[Share, ...]) -> tuple[Device, ...]:
    together: dict[str, list[Share]] = {}
    for share in shares:
        together.setdefault(_name(share), []).append(share)
    return tuple(_device(name, tuple(those)) for name, those in together.items())


def _name(share: Share) -> str:
    """Return the name of a share's device.

    Legal in a name are lower-case letters, digits and hyphens, 63 at most: `1g.5gb+me@4` becomes
    `1g5gbplusme-4`.
    """
    gpu = share.gpu.lower()
    if "::" not in share.id:
        return gpu
    if not is_mig(share.id):
        return f"{gpu}-{share.backend}"
    slot = slot_of(share.id).replace(".", "").replace("+", "plus").replace("@", "-")
    return f"{gpu}-{MIG_TYPE}-{slot}"


def _device(name: str, shares: tuple[Share, ...]) -> Device:
    first = shares[0]
    whole, mig = "::" not in first.id, is_mig(first.id)
    kind = WHOLE_TYPE if whole else MIG_TYPE if mig else first.backend
    capacity, unit = SLICES if first.replica else SHARES, 1
    if first.by_size:
        capacity, unit = MEMORY, first.memory
    alone = whole or (mig and share_suffix(first.id) == "")
    return Device(
        *(name, first.gpu, kind, first.backend, first.resource, shares),
        None if alone else capacity,
        unit,
    )


class ExtendedResource(msgspec.Struct, frozen=True):
    """The `extendedResourceName` of a DeviceClass.

    Attributes:
        created: the time of the class's creation, in the API server's form.
        selectors: its CEL expressions, as they are written.
    """

    name: str
    device_class: str
    created: str
    selectors: str


def extended_resource_of(device_class: Mapping[str, Any]) -> ExtendedResource | None:
    """Return what a DeviceClass serves in `limits`, `None` for nothing."""
    metadata, spec = device_class["metadata"], device_class.get("spec") or {}
    name = spec.get("extendedResourceName")
    if not name:
        return None
    expressions = (
        selector.get("cel", {}).get("expression", "") for selector in spec.get("selectors") or ()
    )
    created = str(metadata.get("creationTimestamp") or "")
    return ExtendedResource(name, metadata["name"], created, "\n".join(expressions))


def classes_of_driver(found: Iterable[ExtendedResource], driver: str) -> Mapping[str, str]:
    """Return the class of each extended resource whose selectors name a driver.

    Of two classes with one resource the scheduler takes the younger.
    """
    return {
        resource.name: resource.device_class
        for resource in sorted(found, key=lambda resource: resource.created)
        if any(quoted in resource.selectors for quoted in (f"'{driver}'", f'"{driver}"'))
    }

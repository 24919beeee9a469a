"""The allocation of a ResourceClaim: what the scheduler chose of this driver.

Only these fields of the API server's object are decoded; a claim may have results of other drivers
too.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from metagpu.core.config.errors import ConfigError
from metagpu.core.config.units import Quantity
from metagpu.core.devices.devices import MONITOR_TYPE, gpu_of_device, type_of
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import ResourceClaimUnusable
from metagpu.core.model.resource_claims import (
    AllocatedPart,
    ClaimSharing,
    OpaqueParameters,
    ReadSharing,
)
from metagpu.core.model.shares import ResourceClaimRef

ReadResourceClaim = Callable[[ResourceClaimRef], Awaitable[Mapping[str, Any]]]
"""Reads a ResourceClaim by its namespace and name; raises an error of metagpu if it cannot."""


class AllocatedDevice(msgspec.Struct, frozen=True, rename="camel"):
    """One allocated device.

    Attributes:
        request: the request of the claim that it is for, `request/subrequest` for an alternative.
        share_id: tells allocations of one device apart.
        consumed_capacity: the amounts of the device's capacities that the claim consumes.
        admin_access: whether the claim only looks at the device.
        sharing: how the claim's containers share the device, `None` for a device as it is.
    """

    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: Mapping[str, str | int] = {}
    admin_access: bool = False
    sharing: ClaimSharing | None = None

    @property
    def main_request(self) -> str:
        """The name by which containers name the request."""
        return self.request.partition("/")[0]

    def consumed(self, capacity: str | None) -> int | None:
        """Return the consumed amount of a capacity, `None` where the result names none."""
        if capacity is None or capacity not in self.consumed_capacity:
            return None
        return _parse_amount(self.consumed_capacity[capacity])


def _parse_amount(amount: str | int) -> int:
    return Quantity.parse(str(amount).replace("k", "K"))


class _Opaque(msgspec.Struct, frozen=True):
    driver: str = ""
    parameters: Any = None


class _Config(msgspec.Struct, frozen=True):
    source: str = ""
    requests: tuple[str, ...] = ()
    opaque: _Opaque = _Opaque()


class _Devices(msgspec.Struct, frozen=True):
    results: tuple[AllocatedDevice, ...] = ()
    config: tuple[_Config, ...] = ()


class _Allocation(msgspec.Struct, frozen=True):
    devices: _Devices = _Devices()


class _Consumer(msgspec.Struct, frozen=True):
    resource: str = ""
    name: str = ""


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: tuple[_Consumer, ...] = ()


class _Metadata(msgspec.Struct, frozen=True):
    uid: str = ""


class _ResourceClaim(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    status: _Status = _Status()


class Allocation(msgspec.Struct, frozen=True):
    """The results of a claim that are this driver's, and the pods that may use them.

    Attributes:
        results: devices that the claim holds.
        admin: devices that it looks at, and that others may hold; then it holds none.
    """

    results: tuple[AllocatedDevice, ...]
    pods: tuple[str, ...] = ()
    admin: tuple[AllocatedDevice, ...] = ()


def parse_allocation(
    ref: ResourceClaimRef,
    found: Mapping[str, Any],
    driver: str,
    read_sharing: ReadSharing | None = None,
) -> Allocation:
    """Return what a ResourceClaim was allocated of a driver.

    Args:
        ref: the claim as the kubelet names it.
        found: the claim as the API server has it.
        driver: the name of the driver.
        read_sharing: reads the driver's opaque parameters, `None` where it has none.

    Raises:
        ResourceClaimUnusable: it is another claim of that name, is not allocated, or asks for
            something that the driver does not have.
    """
    try:
        claim = msgspec.convert(found, _ResourceClaim)
    except msgspec.ValidationError as error:
        raise ResourceClaimUnusable(str(ref), f"the API server's answer: {error}") from error
    if claim.metadata.uid != ref.uid:
        raise ResourceClaimUnusable(
            str(ref),
            f"the kubelet names the uid {ref.uid}, and the API server has {claim.metadata.uid}; "
            "the claim was made again, and the kubelet has still the earlier one",
        )
    if claim.status.allocation is None:
        raise ResourceClaimUnusable(str(ref), "it is not allocated")
    devices = claim.status.allocation.devices
    ours = [device for device in devices.results if device.driver == driver]
    results = tuple(device for device in ours if not device.admin_access)
    admin = tuple(device for device in ours if device.admin_access)
    if any(type_of(device.device) == MONITOR_TYPE for device in results):
        reason = (
            "it has a device that only shows its GPU: set `adminAccess: true` in the request, in a "
            "namespace with the label resource.kubernetes.io/admin-access"
        )
        raise ResourceClaimUnusable(str(ref), reason)
    if results and admin:
        reason = (
            f"{_requests(admin)} asks for adminAccess and {_requests(results)} does not: one "
            "container would compute on all the GPUs that it only looks at; make two claims, for "
            "pods of their own"
        )
        raise ResourceClaimUnusable(str(ref), reason)
    _check_amounts(ref, results)
    if configs := [config for config in devices.config if config.opaque.driver == driver]:
        if read_sharing is None:
            reason = f"it has opaque parameters for {driver}, which has none; remove them"
            raise ResourceClaimUnusable(str(ref), reason)
        _refuse_for_admin(ref, admin, configs)
        results = _with_sharing(ref, results, configs, read_sharing)
    pods = tuple(
        consumer.name for consumer in claim.status.reserved_for if consumer.resource == "pods"
    )
    return Allocation(results, pods, admin)


def is_reserved(ref: ResourceClaimRef, found: Mapping[str, Any], gpus: Collection[GpuId]) -> bool:
    """Return whether anybody may use a claim's device of one of these GPUs.

    True for a claim that cannot be read: nobody says that its containers have ended.
    """
    try:
        claim = msgspec.convert(found, _ResourceClaim)
    except msgspec.ValidationError:
        return True
    allocation = claim.status.allocation or _Allocation()
    allocated = (gpu_of_device(device.device) for device in allocation.devices.results)
    reserved = claim.metadata.uid == ref.uid and bool(claim.status.reserved_for)
    return reserved and any(gpu in gpus for gpu in allocated)


def _requests(results: Sequence[AllocatedDevice]) -> str:
    return ", ".join(sorted({device.main_request for device in results}))


def _refuse_for_admin(
    ref: ResourceClaimRef, admin: Sequence[AllocatedDevice], configs: Sequence[_Config]
) -> None:
    """Refuse the claim's own parameters for requests with adminAccess."""
    if admin and any(config.source != "FromClass" for config in configs):
        reason = (
            f"it has opaque parameters for {_requests(admin)} with adminAccess, which only looks "
            "at a GPU; remove them"
        )
        raise ResourceClaimUnusable(str(ref), reason)


def _with_sharing(
    ref: ResourceClaimRef,
    results: tuple[AllocatedDevice, ...],
    configs: Sequence[_Config],
    read_sharing: ReadSharing,
) -> tuple[AllocatedDevice, ...]:
    """Return the results with what the claim's parameters say of each."""
    parameters = [
        OpaqueParameters(config.opaque.parameters, config.requests, config.source == "FromClass")
        for config in configs
    ]
    parts = [
        AllocatedPart(device.request, type_of(device.device), gpu_of_device(device.device))
        for device in results
    ]
    try:
        found = read_sharing(parameters, parts)
    except ConfigError as error:
        raise ResourceClaimUnusable(str(ref), str(error)) from error
    return tuple(replace(device, sharing=its) for device, its in zip(results, found, strict=True))


def _check_amounts(ref: ResourceClaimRef, results: tuple[AllocatedDevice, ...]) -> None:
    """Refuse amounts that the scheduler does not write: it rounds up to whole steps."""
    for result in results:
        for capacity, amount in result.consumed_capacity.items():
            try:
                usable = _parse_amount(amount) > 0
            except ValueError:
                usable = False
            if not usable:
                reason = f"it consumes {amount} of {capacity}; delete it, and make it again"
                raise ResourceClaimUnusable(str(ref), reason)

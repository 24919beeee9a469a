"""Requests of a ResourceClaim, and the devices that fulfil each. Pure."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from metagpu.sim.allocation.amounts import AllocationError, Amounts, consumed_amount, parse_amount
from metagpu.sim.allocation.pools import Document, PooledDevice
from metagpu.sim.allocation.selectors import check_selector, selects

MAX_RESULTS: Final = 32
"""Devices of one claim."""
_PREVENTING: Final = frozenset({"NoSchedule", "NoExecute"})


class RequestedDevices(msgspec.Struct, frozen=True):
    """One request, or one alternative of a request.

    Attributes:
        name: of the request.
        alternative: the name behind it, empty for a request without alternatives.
        device_class: the name of the DeviceClass.
        count: the number of devices, `None` for all that it selects.
        selectors: expressions in CEL, those of the class first.
        amounts: what it asks for of each capacity.
    """

    name: str
    alternative: str
    device_class: str
    count: int | None
    selectors: tuple[str, ...]
    amounts: Amounts
    tolerations: tuple[Document, ...]

    @property
    def result_name(self) -> str:
        """The name of the request in the result."""
        return f"{self.name}/{self.alternative}" if self.alternative else self.name

    def selects(self, device: PooledDevice) -> bool:
        """Return whether class and request select a device.

        Raises:
            AllocationError: a selector fails on the device.
        """
        return all(selects(selector, device.id.driver, device.spec) for selector in self.selectors)

    def consumed(self, device: PooledDevice, used: Amounts) -> Amounts | None:
        """Return what an allocation consumes of each capacity, `None` if that is too much.

        Args:
            device: the device.
            used: what other allocations of the device consume.
        """
        capacities: Mapping[str, Any] = device.spec.get("capacity") or {}
        if self.amounts.keys() - capacities.keys():
            return None
        found = {}
        for name, capacity in capacities.items():
            amount = consumed_amount(self.amounts.get(name), capacity)
            if amount is None or amount + used.get(name, 0) > parse_amount(capacity["value"]):
                return None
            found[name] = amount
        return found

    def tolerates(self, device: PooledDevice) -> bool:
        """Return whether no taint keeps the request from a device."""
        return all(
            taint["effect"] not in _PREVENTING
            or any(_tolerates(toleration, taint) for toleration in self.tolerations)
            for taint in device.spec.get("taints") or ()
        )


class WantedDevices(msgspec.Struct, frozen=True):
    """A claim without devices: the alternatives of each request, and constraints."""

    name: str
    requests: tuple[tuple[RequestedDevices, ...], ...]
    constraints: tuple[Document, ...]


def read_claim(claim: Document, classes: Mapping[str, Document]) -> WantedDevices:
    """Read the requests and constraints of a ResourceClaim.

    Raises:
        AllocationError: a class does not exist, or the claim asks for what is not simulated, or for
            too many devices.
    """
    metadata, devices = claim["metadata"], claim["spec"].get("devices") or {}
    title = f"{metadata.get('namespace', 'default')}/{metadata['name']}"
    requests = tuple(_alternatives(request, classes) for request in devices.get("requests") or ())
    least = sum(
        min(alternative.count or 0 for alternative in alternatives) for alternatives in requests
    )
    if least > MAX_RESULTS:
        raise AllocationError(
            f"claim {title}: number of requested devices {least} exceeds the claim limit of "
            f"{MAX_RESULTS}"
        )
    return WantedDevices(title, requests, tuple(devices.get("constraints") or ()))


def _alternatives(
    request: Document, classes: Mapping[str, Document]
) -> tuple[RequestedDevices, ...]:
    if "firstAvailable" in request:
        return tuple(
            _requested(request["name"], alternative["name"], alternative, classes)
            for alternative in request["firstAvailable"]
        )
    return (_requested(request["name"], "", request["exactly"], classes),)


def _requested(
    name: str, alternative: str, spec: Document, classes: Mapping[str, Document]
) -> RequestedDevices:
    kind = spec["deviceClassName"]
    if kind not in classes:
        raise AllocationError(f"request {name}: device class {kind} does not exist")
    if spec.get("adminAccess"):
        raise AllocationError(f"request {name}: the simulator has no adminAccess")
    own = (*(classes[kind].get("spec") or {}).get("selectors", ()), *spec.get("selectors", ()))
    selectors = tuple(selector["cel"]["expression"] for selector in own)
    for expression in selectors:
        check_selector(expression)
    asked = (spec.get("capacity") or {}).get("requests") or {}
    return RequestedDevices(
        name=name,
        alternative=alternative,
        device_class=kind,
        count=None if spec.get("allocationMode") == "All" else int(spec.get("count") or 1),
        selectors=selectors,
        amounts={capacity: parse_amount(amount) for capacity, amount in asked.items()},
        tolerations=tuple(spec.get("tolerations") or ()),
    )


def _tolerates(toleration: Document, taint: Document) -> bool:
    """Return whether a toleration covers a taint; what it leaves out covers all."""
    if any(toleration.get(field) not in {None, "", taint[field]} for field in ("effect", "key")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("value", "") == taint.get("value", ""))

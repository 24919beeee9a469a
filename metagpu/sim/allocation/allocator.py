"""The search for devices: the first full solution in the order of pools. Pure.

Each device that a claim needs is looked for among all devices, and taken back where the rest of the
claims cannot be allocated with it. A request of several devices takes them in their order, so that
it gets different ones. Nothing is scored.

Constraints keep what the real allocator keeps: `distinctAttribute` remembers one value for each
request, the latest.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

import msgspec

from metagpu.sim.allocation.amounts import AllocationError, Amounts, format_amount, parse_amount
from metagpu.sim.allocation.pools import (
    CounterKey,
    DeviceId,
    DevicePools,
    Document,
    PooledDevice,
)
from metagpu.sim.allocation.requests import (
    MAX_RESULTS,
    RequestedDevices,
    WantedDevices,
    read_claim,
)


class DeviceConstraint(Protocol):
    """A constraint, with the devices that the claim has so far."""

    def add(self, request: RequestedDevices, device: PooledDevice) -> bool:
        """Add a device if the constraint allows it; return whether it does."""
        ...

    def remove(self, request: RequestedDevices) -> None:
        """Remove the device that was added last."""
        ...


def build_constraint(spec: Document) -> DeviceConstraint:
    """Build a constraint of a claim, without a device.

    Raises:
        AllocationError: the constraint is of no known kind.
    """
    requests = frozenset(spec.get("requests") or ())
    if "matchAttribute" in spec:
        return _MatchAttribute(spec["matchAttribute"], requests)
    if "distinctAttribute" in spec:
        return _DistinctAttribute(spec["distinctAttribute"], requests)
    raise AllocationError("empty constraint (unsupported constraint type?)")


class _AttributeConstraint:
    def __init__(self, attribute: str, requests: frozenset[str]) -> None:
        self._attribute, self._requests, self._count = attribute, requests, 0

    def _is_meant(self, request: RequestedDevices) -> bool:
        return not self._requests or not self._requests.isdisjoint(
            (request.name, request.result_name)
        )

    def add(self, request: RequestedDevices, device: PooledDevice) -> bool:
        if not self._is_meant(request):
            return True
        value = device.attribute(self._attribute)
        if value is None or (self._count and not self._allows(value)):
            return False
        self._count += 1
        self._keep(request.name, value)
        return True

    def remove(self, request: RequestedDevices) -> None:
        if self._is_meant(request):
            self._count -= 1
            self._forget(request.name)

    def _allows(self, value: Any) -> bool:  # noqa: ANN401 - any attribute
        raise NotImplementedError

    def _keep(self, request: str, value: Any) -> None:  # noqa: ANN401 - any attribute
        raise NotImplementedError

    def _forget(self, request: str) -> None:
        """Forget the value of a request."""


class _MatchAttribute(_AttributeConstraint):
    """All devices have the value of the first."""

    _value: Any = None

    def _allows(self, value: Any) -> bool:  # noqa: ANN401 - any attribute
        return bool(value == self._value)

    def _keep(self, request: str, value: Any) -> None:  # noqa: ANN401, ARG002 - any attribute
        self._value = value


class _DistinctAttribute(_AttributeConstraint):
    """No two requests have the same value."""

    def __init__(self, attribute: str, requests: frozenset[str]) -> None:
        super().__init__(attribute, requests)
        self._values: dict[str, Any] = {}

    def _allows(self, value: Any) -> bool:  # noqa: ANN401 - any attribute
        return value not in self._values.values()

    def _keep(self, request: str, value: Any) -> None:  # noqa: ANN401 - any attribute
        self._values[request] = value

    def _forget(self, request: str) -> None:
        self._values.pop(request, None)


class AllocationResult(msgspec.Struct, frozen=True):
    """One device for one request.

    Attributes:
        request: the request's name, `request/alternative` for one of several.
        device_class: the class by which the request found it.
        consumed: what the claim consumes of a shared device, as Kubernetes writes it; `None` for a
            device that one claim has alone.
    """

    request: str
    id: DeviceId
    device_class: str
    consumed: Mapping[str, str] | None = None
    tolerations: tuple[Document, ...] = ()


class HeldDevices(msgspec.Struct, frozen=True):
    """The devices of other claims.

    Attributes:
        alone: the devices that one claim has alone.
        shared: what all claims together consume of a shared device.
    """

    alone: frozenset[DeviceId] = frozenset()
    shared: Mapping[DeviceId, Amounts] = {}


def held_devices(claims: Iterable[Document]) -> HeldDevices:
    """Return what allocated claims have."""
    alone = set()
    shared = defaultdict[DeviceId, dict[str, Fraction]](dict)
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            device = DeviceId(result["driver"], result["pool"], result["device"])
            if "shareID" not in result:
                alone.add(device)
                continue
            used = shared[device]
            for name, amount in (result.get("consumedCapacity") or {}).items():
                used[name] = used.get(name, Fraction(0)) + parse_amount(amount)
    return HeldDevices(frozenset(alone), shared)


def allocate(
    pools: DevicePools,
    claims: Sequence[Document],
    classes: Mapping[str, Document],
    held: HeldDevices,
) -> Sequence[Sequence[AllocationResult]] | None:
    """Find devices for all claims of a pod, `None` without a solution.

    They are in the order of the claims.

    Raises:
        AllocationError: a claim can be allocated nowhere; the text is the scheduler's.
    """
    wanted = [read_claim(claim, classes) for claim in claims]
    search = _Search(pools, wanted, held)
    return search.results if search.find() else None


class _Taken(msgspec.Struct):
    """A device that the search has taken, with what to take back."""

    device: PooledDevice
    request: RequestedDevices
    claim: int
    consumed: Amounts
    counted: bool
    constraints: int = 0


class _Search:
    """One search; `results` are the devices so far, by claim."""

    def __init__(
        self, pools: DevicePools, claims: Sequence[WantedDevices], held: HeldDevices
    ) -> None:
        self._pools, self._claims = pools, claims
        self.results: list[list[AllocationResult]] = [[] for _ in claims]
        self._constraints: list[list[DeviceConstraint]] = [
            [build_constraint(constraint) for constraint in claim.constraints] for claim in claims
        ]
        self._alone = set(held.alone)
        self._used = {device: dict(amounts) for device, amounts in held.shared.items()}
        self._claims_on = dict.fromkeys(held.shared, 1)
        self._free = dict(pools.counters)
        self._selected: dict[tuple[int, DeviceId], bool] = {}
        for pooled_device in pools.devices:
            if pooled_device.id in held.alone or pooled_device.id in held.shared:
                self._count(pooled_device.consumes, -1)

    def find(self, claim: int = 0, request: int = 0) -> bool:
        """Allocate from this request on; return whether all of them have their devices."""
        if claim == len(self._claims):
            return True
        requests = self._claims[claim].requests
        if request == len(requests):
            return self.find(claim + 1)
        return any(self._find_for(claim, request, devices) for devices in requests[request])

    def _find_for(self, claim: int, request: int, wanted: RequestedDevices) -> bool:
        """Allocate one alternative of a request, and all that comes behind it."""
        if wanted.count is not None:
            return self._find_some(claim, request, wanted, wanted.count, 0)
        found = [device for device in self._pools.devices if self._may_have(wanted, device)]
        return (
            bool(found)
            and not self._pools.problems
            and self._find_all(claim, request, wanted, found)
        )

    def _find_some(
        self, claim: int, request: int, wanted: RequestedDevices, left: int, first: int
    ) -> bool:
        """Allocate so many devices, none before the first."""
        if not left:
            return self.find(claim, request + 1)
        if len(self.results[claim]) + left > MAX_RESULTS:
            return False
        for place in range(first, len(self._pools.devices)):
            device = self._pools.devices[place]
            if device.id in self._alone or not self._may_have(wanted, device):
                continue
            taken = self._take(claim, wanted, device)
            if taken is None:
                continue
            if self._find_some(claim, request, wanted, left - 1, place + 1):
                return True
            self._give_back(taken)
        return False

    def _find_all(
        self, claim: int, request: int, wanted: RequestedDevices, devices: Sequence[PooledDevice]
    ) -> bool:
        """Allocate exactly these devices."""
        if not devices:
            return self.find(claim, request + 1)
        if len(self.results[claim]) + len(devices) > MAX_RESULTS:
            return False
        taken = self._take(claim, wanted, devices[0])
        if taken is None:
            return False
        if self._find_all(claim, request, wanted, devices[1:]):
            return True
        self._give_back(taken)
        return False

    def _may_have(self, wanted: RequestedDevices, device: PooledDevice) -> bool:
        key = id(wanted), device.id
        if key not in self._selected:
            self._selected[key] = wanted.selects(device)
        return (
            self._selected[key]
            and wanted.consumed(device, self._used.get(device.id, {})) is not None
        )

    # ---- one device ------------------------------------------------------------------------

    def _take(self, claim: int, wanted: RequestedDevices, device: PooledDevice) -> _Taken | None:
        """Take a device for a claim, unless something is in the way."""
        used = self._used.get(device.id, {})
        consumed = wanted.consumed(device, used)
        if device.id in self._alone or consumed is None or not wanted.tolerates(device):
            return None
        # A shared device takes its counters once, with its first claim.
        counted = bool(device.consumes) and not (
            device.shared and self._claims_on.get(device.id, 0)
        )
        if counted and any(self._free[counter] < n for counter, n in device.consumes.items()):
            return None
        taken = _Taken(device, wanted, claim, consumed if device.shared else {}, counted)
        for constraint in self._constraints[claim]:
            if not constraint.add(wanted, device):
                self._leave_constraints(taken)
                return None
            taken.constraints += 1
        self._note(taken, used)
        return taken

    def _note(self, taken: _Taken, used: Amounts) -> None:
        device, wanted = taken.device, taken.request
        if taken.counted:
            self._count(device.consumes, -1)
        if device.shared:
            self._claims_on[device.id] = self._claims_on.get(device.id, 0) + 1
            self._used[device.id] = {
                name: amount + used.get(name, 0) for name, amount in taken.consumed.items()
            }
        else:
            self._alone.add(device.id)
        self.results[taken.claim].append(
            AllocationResult(
                wanted.result_name,
                device.id,
                wanted.device_class,
                {name: format_amount(fraction) for name, fraction in taken.consumed.items()}
                if device.shared
                else None,
                wanted.tolerations,
            )
        )

    def _give_back(self, taken: _Taken) -> None:
        """Undo what `_take` did; the device that was taken last comes first."""
        device = taken.device
        self.results[taken.claim].pop()
        if device.shared:
            self._claims_on[device.id] -= 1
            used = self._used[device.id]
            self._used[device.id] = {
                name: amount - taken.consumed[name] for name, amount in used.items()
            }
        else:
            self._alone.remove(device.id)
        self._leave_constraints(taken)
        if taken.counted:
            self._count(device.consumes, 1)

    def _leave_constraints(self, taken: _Taken) -> None:
        for constraint in reversed(self._constraints[taken.claim][: taken.constraints]):
            constraint.remove(taken.request)

    def _count(self, consumed: Mapping[CounterKey, Fraction], sign: int) -> None:
        for key, amount in consumed.items():
            self._free[key] += sign * amount

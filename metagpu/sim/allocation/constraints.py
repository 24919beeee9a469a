"""Constraints between the devices of one claim.

They keep what the real allocator keeps: the constraint `distinctAttribute` remembers one value for
each request, the latest.
"""

from typing import Any, Protocol

from metagpu.sim.allocation.errors import AllocationError
from metagpu.sim.allocation.pools import Document, PooledDevice
from metagpu.sim.allocation.requests import RequestedDevices


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

"""Obstacles of claims: the request that has no device, and its reason. Pure.

The scheduler gives no reason, so each part of the claims is tried alone: a request, a request with
those before it, a constraint less.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from metagpu.sim.allocation.allocator import HeldDevices, allocate
from metagpu.sim.allocation.amounts import AllocationError, format_amount, parse_amount
from metagpu.sim.allocation.pools import DevicePools, Document, PooledDevice
from metagpu.sim.allocation.requests import RequestedDevices, read_claim
from metagpu.sim.allocation.selectors import SelectorError, UnknownSelectorError, selects


class ObstacleKind(StrEnum):
    """Answer about a claim that has an obstacle."""

    NO_DEVICE = "no"
    ERROR = "error"
    """Kubernetes refuses it, or its scheduler fails on it."""
    UNKNOWN = "unknown"
    """metagpu cannot evaluate a selector of the claim."""

    @classmethod
    def of(cls, error: AllocationError) -> "ObstacleKind":
        """Return what an error of the search means."""
        kinds = {UnknownSelectorError: cls.UNKNOWN, SelectorError: cls.ERROR}
        return kinds.get(type(error), cls.NO_DEVICE)


class ClaimObstacle(msgspec.Struct, frozen=True):
    """One obstacle between a claim and its devices.

    Attributes:
        claim: the claim's place among those of the pod.
        request: the name of the request, empty for the claim as a whole.
        kind: says what the reason means.
    """

    claim: int
    request: str
    reason: str
    kind: ObstacleKind = ObstacleKind.NO_DEVICE


class _Trial(msgspec.Struct, frozen=True):
    """The devices of a node, and their classes."""

    pools: DevicePools
    classes: Mapping[str, Document]
    held: HeldDevices = HeldDevices()

    def fits(self, *claims: Document) -> bool:
        return allocate(self.pools, claims, self.classes, self.held) is not None


def find_obstacle(
    pools: DevicePools, claims: Sequence[Document], classes: Mapping[str, Document]
) -> ClaimObstacle | None:
    """Return what keeps the claims of a pod from an idle node, `None` if they fit."""
    trial = _Trial(pools, classes)
    for place, claim in enumerate(claims):
        if (found := _own_obstacle(trial, place, claim)) is not None:
            return found
        try:
            fits = trial.fits(*claims[: place + 1])
        except AllocationError as error:  # a selector fails on a device that no trial came to
            return ClaimObstacle(place, "", str(error), ObstacleKind.of(error))
        if not fits:
            reason = "no device is left after those of the claims before it"
            return ClaimObstacle(place, "", reason)
    return None


def _own_obstacle(trial: _Trial, place: int, claim: Document) -> ClaimObstacle | None:
    """Return what keeps a claim from an idle node, were it the pod's only one."""
    devices = claim["spec"].get("devices") or {}
    if refused := _refused_by_the_api(devices):
        return ClaimObstacle(place, "", refused, ObstacleKind.ERROR)
    requests, constraints = devices.get("requests") or (), devices.get("constraints") or ()
    if not requests:
        return ClaimObstacle(place, "", "it requests no device: write spec.devices.requests")
    for count, request in enumerate(requests, start=1):
        name = request["name"]
        try:
            reason = _request_reason(trial, claim, requests[:count], constraints)
        except AllocationError as error:
            reason = str(error).removeprefix(f"request {name}: ")
            return ClaimObstacle(place, name, reason, ObstacleKind.of(error))
        if reason:
            return ClaimObstacle(place, name, reason)
    return None


def _refused_by_the_api(devices: Document) -> str:
    """Return why the API server takes no such claim, nothing if it does.

    A constraint and a config may name requests, and alternatives as `request/alternative`.
    """
    requests = devices.get("requests") or ()
    known = [request["name"] for request in requests] + [
        f"{request['name']}/{each['name']}"
        for request in requests
        for each in request.get("firstAvailable") or ()
    ]
    of_config = [("config", entry) for entry in devices.get("config") or ()]
    constraints = devices.get("constraints") or ()
    if not all(
        {"matchAttribute", "distinctAttribute"} & constraint.keys() for constraint in constraints
    ):
        return "a constraint has neither matchAttribute nor distinctAttribute"
    of_constraints = [
        (f"constraint {_shown_constraint(constraint)}", constraint) for constraint in constraints
    ]
    for place, entry in of_constraints + of_config:
        if missing := [name for name in entry.get("requests") or () if name not in known]:
            has = ", ".join(known) or "none"
            return f"its {place} names the request {missing[0]}, and the claim has: {has}"
    return ""


def _request_reason(
    trial: _Trial, claim: Document, requests: Sequence[Document], constraints: Sequence[Document]
) -> str:
    """Return why the last of these requests has no device, nothing if it has one."""
    alone = _claim_of(claim, requests[-1:])
    if not trial.fits(alone):
        return _reason(trial, alone)
    if not trial.fits(_claim_of(claim, requests)):
        before = ", ".join(request["name"] for request in requests[:-1])
        return f"no device is left after those of {before}"
    if not trial.fits(_claim_of(claim, requests, constraints)):
        return _constraint_reason(trial, claim, requests, constraints)
    return ""


def _claim_of(
    claim: Document, requests: Sequence[Document], constraints: Sequence[Document] = ()
) -> Document:
    """Return a claim with some of its requests and constraints."""
    devices = {"requests": list(requests), "constraints": list(constraints)}
    return {**claim, "spec": {"devices": devices}}


def _constraint_reason(
    trial: _Trial, claim: Document, requests: Sequence[Document], constraints: Sequence[Document]
) -> str:
    alone = [
        constraint
        for constraint in constraints
        if not trial.fits(_claim_of(claim, requests, [constraint]))
    ]
    named = " and ".join(map(_shown_constraint, alone or constraints))
    return f"no devices fulfil the constraint {named}"


def _shown_constraint(constraint: Document) -> str:
    kind = "matchAttribute" if "matchAttribute" in constraint else "distinctAttribute"
    return f"{kind} {constraint.get(kind)}"


def _reason(trial: _Trial, claim: Document) -> str:
    """Return why a claim with one request has no device, of each alternative."""
    [alternatives] = read_claim(claim, trial.classes).requests
    return "; ".join(
        (f"{alternative.alternative}: " if alternative.alternative else "")
        + _alternative_reason(trial, alternative)
        for alternative in alternatives
    )


def _alternative_reason(trial: _Trial, wanted: RequestedDevices) -> str:
    kind, devices = wanted.device_class, list(trial.pools.devices)
    of_class = len((trial.classes[kind].get("spec") or {}).get("selectors") or ())
    for place, expression in enumerate(wanted.selectors):
        devices = [
            device for device in devices if selects(expression, device.id.driver, device.spec)
        ]
        if not devices:
            of_it = place < of_class
            return (
                f"no device is of the class {kind}"
                if of_it
                else f"no device of {kind} fulfils {expression}"
            )
    fitting = [device for device in devices if wanted.consumed(device, {}) is not None]
    if not fitting:
        return _capacity_reason(wanted, devices)
    tolerated = [device for device in fitting if wanted.tolerates(device)]
    if not tolerated:
        tainted = f"{_count(fitting)} of {kind}"
        return f"the request does not tolerate the taint {_taints(fitting)} of {tainted}"
    return _count_reason(wanted, len(tolerated))


def _count_reason(wanted: RequestedDevices, fitting: int) -> str:
    kind, count = wanted.device_class, wanted.count
    if count is not None and count > fitting:
        return f"{count} devices are requested, and {fitting} of {kind} fit"
    together = "all" if count is None else str(count)
    return (
        f"{fitting} devices of {kind} fit, and not {together} of them together: they are parts of "
        "the same GPUs"
    )


def _capacity_reason(wanted: RequestedDevices, devices: Sequence[PooledDevice]) -> str:
    kind = wanted.device_class
    known = {name for device in devices for name in _capacities(device)}
    if missing := sorted(wanted.amounts.keys() - known):
        has = ", ".join(sorted(known)) or "none"
        return f"devices of {kind} have no capacity {missing[0]}; they have: {has}"
    for name, amount in wanted.amounts.items():
        most = max(
            _most(_capacities(device)[name]) for device in devices if name in _capacities(device)
        )
        if amount > most:
            asked = f"{format_amount(amount)} of the capacity {name} are requested"
            return f"{asked}, and a device of {kind} has {format_amount(most)} at most"
    return f"no device of {kind} has all of the requested capacities"


def _most(capacity: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a Fraction
    """Return the largest amount that a request may have of a capacity."""
    limits = (capacity.get("requestPolicy") or {}).get("validRange") or {}
    value = parse_amount(capacity["value"])
    return min(value, parse_amount(limits["max"])) if "max" in limits else value


def _capacities(device: PooledDevice) -> Mapping[str, Any]:
    return device.spec.get("capacity") or {}


def _count(devices: Sequence[PooledDevice]) -> str:
    return "1 device" if len(devices) == 1 else f"{len(devices)} devices"


def _taints(devices: Sequence[PooledDevice]) -> str:
    found = {taint["key"]: None for device in devices for taint in device.spec.get("taints") or ()}
    return ", ".join(found)

"""ResourceSlices of one node as pools of devices, in their order. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from metagpu.sim.allocation.amounts import parse_amount

Document = Mapping[str, Any]
"""An object of the API server."""
CounterKey = tuple[str, str, str, str]
"""Driver, pool, counter set and counter."""


class DeviceId(msgspec.Struct, frozen=True):
    """The name of a device in a cluster."""

    driver: str
    pool: str
    device: str


class PooledDevice(msgspec.Struct, frozen=True):
    """A device that may be allocated.

    Attributes:
        spec: the device as its ResourceSlice has it.
        shared: whether several claims may have it at a time.
        consumes: the counters that it takes.
    """

    id: DeviceId
    spec: Document
    shared: bool
    consumes: Mapping[CounterKey, Fraction]

    def attribute(self, name: str) -> Any:  # noqa: ANN401 - any type of attribute
        """Return an attribute by its full name, `None` where the device lacks it."""
        attributes = self.spec.get("attributes") or {}
        domain, _, own = name.rpartition("/")
        return attributes.get(name, attributes.get(own) if domain == self.id.driver else None)


class DevicePools(msgspec.Struct, frozen=True):
    """All devices of a node, pool by pool, and the counters that they take.

    Attributes:
        problems: the pools that no device is allocated from, and why.
    """

    devices: tuple[PooledDevice, ...]
    counters: Mapping[CounterKey, Fraction]
    problems: Mapping[str, str] = {}


def gather_pools(slices: Iterable[Document], node: str) -> DevicePools:
    """Return the devices of a node's ResourceSlices.

    Only the newest generation of a pool counts, and only once all of its slices are there. Pools
    are tried by driver and name, slices by name, devices in the order of their slice.
    """
    by_pool = defaultdict[tuple[str, str], list[Document]](list)
    for piece in slices:
        if piece["spec"].get("nodeName") == node:
            by_pool[piece["spec"]["driver"], piece["spec"]["pool"]["name"]].append(piece)

    devices: list[PooledDevice] = []
    counters: dict[CounterKey, Fraction] = {}
    problems = {}
    for (driver, pool), found in sorted(by_pool.items()):
        newest = max(part["spec"]["pool"]["generation"] for part in found)
        parts = [part for part in found if part["spec"]["pool"]["generation"] == newest]
        parts.sort(key=lambda part: str(part["metadata"]["name"]))
        available = dict(_counters(driver, pool, parts))
        those = [
            _pooled(driver, pool, device)
            for part in parts
            for device in part["spec"].get("devices", ())
        ]
        if problem := _problem(parts, those, available):
            problems[pool] = problem
            continue
        devices += those
        counters |= available
    return DevicePools(tuple(devices), counters, problems)


def _problem(
    parts: list[Document], devices: list[PooledDevice], counters: Mapping[CounterKey, Fraction]
) -> str:
    if len(parts) != parts[0]["spec"]["pool"]["resourceSliceCount"]:
        return "incomplete"
    if len({device.id for device in devices}) < len(devices):
        return "duplicate device name"
    if any(device.consumes.keys() - counters.keys() for device in devices):
        return "counter not found"
    return ""


def _pooled(driver: str, pool: str, spec: Document) -> PooledDevice:
    consumes = {
        (driver, pool, consumes_counter["counterSet"], name): parse_amount(counter["value"])
        for consumes_counter in spec.get("consumesCounters") or ()
        for name, counter in consumes_counter["counters"].items()
    }
    shared = bool(spec.get("allowMultipleAllocations"))
    return PooledDevice(DeviceId(driver, pool, spec["name"]), spec, shared, consumes)


def _counters(
    driver: str, pool: str, parts: list[Document]
) -> Iterator[tuple[CounterKey, Fraction]]:
    for part in parts:
        for shared_counter in part["spec"].get("sharedCounters") or ():
            for name, counter in shared_counter["counters"].items():
                yield (driver, pool, shared_counter["name"], name), parse_amount(counter["value"])

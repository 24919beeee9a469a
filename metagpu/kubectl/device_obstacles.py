"""Obstacles to ResourceClaims, by a daemon's devices: pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from metagpu.core.model.gpu import MIB
from metagpu.kubectl.claims import DeviceOption
from metagpu.kubectl.obstacles import Found, Obstacle
from metagpu.kubectl.pods import PodDemand

Report = Mapping[str, Any]


def device_obstacles(demand: PodDemand, report: Report) -> Iterator[Found]:
    """Yield what is against each request, of alternatives the least."""
    for request in demand.devices:
        found = [_obstacle(it, report) for it in request.options]
        against = [it for it in found if it is not None]
        if len(against) == len(found):
            yield min(against, key=lambda it: it[0])


def free_devices(demand: PodDemand, report: Report) -> Sequence[str]:
    """Return what is free for each request, by its first alternative with room."""
    open_options = (
        next(it for it in request.options if _obstacle(it, report) is None)
        for request in demand.devices
    )
    return [_free(it, _devices(it, report)) for it in open_options]


def _obstacle(option: DeviceOption, report: Report) -> Found | None:
    devices, name = _devices(option, report), option.device_class
    total, free = (sum(it[key] for it in devices) for key in ("devices", "free"))
    if option.count > total:
        offered = f"{total or 'no'} devices of {name} are offered there"
        reason = f"{offered}, and {option.count} requested"
        fix = "ask for another class, or give a pool `api: dra`: docs/dra.md"
        return Obstacle.NOT_OFFERED, reason, fix
    if option.count > free:
        reason = f"{free} of {total} devices of {name} are free, and {option.count} are requested"
        return Obstacle.FULL, reason, "wait for the end of pods, or request fewer"
    for capacity, amount in option.amounts.items():
        largest = _largest(devices, capacity)
        if amount > largest:
            shown = _shown(capacity, largest)
            reason = (
                f"the largest free part of a device of {name} is {shown}, and "
                f"{_shown(capacity, amount)} are requested"
            )
            return Obstacle.FULL, reason, f"wait for the end of pods, or request at most {shown}"
    return None


def _devices(option: DeviceOption, report: Report) -> Sequence[Report]:
    """Return devices of a class; a daemon of an earlier version reports none."""
    return [
        it
        for kind, it in report.get("devices", {}).items()
        if not option.types or kind in option.types
    ]


def _free(option: DeviceOption, devices: Sequence[Report]) -> str:
    free, total = (sum(it[key] for it in devices) for key in ("free", "devices"))
    parts = ", ".join(_shown(it, _largest(devices, it)) for it in option.amounts)
    largest = f", the largest part is {parts}" if parts else ""
    return f"{free} of {total} devices of {option.device_class} are free{largest}"


def _largest(devices: Sequence[Report], capacity: str) -> int:
    return max((it["largest"].get(capacity, 0) for it in devices), default=0)


def _shown(capacity: str, amount: int) -> str:
    return f"{amount // MIB} MiB" if capacity == "memory" else f"{amount} {capacity}"

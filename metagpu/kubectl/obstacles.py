"""Obstacles to requests for shares and devices, by the report of a daemon. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final

import msgspec

from metagpu.core.config.errors import suggest
from metagpu.core.model.gpu import MIB
from metagpu.core.model.offers import RequestRule
from metagpu.core.reports.reading import FieldMissing
from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.core.reports.schema.status import DeviceTypeReport, OfferReport, StatusReport
from metagpu.kubectl.claims import DeviceOption
from metagpu.kubectl.pods import PodDemand
from metagpu.translation.values import TranslationSettings

Found = tuple["Obstacle", str, str]
"""An obstacle, the reason in words, and what to change."""

_CONFIG_LABEL: Final = "metagpu.io/config"
_MOST_HOLDERS: Final = 3


class Obstacle(IntEnum):
    """An obstacle between pod and node, from the one with the least to change on."""

    NONE = 0
    NODE_AMOUNT = 1
    FRAGMENTED = 2
    FULL = 3
    OUT_OF_SERVICE = 4
    COMPETING_PLUGIN = 5
    NODE_CORDONED = 6
    TAINT = 7
    LABELS = 8
    TOO_LARGE = 9
    NOT_OFFERED = 10
    NO_ANSWER = 11
    NO_DAEMON = 12


class ClusterNode(msgspec.Struct, frozen=True):
    """A node, as the API server and its daemon report it.

    Attributes:
        taints: those with an effect on scheduling.
        report: the daemon's status; `None` without an answer.
        problem: why there is no answer; empty where no daemon is known on the node.
    """

    name: str
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()
    unschedulable: bool = False
    allocatable: Mapping[str, int] = msgspec.field(default_factory=dict)
    report: StatusReport | None = None
    problem: str = ""


_COMPUTE: Final = (
    "of backends that share a GPU, mps alone limits compute: ask for its units, which "
    "`kubectl metagpu translate -f FILE` computes (docs/which-backend.md)"
)


def offers_of(report: StatusReport | None) -> Mapping[str, OfferReport]:
    """Return the offers of a node, none where its daemon does not report them."""
    try:
        return report.offers if report is not None else {}
    except FieldMissing:
        return {}


def resource_obstacles(
    demand: PodDemand, resource: str, node: ClusterNode, report: StatusReport
) -> Iterator[Found]:
    """Yield what is against the requests for one resource."""
    offers = report.offers
    if resource not in offers:
        yield _not_offered(resource, node, report)
        return
    if offers[resource].free_devices is not None:
        yield from _dra_obstacles(demand, resource, report)
        return
    if plugin := report.competing_plugins.get(resource):
        reason = f"{resource} is served by another device plugin ({plugin})"
        yield Obstacle.COMPETING_PLUGIN, reason, "remove that plugin from the node, or its resource"
    if problem := report.registration_problems.get(resource):
        reason = f"the kubelet does not count {resource} as metagpu lists it: {problem}"
        yield Obstacle.COMPETING_PLUGIN, reason, f"run mgctl doctor on {node.name}"

    counts = [request.count for request in demand.requests if request.resource == resource]
    largest, total, free = max(counts), sum(counts), offers[resource].free
    held = sum(lease.shares for lease in report.leases if lease.resource == resource)
    gpus = [gpu for gpu in report.gpus if resource in gpu.shares]
    ever = _largest_ever(offers[resource], [gpu.shares[resource].capacity for gpu in gpus])
    if largest > ever:
        at_most = f"one request of {resource} can get at most {ever} on this node"
        empty = [
            remark.text
            for remark in report.remarks
            if remark.reason == "resource_empty" and remark.text.startswith(f"{resource} has ")
        ]
        reason = f"{'; '.join(empty) or at_most}, and {largest} are requested"
        yield Obstacle.TOO_LARGE, reason, f"request at most {ever} in one container"
    elif total > free or not _fits_together(counts, offers[resource], gpus, resource):
        closed = _closed_gpu(resource, largest, max(0, total - free), gpus)
        if total <= free and largest <= offers[resource].largest_request:
            yield closed or _no_places(resource, counts, gpus, report)
        else:
            scarce = _too_few if total > free else _fragmented
            yield closed or scarce(resource, largest, gpus, report)
    elif (counted := node.allocatable.get(resource)) is not None and counted - held < total:
        reason = f"{free} of {resource} are free, but the Node counts {counted} in all"
        if held:
            reason += f", and pods hold {held}"
            fix = f"wait for the end of pods, or request at most {max(0, counted - held)}"
            yield Obstacle.NODE_AMOUNT, reason, fix
            return
        fix = "wait until the kubelet has updated its Node, about 10 s; then run mgctl doctor there"
        yield Obstacle.NODE_AMOUNT, reason, fix


def _not_offered(resource: str, node: ClusterNode, report: StatusReport) -> Found:
    offered = list(report.offers)
    profile = node.labels.get(_CONFIG_LABEL)
    why = f", by its profile {profile}" if profile else ""
    what = f"it offers {', '.join(offered) or 'nothing'}"
    reason = f"node {node.name} does not offer {resource}{why}; {what}"
    near = suggest(resource, offered).removeprefix("; ")
    if resource == TranslationSettings().cores:
        return Obstacle.NOT_OFFERED, reason, _COMPUTE
    choose = f"choose a profile with it: kubectl label node {node.name} {_CONFIG_LABEL}=PROFILE"
    return Obstacle.NOT_OFFERED, reason, near or choose


def _dra_obstacles(demand: PodDemand, resource: str, report: StatusReport) -> Iterator[Found]:
    """Yield what is against a resource of DRA: the scheduler counts devices."""
    slices = report.cluster.resource_slices if report.cluster else None
    if slices is None or resource not in slices.extended_resources:
        reason = f"{resource} is offered by DRA there, and no DeviceClass has this name"
        fix = "ask by a ResourceClaim, or add it to dra.extendedResources of the chart: docs/dra.md"
        yield Obstacle.NOT_OFFERED, reason, fix
        return
    free, total = report.offers[resource].free_devices or 0, demand.totals[resource]
    if total > free:
        reason = f"{free} devices of {resource} are free, and {total} different ones are requested"
        fix = "wait for the end of pods, or request fewer; for more of one device, write a claim"
        yield Obstacle.FULL, reason, fix


def _too_few(resource: str, _: int, gpus: Sequence[GpuReport], report: StatusReport) -> Found:
    offer = report.offers[resource]
    capacity = sum(gpu.shares[resource].capacity for gpu in gpus)
    reason = f"{offer.free} of {capacity} of {resource} are free{_holders(report, gpus)}"
    fix = f"wait for the end of pods, request at most {offer.largest_request}, or add a node"
    return Obstacle.FULL, reason, fix


def _closed_gpu(
    resource: str, largest: int, missing: int, gpus: Sequence[GpuReport]
) -> Found | None:
    """Return a GPU that would have enough, and gives nothing for another reason."""
    for gpu in gpus:
        part = gpu.shares[resource].capacity - gpu.shares[resource].held
        closed = _closed(gpu)
        if closed is not None and part >= largest and part >= missing:
            return Obstacle.OUT_OF_SERVICE, *closed
    return None


def _fragmented(
    resource: str, count: int, gpus: Sequence[GpuReport], report: StatusReport
) -> Found:
    """Return the free parts, and the pod whose end makes one of them large enough."""
    offer = report.offers[resource]
    parts = _parts(resource, gpus)
    held = f"; {offer.held_back} of them are held back" if offer.held_back else ""
    reason = (
        f"{offer.free} of {resource} are free, but the largest part is "
        f"{offer.largest_request} ({parts}){held}"
    )
    smallest = min(
        (
            (lease.shares, str(lease.holder), gpu.index)
            for gpu in gpus
            for lease in report.leases
            if lease.gpu == gpu.index
            and lease.resource == resource
            and lease.shares + gpu.shares[resource].free >= count
        ),
        default=None,
    )
    fix = f"request at most {offer.largest_request} in one container"
    if smallest is not None:
        shares, holder, index = smallest
        fix += f", or end {holder}, which holds {shares} on GPU {index}"
    return Obstacle.FRAGMENTED, reason, fix


def _no_places(
    resource: str, counts: Sequence[int], gpus: Sequence[GpuReport], report: StatusReport
) -> Found:
    """Return the free parts, in which each request has a place, and not all together."""
    asked = " + ".join(map(str, counts))
    reason = (
        f"{report.offers[resource].free} of {resource} are free "
        f"({_parts(resource, gpus)}), and {asked} in its containers do not fit together"
    )
    return Obstacle.FRAGMENTED, reason, "request less in one of its containers"


def _parts(resource: str, gpus: Sequence[GpuReport]) -> str:
    free = [(gpu.shares[resource].free, gpu.index) for gpu in gpus]
    return ", ".join(f"{count} on GPU {index}" for count, index in free if count)


def _closed(gpu: GpuReport) -> tuple[str, str] | None:
    """Return why a GPU gives no shares although they may be free, and what to do."""
    index = gpu.index
    if not gpu.healthy:
        fix = f"see docs/health.md; `metagpu acknowledge {index}` brings a repaired GPU back"
        return f"GPU {index} is out of service: {gpu.reason}", fix
    if gpu.cordon:
        reason = gpu.cordon.reason
        fix = f"uncordon it: kubectl metagpu uncordon NODE/{index}, or metagpu uncordon on the node"
        return f"GPU {index} is cordoned: {reason}", fix
    for backend, pause in gpu.suspended.items():
        return f"{backend} is suspended on GPU {index}: {pause.reason}", ""
    if gpu.waits_for:
        return gpu.waits_for, "wait for the end of these pods, or end them"
    return None


def _fits_together(
    counts: Sequence[int], offer: OfferReport, gpus: Sequence[GpuReport], resource: str
) -> bool:
    """Return whether the requests of all containers find a place, the largest first.

    A request above the largest GPU takes whole GPUs, and its rest a part of one as others do.
    """
    if max(counts) > offer.largest_request:
        return False
    if offer.request_rule is RequestRule.ANY:
        return True
    amounts = [gpu.shares[resource] for gpu in gpus]
    parts = sorted(amount.free for amount in amounts)
    idle = sorted(
        (amount.free for amount in amounts if amount.free == amount.capacity), reverse=True
    )
    most = max(amount.capacity for amount in amounts)
    rests = []
    for count in sorted(counts, reverse=True):
        wholes = _whole_gpus(count, idle) if count > most else ()
        for whole in wholes:
            idle.remove(whole)
            parts.remove(whole)
        rests.append(count - sum(wholes))
    for count in sorted(filter(None, rests), reverse=True):
        place = next((n for n, part in enumerate(parts) if part >= count), None)
        if place is None:
            return False
        parts[place] -= count
        parts.sort()
    return True


def _whole_gpus(count: int, idle: Sequence[int]) -> Sequence[int]:
    """Return the free GPUs that a request takes whole, the largest first."""
    taken: list[int] = []
    for size in idle:
        if sum(taken) + size <= count:
            taken.append(size)
    return taken


def _largest_ever(offer: OfferReport, capacities: Sequence[int]) -> int:
    """Return the largest request that an empty node could serve."""
    if offer.request_rule is RequestRule.ONE_GPU:
        return max(capacities, default=0)
    return sum(capacities)


def _holders(report: StatusReport, gpus: Sequence[GpuReport]) -> str:
    """Return the largest holders of GPUs, in brackets."""
    indices = {gpu.index for gpu in gpus}
    held: dict[str, int] = {}
    for lease in report.leases:
        if lease.gpu in indices:
            name = str(lease.holder or "a pod that is being admitted").partition(" ")[0]
            held[name] = held.get(name, 0) + lease.shares
    if not held:
        return ""
    largest = sorted(held.items(), key=lambda pair: -pair[1])
    shown = [f"{name} ({count})" for name, count in largest[:_MOST_HOLDERS]]
    more = [f"{len(held) - _MOST_HOLDERS} more"] if len(held) > _MOST_HOLDERS else []
    return f"; they are held by {', '.join([*shown, *more])}"


def device_obstacles(demand: PodDemand, report: StatusReport) -> Iterator[Found]:
    """Yield what is against each request, of alternatives the least."""
    for request in demand.devices:
        found = [_device_obstacle(option, report) for option in request.options]
        against = [obstacles for obstacles in found if obstacles is not None]
        if len(against) == len(found):
            yield min(against, key=lambda obstacles: obstacles[0])


def free_devices(demand: PodDemand, report: StatusReport) -> Sequence[str]:
    """Return what is free for each request, by its first alternative with room."""
    open_options = (
        next(option for option in request.options if _device_obstacle(option, report) is None)
        for request in demand.devices
    )
    return [
        _free_of_option(open_option, _devices(open_option, report)) for open_option in open_options
    ]


def _device_obstacle(option: DeviceOption, report: StatusReport) -> Found | None:
    devices, name = _devices(option, report), option.device_class
    total, free = sum(device.devices for device in devices), sum(device.free for device in devices)
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


def _devices(option: DeviceOption, report: StatusReport) -> Sequence[DeviceTypeReport]:
    """Return the devices of a class."""
    return [
        device_type_report
        for kind, device_type_report in report.devices.items()
        if not option.types or kind in option.types
    ]


def _free_of_option(option: DeviceOption, devices: Sequence[DeviceTypeReport]) -> str:
    total, free = sum(device.devices for device in devices), sum(device.free for device in devices)
    parts = ", ".join(_shown(amount, _largest(devices, amount)) for amount in option.amounts)
    largest = f", the largest part is {parts}" if parts else ""
    return f"{free} of {total} devices of {option.device_class} are free{largest}"


def _largest(devices: Sequence[DeviceTypeReport], capacity: str) -> int:
    return max((device.largest.get(capacity, 0) for device in devices), default=0)


def _shown(capacity: str, amount: int) -> str:
    return f"{amount // MIB} MiB" if capacity == "memory" else f"{amount} {capacity}"

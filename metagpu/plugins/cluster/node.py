"""The Node object as we read it, and what we want it to say: pure functions on plain data."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from typing import Any, Final

from metagpu.core.model import ResourceName
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.cluster.labels import NVIDIA

MANAGER: Final = "metagpu"
"""Our name among those who manage fields of an object."""
TAINT: Final = "metagpu.io/starting"
"""Put on a node by who makes it, so that nothing is scheduled there before we are ready."""
TAINTS: Final = frozenset((TAINT, "startup-taint.cluster-autoscaler.kubernetes.io/metagpu"))
"""The same under a name that cluster-autoscaler takes for a startup taint without being told."""
CONDITION: Final = "GPUProblem"
"""True when a GPU is out of service, as MemoryPressure is when memory is short."""
RESET: Final = "GPUResetNeeded"
"""True, and there, while a GPU gives nothing before somebody resets it."""
STAMP: Final = f"{NVIDIA}gfd.timestamp"
"""The label that GPU Feature Discovery alone writes."""
_TAKEN: Final = "nfd.node.kubernetes.io/feature-labels"
"""The annotation in which NFD's master remembers which labels it has put on a node."""
_PRODUCT: Final = f"{NVIDIA}gpu.product"

Object = Mapping[str, Any]


def owned_labels(node: Object, manager: str = MANAGER) -> frozenset[str]:
    """Name the labels that were applied in a manager's name."""
    found: set[str] = set()

    for entry in node["metadata"].get("managedFields") or ():
        if entry.get("manager") == manager and entry.get("operation") == "Apply":
            found |= _labels_in(entry)
    return frozenset(found)


def taken_by_nfd(node: Object) -> frozenset[str]:
    """Name the labels that Node Feature Discovery's master says it keeps on the node."""
    annotations = node["metadata"].get("annotations") or {}
    listed = [
        name
        for key, names in annotations.items()
        if key == _TAKEN or key.endswith(f".{_TAKEN}")  # of an instance of NFD with a name
        for name in names.split(",")
    ]
    return frozenset(name for name in listed if "/" in name)  # all others are NFD's own


def disowned(node: Object, names: AbstractSet[str]) -> list[Object]:
    """Give the node's managed fields as they are when we do not manage these labels any more."""
    kept = []

    for entry in node["metadata"].get("managedFields") or ():
        mine = entry.get("manager") == MANAGER and entry.get("operation") == "Apply"
        if not (mine and _labels_in(entry)):
            kept.append(entry)
        elif rest := sorted(_labels_in(entry) - names):
            labels: dict[str, Any] = {f"f:{name}": {} for name in rest}
            kept.append({**entry, "fieldsV1": {"f:metadata": {"f:labels": labels}}})
    return kept


def discovered_elsewhere(node: Object, carried: AbstractSet[str] = frozenset()) -> bool:
    """Tell whether GPU Feature Discovery speaks for this node: its labels are not ours to write.

    `carried` are those that somebody writes in our stead.
    """
    given = node["metadata"].get("labels") or {}
    if STAMP in given:
        return True
    if _PRODUCT not in given or _PRODUCT in carried:
        return False
    return any(
        entry.get("manager") != MANAGER and _PRODUCT in _labels_in(entry)
        for entry in node["metadata"].get("managedFields") or ()
    )


def _labels_in(entry: Object) -> set[str]:
    fields = (entry.get("fieldsV1") or {}).get("f:metadata", {}).get("f:labels", {})
    return {name.removeprefix("f:") for name in fields if name.startswith("f:")}


def ours_to_write(
    node: Object,
    wanted: Mapping[str, str],
    refused: AbstractSet[str],
    carried: AbstractSet[str] = frozenset(),
) -> Mapping[str, str]:
    """Leave out of the wanted labels what others write, but for those `carried` in our stead."""
    elsewhere = discovered_elsewhere(node, carried)
    return {
        name: value
        for name, value in wanted.items()
        if name not in refused and not (elsewhere and name.startswith(NVIDIA))
    }


def others_labels(
    node: Object, wanted: Mapping[str, str], known: AbstractSet[str]
) -> frozenset[str]:
    """Name the labels that say something else and are neither ours nor among those `known`."""
    given = node["metadata"].get("labels") or {}
    ours = owned_labels(node) | known
    return frozenset(
        name
        for name, value in wanted.items()
        if name not in ours and given.get(name, value) != value
    )


def labels_differ(node: Object, wanted: Mapping[str, str]) -> bool:
    """Tell whether the node's labels are not as wanted, or more of them are ours."""
    given = node["metadata"].get("labels") or {}
    return owned_labels(node) != wanted.keys() or any(
        given.get(name) != value for name, value in wanted.items()
    )


def taints_left(node: Object, amounts: Mapping[ResourceName, int]) -> list[Object] | None:
    """Give the taints without ours, `None` while it is not there or has to stay.

    It goes once the node tells everybody of every resource, in full: then pods can be placed.
    """
    taints = (node.get("spec") or {}).get("taints") or []
    kept = [taint for taint in taints if taint.get("key") not in TAINTS]
    capacity = (node.get("status") or {}).get("capacity") or {}
    ready = bool(amounts) and all(
        amount(capacity.get(resource)) == count for resource, count in amounts.items()
    )
    return kept if ready and len(kept) != len(taints) else None


def stale_amounts(
    node: Object, healthy: Mapping[ResourceName, int], *, rising: bool
) -> Mapping[ResourceName, int]:
    """Find the resources whose allocatable number is not what we offer now.

    A resource that the kubelet does not know yet is not ours to introduce, and no number passes its
    capacity. `rising` also gives those that have to go up.
    """
    status = node.get("status") or {}
    capacity, shown = status.get("capacity") or {}, status.get("allocatable") or {}
    found = {}

    for resource, count in healthy.items():
        most = amount(capacity.get(resource))
        before = amount(shown.get(resource))
        if most is None or before is None:
            continue
        now = min(count, most)
        if now < before or (rising and now > before):
            found[resource] = now
    return found


def amount(quantity: object) -> int | None:
    """Read a number of devices, `None` if there is none; it has a suffix only above 999."""
    text = str(quantity) if quantity is not None else ""
    number, factor = (text[:-1], 1000) if text.endswith("k") else (text, 1)
    return int(number) * factor if number.isdecimal() else None


def capacity_of(snapshot: Snapshot) -> Mapping[ResourceName, int]:
    """Count all shares of every resource that we serve."""
    return {
        resource: len(offer.shares)
        for resource, offer in snapshot.offers.items()
        if resource not in snapshot.rivals
    }


def healthy_of(snapshot: Snapshot) -> Mapping[ResourceName, int]:
    """Count the shares of every resource that we serve and list as healthy, held or not."""
    return {
        resource: sum(
            len(shares) - sum(share.id in shut for share in shares)
            for gpu, shares in offer.by_gpu.items()
            if (state := snapshot.gpus[gpu]).verdict.healthy
            for shut in (state.shut,)
        )
        for resource, offer in snapshot.offers.items()
        if resource not in snapshot.rivals
    }


def conditions_of(snapshot: Snapshot) -> Sequence[Mapping[str, str]]:
    """Say how the GPUs are, as conditions of the node; none before they are known."""
    if not snapshot.gpus:
        return ()

    waiting = [
        (pause.since, f"GPU {state.gpu}: {pause.reason}")
        for state in snapshot.gpus.values()
        for pause in state.suspended.values()
        if pause.reset
    ]
    if not waiting:
        return (_problem(snapshot),)
    said = "; ".join(reason for _, reason in waiting)
    reset = _condition("True", "MIGModePending", said, max(waiting)[0], RESET)
    return _problem(snapshot), reset


def _problem(snapshot: Snapshot) -> Mapping[str, str]:
    out = [state for state in snapshot.gpus.values() if not state.verdict.healthy]
    since = max(state.verdict.since for state in out or snapshot.gpus.values())
    if out:
        said = "; ".join(f"GPU {state.gpu}: {state.verdict.reason}" for state in out)
        return _condition("True", "GPUOutOfService", said, since)
    said = f"all {len(snapshot.gpus)} GPUs are in service"
    faults = [
        (verdict.since, f"MIG device {device} of GPU {state.gpu}: {verdict.reason}")
        for state in snapshot.gpus.values()
        for device, verdict in state.faults.items()
    ]
    if faults:  # no problem of the node: who drained it for that would end everybody else's pods
        said = "; ".join([said, *(fault for _, fault in faults)])
        return _condition("False", "MIGDevicesOutOfService", said, max(faults)[0])
    return _condition("False", "GPUsInService", said, since)


def _condition(
    status: str, reason: str, message: str, since: float, kind: str = CONDITION
) -> Mapping[str, str]:
    moment = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": moment,
        "lastTransitionTime": moment,
    }


def conditions_differ(node: Object, wanted: Sequence[Mapping[str, str]]) -> bool:
    """Tell whether the node's conditions of ours do not say what is wanted."""
    keys = ("type", "status", "reason", "message")
    shown = (node.get("status") or {}).get("conditions") or ()
    ours = [[each.get(key) for key in keys] for each in shown if each["type"] in (CONDITION, RESET)]
    said = [[each[key] for key in keys] for each in wanted]
    return sorted(ours) != sorted(said)

"""The Node object, as read and as wanted: pure functions on plain data."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from typing import Any, Final

from metagpu.core.availability.exact import with_place_for_arriving
from metagpu.core.availability.reasons import availability_of
from metagpu.core.model.offers import Api
from metagpu.core.model.quantities import whole_number
from metagpu.core.model.shares import ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.plugins.cluster.gpu_labels import NVIDIA_PREFIX

NODES: Final = "/api/v1/nodes"
"""The path of all Nodes at the API server."""
FIELD_MANAGER: Final = "metagpu"
"""The field manager of everything that metagpu applies."""
CONFLICT: Final = 409
"""The API server's answer where another client was faster, or manages a field."""
APPLY_PATCH: Final = "application/apply-patch+yaml"
MERGE_PATCH: Final = "application/merge-patch+json"
TAINT: Final = "metagpu.io/starting"
"""The startup taint: the node's creator sets it, so that no pod comes before metagpu is ready."""
TAINTS: Final = frozenset((TAINT, "startup-taint.cluster-autoscaler.kubernetes.io/metagpu"))
"""Both names of the taint; cluster-autoscaler knows the second as a startup taint by itself."""
PROBLEM_CONDITION: Final = "GPUProblem"
"""True while a GPU is out of service, as MemoryPressure is while memory is short."""
RESET_CONDITION: Final = "GPUResetNeeded"
"""Present, and True, while a GPU is useless until an operator resets it."""
GFD_TIMESTAMP: Final = f"{NVIDIA_PREFIX}gfd.timestamp"
"""A label that only GPU Feature Discovery writes."""
_NFD_ANNOTATION: Final = "nfd.node.kubernetes.io/feature-labels"
"""The annotation in which NFD's master lists the labels that it has put on a node."""
_PRODUCT: Final = f"{NVIDIA_PREFIX}gpu.product"

KubeObject = Mapping[str, Any]
"""An object of the API server, as plain data."""


def owned_labels(node: KubeObject, manager: str = FIELD_MANAGER) -> frozenset[str]:
    """Return the labels that a field manager has applied."""
    found: set[str] = set()

    for entry in node["metadata"].get("managedFields") or ():
        if entry.get("manager") == manager and entry.get("operation") == "Apply":
            found |= _labels_in(entry)
    return frozenset(found)


def nfd_labels(node: KubeObject) -> frozenset[str]:
    """Return the labels that NFD's master lists as its own on the node."""
    annotations = node["metadata"].get("annotations") or {}
    listed = [
        name
        for key, names in annotations.items()
        if key == _NFD_ANNOTATION
        or key.endswith(f".{_NFD_ANNOTATION}")  # of a named instance of NFD
        for name in names.split(",")
    ]
    return frozenset(name for name in listed if "/" in name)  # names without a prefix are NFD's own


def without_labels(node: KubeObject, names: AbstractSet[str]) -> list[KubeObject]:
    """Return the node's managed fields without our management of these labels."""
    kept = []

    for entry in node["metadata"].get("managedFields") or ():
        mine = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"
        if not (mine and _labels_in(entry)):
            kept.append(entry)
        elif rest := sorted(_labels_in(entry) - names):
            labels: dict[str, Any] = {f"f:{name}": {} for name in rest}
            kept.append({**entry, "fieldsV1": {"f:metadata": {"f:labels": labels}}})
    return kept


def is_labelled_by_gfd(node: KubeObject, carried: AbstractSet[str] = frozenset()) -> bool:
    """Return whether GPU Feature Discovery labels this node; then metagpu must not.

    `carried` are labels that another client writes for us.
    """
    given = node["metadata"].get("labels") or {}
    if GFD_TIMESTAMP in given:
        return True
    if _PRODUCT not in given or _PRODUCT in carried:
        return False
    return any(
        entry.get("manager") != FIELD_MANAGER and _PRODUCT in _labels_in(entry)
        for entry in node["metadata"].get("managedFields") or ()
    )


def _labels_in(entry: KubeObject) -> set[str]:
    fields = (entry.get("fieldsV1") or {}).get("f:metadata", {}).get("f:labels", {})
    return {name.removeprefix("f:") for name in fields if name.startswith("f:")}


def writable_labels(
    node: KubeObject,
    wanted: Mapping[str, str],
    refused: AbstractSet[str],
    carried: AbstractSet[str] = frozenset(),
) -> Mapping[str, str]:
    """Return the wanted labels without those of other clients.

    The `carried` labels, which another client writes for us, count as ours.
    """
    by_gfd = is_labelled_by_gfd(node, carried)
    return {
        name: value
        for name, value in wanted.items()
        if name not in refused and not (by_gfd and name.startswith(NVIDIA_PREFIX))
    }


def conflicting_labels(
    node: KubeObject, wanted: Mapping[str, str], known: AbstractSet[str]
) -> frozenset[str]:
    """Return the labels of other clients, with other values than the wanted ones.

    The `known` labels do not count as those of other clients.
    """
    given = node["metadata"].get("labels") or {}
    ours = owned_labels(node) | known
    return frozenset(
        name
        for name, value in wanted.items()
        if name not in ours and given.get(name, value) != value
    )


def labels_differ(node: KubeObject, wanted: Mapping[str, str]) -> bool:
    """Return whether a wanted label differs, or we manage labels that are not wanted."""
    given = node["metadata"].get("labels") or {}
    return owned_labels(node) != wanted.keys() or any(
        given.get(name) != value for name, value in wanted.items()
    )


def remaining_taints(
    node: KubeObject, amounts: Mapping[ResourceName, int], *, dra: bool = False
) -> list[KubeObject] | None:
    """Return the taints without ours, `None` while ours is absent or has to stay.

    Ours goes once the Node shows every resource in full: then the scheduler can place pods. With
    `dra` it need not show any: pods by ResourceClaims wait for ResourceSlices.
    """
    taints = (node.get("spec") or {}).get("taints") or []
    kept = [taint for taint in taints if taint.get("key") not in TAINTS]
    capacity = (node.get("status") or {}).get("capacity") or {}
    ready = (dra or bool(amounts)) and all(
        whole_number(capacity.get(resource)) == count for resource, count in amounts.items()
    )
    return kept if ready and len(kept) != len(taints) else None


def stale_allocatable(
    node: KubeObject,
    healthy: Mapping[ResourceName, int],
    known: Mapping[ResourceName, int] | None = None,
) -> Mapping[ResourceName, int]:
    """Return the wrong allocatable numbers, corrected to what metagpu offers now.

    A resource that the kubelet does not report yet is left out, and no number exceeds its capacity.

    Args:
        node: the Node.
        healthy: the numbers that metagpu offers now.
        known: the numbers to which those of the Node may rise, as the kubelet knows as many shares;
            without it none rises.
    """
    status = node.get("status") or {}
    capacity, shown = status.get("capacity") or {}, status.get("allocatable") or {}
    found = {}

    for resource, count in healthy.items():
        most = whole_number(capacity.get(resource))
        before = whole_number(shown.get(resource))
        if most is None or before is None:
            continue
        now = min(count, most, max(before, (known or {}).get(resource, 0)))
        if now != before:
            found[resource] = now
    return found


def capacity_of(snapshot: Snapshot) -> Mapping[ResourceName, int]:
    """Count all shares of each resource that metagpu serves to the kubelet."""
    return {
        resource: len(offer.shares)
        for resource, offer in snapshot.offers_of(Api.DEVICE_PLUGIN).items()
        if resource not in snapshot.competing_plugins
    }


def allocatable_of(snapshot: Snapshot) -> Mapping[ResourceName, int]:
    """Count the healthy shares, held or free, of each resource that metagpu serves.

    Shares whose turn ends are not counted. While pods arrive there are as many as all pods request.
    A daemon that is about to end has none, so that no pod is bound that finds no list: of any other
    number a pod that ends would leave room. Pods on their way are admitted all the same, as the
    kubelet counts no fewer shares than it has allocated.
    """
    amounts = with_place_for_arriving(snapshot, healthy_shares_of(snapshot))
    if not (snapshot.withdrawn and snapshot.pods.listed):
        return amounts
    return dict.fromkeys(amounts, 0)


def healthy_shares_of(snapshot: Snapshot) -> Mapping[ResourceName, int]:
    """Count the healthy shares of each resource, as the kubelet does between turns."""
    return {
        resource: sum(
            len(shares) - sum(share.id in uncounted for share in shares)
            for gpu, shares in offer.by_gpu.items()
            for uncounted in (availability_of(snapshot.gpus[gpu]).uncounted,)
        )
        for resource, offer in snapshot.offers_of(Api.DEVICE_PLUGIN).items()
        if resource not in snapshot.competing_plugins
    }


def resources_in_turns(snapshot: Snapshot) -> frozenset[ResourceName]:
    """Return the resources that idle GPUs offer in turns."""
    return frozenset(
        share.resource
        for state in snapshot.gpus.values()
        if state.turn is not None
        for share in state.shares
    )


def conditions_of(snapshot: Snapshot) -> Sequence[Mapping[str, str]]:
    """Return the node's conditions about its GPUs; none before the GPUs are known."""
    if not snapshot.gpus and not snapshot.unreadable_gpus:
        return ()

    waiting = [
        (pause.since, f"GPU {state.gpu}: {pause.reason}")
        for state in snapshot.gpus.values()
        for pause in state.suspended.values()
        if pause.until_reset
    ]
    if not waiting:
        return (_problem(snapshot),)
    message = "; ".join(reason for _, reason in waiting)
    reset = _condition("True", "MIGModePending", message, max(waiting)[0], RESET_CONDITION)
    return _problem(snapshot), reset


def _problem(snapshot: Snapshot) -> Mapping[str, str]:
    states, unreadable = snapshot.gpus.values(), snapshot.unreadable_gpus.values()
    out = [state for state in states if not state.verdict.healthy]
    bad = [*(state.verdict for state in out), *unreadable]
    since = max(verdict.since for verdict in bad or [state.verdict for state in states])
    if bad:
        reasons = [f"GPU {state.gpu}: {state.verdict.reason}" for state in out]
        message = "; ".join([*reasons, *(verdict.reason for verdict in unreadable)])
        return _condition("True", "GPUUnhealthy", message, since)
    message = f"all {len(snapshot.gpus)} GPUs are in service"
    faults = [
        (verdict.since, f"MIG device {device} of GPU {state.gpu}: {verdict.reason}")
        for state in snapshot.gpus.values()
        for device, verdict in state.mig_faults.items()
    ]
    if faults:  # no problem of the node: draining it would end the pods of all other devices
        message = "; ".join([message, *(fault for _, fault in faults)])
        return _condition("False", "MIGDeviceUnhealthy", message, max(faults)[0])
    return _condition("False", "AllGPUsHealthy", message, since)


def _condition(
    status: str, reason: str, message: str, since: float, kind: str = PROBLEM_CONDITION
) -> Mapping[str, str]:
    time_of_change = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": time_of_change,
        "lastTransitionTime": time_of_change,
    }


def conditions_differ(node: KubeObject, wanted: Sequence[Mapping[str, str]]) -> bool:
    """Return whether our conditions on the node differ from the wanted ones."""
    keys = ("type", "status", "reason", "message")
    shown = (node.get("status") or {}).get("conditions") or ()
    ours = [
        [each.get(key) for key in keys]
        for each in shown
        if each["type"] in (PROBLEM_CONDITION, RESET_CONDITION)
    ]
    wanted_values = [[each[key] for key in keys] for each in wanted]
    return sorted(ours) != sorted(wanted_values)

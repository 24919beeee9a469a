"""Objects of the simulated API server as values for users. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from metagpu.core.devices.devices import gpu_of_device
from metagpu.core.model.quantities import whole_number
from metagpu.sim.apiserver.objects import Object
from metagpu.sim.cluster.pod_objects import is_unschedulable, node_of, phase_of, requests_of
from metagpu.sim.cluster.scheduler import requested_on
from metagpu.sim.cluster.views import (
    ClaimedDeviceView,
    ClaimView,
    ClusterNodeView,
    ConditionView,
    EventView,
    PodView,
    ResourceView,
)

_SEPARATOR = "::"
"""Between the GPU of a share id and the part of it."""


def view_pod(pod: Object, held: Mapping[str, Collection[str]], gpus: Mapping[str, int]) -> PodView:
    """Return the view of a Pod.

    Args:
        pod: the object.
        held: the ids that the kubelet has allocated to it, by resource.
        gpus: the indices of the node's GPUs by uuid.
    """
    metadata, status = pod["metadata"], pod["status"]
    reason, message = status.get("reason") or "", status.get("message") or ""
    if "deletionTimestamp" in metadata:
        reason, message = "Terminating", "the pod was deleted; its kubelet ends it"
    elif is_unschedulable(pod):
        [condition] = status["conditions"]
        reason, message = condition["reason"], condition["message"]
    ids = {device.partition(_SEPARATOR)[0] for devices in held.values() for device in devices}
    return PodView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        phase=phase_of(pod),
        node=node_of(pod),
        resources=requests_of(pod),
        devices={resource: tuple(sorted(devices)) for resource, devices in held.items()},
        gpus=tuple(sorted(gpus[share_id] for share_id in ids if share_id in gpus)),
        annotations=metadata.get("annotations") or {},
        reason=reason,
        message=message,
    )


def view_claim(
    claim: Object, pods: Sequence[Object], gpus: Mapping[str, int], *, is_prepared: bool
) -> ClaimView:
    """Return the view of a ResourceClaim.

    Args:
        claim: the object.
        pods: the pods that use it.
        gpus: the indices of the node's GPUs by uuid.
        is_prepared: whether its node has prepared it.
    """
    metadata, allocation = claim["metadata"], (claim.get("status") or {}).get("allocation")
    results = allocation["devices"]["results"] if allocation else ()
    nodes = {node_of(pod) for pod in pods} - {""}
    messages = (str(pod["status"].get("message") or _unschedulable(pod)) for pod in pods)
    return ClaimView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        state="Prepared" if is_prepared else "Allocated" if allocation else "Pending",
        node=", ".join(sorted(nodes)) if allocation else "",
        devices=tuple(_claimed_device(result, gpus) for result in results),
        pods=tuple(pod["metadata"]["name"] for pod in pods),
        message=next(filter(None, messages), ""),
    )


def _unschedulable(pod: Object) -> str:
    return str(pod["status"]["conditions"][0]["message"]) if is_unschedulable(pod) else ""


def _claimed_device(result: Object, gpus: Mapping[str, int]) -> ClaimedDeviceView:
    device = result["device"]
    gpu = gpu_of_device(device)
    return ClaimedDeviceView(
        request=result["request"],
        gpu=gpus.get(gpu),
        part=device.removeprefix(gpu.lower()).removeprefix("-") or "gpu",
        consumed=result.get("consumedCapacity") or {},
    )


def view_node(node: Object, pods: Iterable[Object], *, is_up: bool) -> ClusterNodeView:
    """Return the view of the Node, with what its pods request."""
    name, status = node["metadata"]["name"], node["status"]
    requested = requested_on(name, pods)
    allocatable = status.get("allocatable") or {}
    return ClusterNodeView(
        name=name,
        kubelet_running=is_up,
        resources={
            resource: ResourceView(
                whole_number(count) or 0,
                whole_number(allocatable.get(resource)) or 0,
                requested.get(resource, 0),
            )
            for resource, count in (status.get("capacity") or {}).items()
        },
        labels=dict(sorted((node["metadata"].get("labels") or {}).items())),
        taints=tuple(
            f"{taint['key']}:{taint['effect']}" for taint in node["spec"].get("taints") or ()
        ),
        conditions=tuple(
            ConditionView(
                condition["type"], condition["status"], condition["reason"], condition["message"]
            )
            for condition in status.get("conditions") or ()
        ),
    )


def view_events(events: Iterable[Object]) -> Sequence[EventView]:
    """Return the views of Events."""
    return [
        EventView(
            type=event["type"],
            reason=event["reason"],
            object=_subject(event["regarding"]),
            count=(event.get("series") or {}).get("count", 1),
            note=event["note"],
        )
        for event in events
    ]


def _subject(regarding: Object) -> str:
    names = regarding["kind"], regarding.get("namespace"), regarding["name"]
    return "/".join(name for name in names if name)

"""Pods of a simulated cluster as objects. Pure."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.cluster.extended_resources import extended_uses
from metagpu.sim.cluster.pod_manifest import SLEEP
from metagpu.sim.kubelet.claims import ClaimPrepareError, ClaimUse, PodClaims
from metagpu.sim.kubelet.pods import SimContainer, SimPod

Patch = Mapping[str, Any]
"""A merge patch of an object, or of its status."""
ENDED: Final = frozenset({"Succeeded", "Failed"})
_NODE_ADDRESS: Final = "127.0.0.1"
"""The address of pods in the host's network; others have none here."""


def key_of(pod: Object) -> Key:
    """Return the key of a Pod."""
    return "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]


def title(pod: Object) -> str:
    """Return a Pod's name, with its namespace if that is not `default`."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    return str(name) if namespace == "default" else f"{namespace}/{name}"


def requests_of(pod: Object) -> Mapping[str, int]:
    """Return the number of devices that a Pod requests, by resource name."""
    containers, first = _containers(pod)
    asking = SimPod("", containers=containers, init_containers=first)
    return {resource: asking.request(resource) for resource in sorted(asking.resources())}


def _devices_of(container: Object) -> Mapping[str, int]:
    """Return the devices that a container requests, without processors and memory."""
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: int(count) for name, count in amounts.items() if "/" in name}


def remaining_time(pod: Object, now: float) -> float | None:
    """Return the seconds until a running Pod ends by itself; `None` for never."""
    command: list[str] = pod["spec"]["containers"][0].get("command") or []
    try:
        program, seconds = command[0], float(command[1])
    except (IndexError, ValueError):
        return None  # a pod of a file: nothing of it runs
    if len(command) > len((program, seconds)) or program != SLEEP:
        return None
    started = datetime.fromisoformat(pod["status"]["startTime"]).timestamp()
    return None if math.isinf(seconds) else max(0.0, started + seconds - now)


def seconds_of_grace(pod: Object, now: float) -> float:
    """Return the seconds until the kubelet kills the containers of a deleted Pod."""
    return datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]).timestamp() - now


def timestamp(at: float) -> str:
    """Return a Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def kubelet_pod(pod: Object) -> SimPod:
    """Return a Pod as its kubelet admits it."""
    metadata = pod["metadata"]
    return SimPod(metadata["name"], metadata["namespace"], metadata["uid"], *_containers(pod))


def _containers(pod: Object) -> tuple[tuple[SimContainer, ...], tuple[SimContainer, ...]]:
    """Return the containers of a Pod, and its init containers."""
    spec = pod["spec"]
    containers = tuple(
        SimContainer(container["name"], _devices_of(container))
        for container in spec.get("containers") or ()
    )
    return containers, tuple(
        SimContainer(
            container["name"], _devices_of(container), container.get("restartPolicy") == "Always"
        )
        for container in spec.get("initContainers") or ()
    )


def node_of(pod: Object) -> str:
    """Return the node that a Pod is bound to, empty without one."""
    return str(pod["spec"].get("nodeName") or "")


def phase_of(pod: Object) -> str:
    """Return a Pod's phase."""
    return str(pod["status"]["phase"])


def is_unschedulable(pod: Object) -> bool:
    """Return whether the scheduler found no node for a Pod."""
    return any(
        condition["status"] == "False" for condition in pod["status"].get("conditions") or ()
    )


def is_settled(pod: Object) -> bool:
    """Return whether scheduler and kubelet have decided what becomes of a Pod for now."""
    return phase_of(pod) != "Pending" or is_unschedulable(pod) or bool(pod["status"].get("message"))


def binding(node: str) -> Patch:
    """Return the change of a Pod that the scheduler binds to a node."""
    return {"spec": {"nodeName": node}}


def scheduled(message: str = "") -> Patch:
    """Return the status of a Pod that is bound, or unschedulable for a reason."""
    found: dict[str, Any] = {"type": "PodScheduled", "status": "False" if message else "True"}
    if message:
        found |= {"reason": "Unschedulable", "message": message}
    return {"status": {"conditions": [found]}}


def rejected(reason: str, message: str) -> Patch:
    """Return the status of a Pod that its kubelet does not admit."""
    text = f"Pod was rejected: {message}"
    return {"status": {"phase": "Failed", "reason": reason, "message": text}}


def waiting(reason: str, message: str = "") -> Patch:
    """Return the status of a Pod whose container waits."""
    return {"status": {"reason": reason, "message": message or None}}


def running(pod: Object, since: float) -> Patch:
    """Return the status of a Pod whose container runs since a Unix time."""
    conditions = [{"type": name, "status": "True"} for name in ("PodScheduled", "Ready")]
    address = {"podIP": _NODE_ADDRESS} if pod["spec"].get("hostNetwork") else {}
    started = {"startTime": timestamp(since), "conditions": conditions, **address}
    return {"status": {**phase("Running")["status"], **started}}


def phase(name: str) -> Patch:
    """Return the status of a Pod in another phase, without a reason."""
    return {"status": {"phase": name, "reason": None, "message": None}}


def event_object(pod: Object, reason: str, note: str) -> Object:
    """Return a warning about a Pod, as scheduler and kubelet write it."""
    metadata = pod["metadata"]
    regarding = {"kind": "Pod", **{part: metadata[part] for part in ("name", "namespace", "uid")}}
    return {"type": "Warning", "reason": reason, "note": note, "regarding": regarding}


def pod_claims(pod: Object, objects: Mapping[Key, Object]) -> PodClaims:
    """Return the claims of a pod as its kubelet prepares them.

    Raises:
        ClaimPrepareError: a claim is gone, or not reserved for the pod.
    """
    metadata = pod["metadata"]
    extended = list(extended_uses(pod))
    names = {**_claim_names(pod), **{name: name for _, name, _ in extended}}
    refs, drivers = {}, {}
    for entry, name in names.items():
        claim = objects.get(("resourceclaims", metadata["namespace"], name))
        if claim is None:
            raise ClaimPrepareError(f'resourceclaims.resource.k8s.io "{name}" not found')
        status = claim.get("status") or {}
        if metadata["uid"] not in {consumer["uid"] for consumer in status.get("reservedFor") or ()}:
            raise ClaimPrepareError(f"ResourceClaim {name} is not reserved for the pod")
        refs[entry] = ResourceClaimRef(metadata["namespace"], name, claim["metadata"]["uid"])
        results = status["allocation"]["devices"]["results"]
        drivers[refs[entry]] = tuple(dict.fromkeys(result["driver"] for result in results))
    spec = pod["spec"]
    every = (*(spec.get("initContainers") or ()), *spec["containers"])
    containers = {
        container["name"]: [
            *_uses(container, refs),
            *(
                ClaimUse(refs[name], request)
                for user, name, request in extended
                if user == container["name"]
            ),
        ]
        for container in every
    }
    return PodClaims(metadata["uid"], drivers, containers)


def _claim_names(pod: Object) -> Mapping[str, str]:
    """Return the name of each claim by its entry in the Pod."""
    made = pod["status"].get("resourceClaimStatuses") or ()
    entries = [*(pod["spec"].get("resourceClaims") or ()), *made]
    return {
        entry["name"]: entry["resourceClaimName"]
        for entry in entries
        if entry.get("resourceClaimName")
    }


def _uses(container: Mapping[str, Any], refs: Mapping[str, ResourceClaimRef]) -> Sequence[ClaimUse]:
    used = (container.get("resources") or {}).get("claims") or ()
    return [
        ClaimUse(refs[use["name"]], use.get("request", "")) for use in used if use["name"] in refs
    ]

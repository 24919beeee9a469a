"""Pods of a simulated cluster as objects of the API server. Pure."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.cluster.pod_manifest import PodManifest
from metagpu.sim.kubelet.pods import SimContainer, SimPod

Patch = Mapping[str, Any]
"""A merge patch of an object, or of its status."""
CONTAINER: Final = "main"
"""The name of a simulated pod's only container."""
_SLEEP: Final = ("sleep", "infinity")
ENDED: Final = frozenset({"Succeeded", "Failed"})


def key_of(pod: Object) -> Key:
    """Return the key of a Pod."""
    return "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]


def title(pod: Object) -> str:
    """Return a Pod's name, with its namespace if that is not `default`."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    return str(name) if namespace == "default" else f"{namespace}/{name}"


def pod_object(request: PodManifest, created: str) -> Object:
    """Return the Pod that a user creates, without a node."""
    counts = {resource: str(count) for resource, count in request.resources.items()}
    seconds = "infinity" if request.seconds is None else f"{request.seconds:g}"
    container = {
        "name": CONTAINER,
        "command": [*_SLEEP[:1], seconds],
        "resources": {"limits": counts, "requests": counts},
    }
    return {
        "metadata": {"annotations": dict(request.annotations), "creationTimestamp": created},
        "spec": {"containers": [container]},
        "status": {"phase": "Pending"},
    }


def requests_of(pod: Object) -> Mapping[str, int]:
    """Return the number of devices that a Pod requests, by resource name."""
    totals: dict[str, int] = {}
    for container in pod["spec"].get("containers") or ():
        for resource, count in _devices_of(container).items():
            totals[resource] = totals.get(resource, 0) + count
    return totals


def _devices_of(container: Object) -> Mapping[str, int]:
    """Return the devices that a container requests, without processors and memory."""
    requests = (container.get("resources") or {}).get("requests") or {}
    return {name: int(count) for name, count in requests.items() if "/" in name}


def remaining_time(pod: Object, now: float) -> float | None:
    """Return the seconds until a running Pod ends by itself; `None` for never."""
    command: list[str] = pod["spec"]["containers"][0].get("command") or []
    if len(command) != len(_SLEEP) or command[0] != _SLEEP[0]:
        return None  # a pod of a file: nothing of it runs
    try:
        seconds = float(command[1])
    except ValueError:
        return None
    started = datetime.fromisoformat(pod["status"]["startTime"]).timestamp()
    return None if math.isinf(seconds) else max(0.0, started + seconds - now)


def timestamp(at: float) -> str:
    """Return a Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def kubelet_pod(pod: Object) -> SimPod:
    """Return a Pod as its kubelet admits it."""
    metadata = pod["metadata"]
    containers = tuple(
        SimContainer(it["name"], _devices_of(it)) for it in pod["spec"]["containers"]
    )
    return SimPod(metadata["name"], metadata["namespace"], metadata["uid"], containers)


def node_of(pod: Object) -> str:
    """Return the node that a Pod is bound to, empty without one."""
    return str(pod["spec"].get("nodeName") or "")


def phase_of(pod: Object) -> str:
    """Return a Pod's phase."""
    return str(pod["status"]["phase"])


def is_unschedulable(pod: Object) -> bool:
    """Return whether the scheduler found no node for a Pod."""
    return any(it["status"] == "False" for it in pod["status"].get("conditions") or ())


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


def running(since: float) -> Patch:
    """Return the status of a Pod whose container runs since a Unix time."""
    return {"status": {**phase("Running")["status"], "startTime": timestamp(since)}}


def phase(name: str) -> Patch:
    """Return the status of a Pod in another phase, without a reason."""
    return {"status": {"phase": name, "reason": None, "message": None}}


def event_object(pod: Object, reason: str, note: str) -> Object:
    """Return a warning about a Pod, as scheduler and kubelet write it."""
    metadata = pod["metadata"]
    regarding = {"kind": "Pod", **{it: metadata[it] for it in ("name", "namespace", "uid")}}
    return {"type": "Warning", "reason": reason, "note": note, "regarding": regarding}

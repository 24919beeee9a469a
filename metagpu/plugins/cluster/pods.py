"""The informer of this node's Pods: keeps the few fields that the registry needs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from metagpu.core.model.pods import KnownPod, Rejection
from metagpu.core.state.facts import PodsListed
from metagpu.core.state.registry import Registry
from metagpu.core.usage.annotations import memory_annotations
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.watch import Informer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

PODS: Final = "/api/v1/pods"
REJECTED: Final = "UnexpectedAdmissionError"
"""The kubelet's reason where a device plugin, or the kubelet's device manager, rejects a pod."""
MIRROR: Final = "kubernetes.io/config.mirror"
"""The annotation of a pod by which the kubelet shows a static pod."""
_STATUSES: Final = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")


class PodInformer(Informer):
    """Reports the Pods of a node, of all namespaces, to the registry."""

    def __init__(self, client: "KubeClient", node: str, registry: Registry) -> None:
        super().__init__(client, PODS, f"spec.nodeName={node}", f"{PODS} on {node}")
        self._registry = registry
        self._pods: dict[str, KnownPod] = {}

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in the complete list of Pods."""
        self._pods = {pod.uid: pod for pod in map(known_pod, items)}
        self._publish()

    def on_update(self, item: KubeObject) -> None:
        """Take in a Pod that is new or changed."""
        pod = known_pod(item)
        if self._pods.get(pod.uid) != pod:
            self._pods[pod.uid] = pod
            self._publish()

    def on_delete(self, item: KubeObject) -> None:
        """Take in the deletion of a Pod."""
        self._pods.pop(known_pod(item).uid, None)
        self._publish()

    def _publish(self) -> None:
        self._registry.apply(PodsListed(tuple(self._pods.values())))


def known_pod(item: KubeObject) -> KnownPod:
    """Return the needed fields of a Pod: the rest is large, and changes often."""
    metadata = item["metadata"]
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    owner = owners[0] if owners else {}

    return KnownPod(
        uid=str(metadata["uid"]),
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        phase=str((item.get("status") or {}).get("phase") or ""),
        owner=f"{owner['kind']}/{owner['name']}" if owner else "",
        memory_annotations=memory_annotations(metadata.get("annotations") or {}),
        owner_uid=str(owner.get("uid") or ""),
        owner_api=str(owner.get("apiVersion") or ""),
        rejection=_rejection(item),
        terminating="deletionTimestamp" in metadata,
    )


def _rejection(item: KubeObject) -> Rejection | None:
    status = item.get("status") or {}
    if status.get("phase") != "Failed" or status.get("reason") != REJECTED:
        return None
    spec = item.get("spec") or {}
    requests = [
        (it.get("resources") or {}).get("limits") or {}
        for it in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    ]
    return Rejection(
        str(status.get("message") or ""),
        frozenset(name for request in requests for name in request if "/" in name),
        str(item["metadata"].get("resourceVersion") or "") if _may_be_deleted(item) else "",
    )


def _may_be_deleted(item: KubeObject) -> bool:
    """Return whether a rejected Pod can be deleted, and nothing runs that this ends."""
    metadata, status = item["metadata"], item.get("status") or {}
    owners = metadata.get("ownerReferences") or ()
    is_mirror = MIRROR in (metadata.get("annotations") or {}) or any(
        owner.get("kind") == "Node" for owner in owners
    )
    containers = [it for name in _STATUSES for it in status.get(name) or ()]
    runs = any("running" in (it.get("state") or {}) for it in containers)
    return not (metadata.get("deletionTimestamp") or is_mirror or runs)

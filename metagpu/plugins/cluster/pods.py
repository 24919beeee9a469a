"""This node's Pods, followed: what the registry wants to know of them, and nothing more."""

from typing import TYPE_CHECKING, Final

from metagpu.core.facts import PodsTold
from metagpu.core.pods import KnownPod
from metagpu.core.registry import Registry
from metagpu.core.wishes import wishes_in
from metagpu.plugins.cluster.following import Following

if TYPE_CHECKING:
    from collections.abc import Sequence

    from metagpu.plugins.cluster.client import Client, Object

PODS: Final = "/api/v1/pods"


class FollowedPods(Following):
    """Tells the registry of the Pods that run on a node, whatever their namespace."""

    def __init__(self, client: "Client", node: str, registry: Registry) -> None:
        super().__init__(client, PODS, f"spec.nodeName={node}", f"{PODS} on {node}")
        self._registry = registry
        self._pods: dict[str, KnownPod] = {}

    def listed(self, items: "Sequence[Object]") -> None:
        """Take in all of them as they are now."""
        self._pods = {pod.uid: pod for pod in map(known_pod, items)}
        self._tell()

    def changed(self, it: "Object") -> None:
        """Take in one that is new or another than before."""
        pod = known_pod(it)
        if self._pods.get(pod.uid) != pod:
            self._pods[pod.uid] = pod
            self._tell()

    def deleted(self, it: "Object") -> None:
        """Take in that one is no more."""
        self._pods.pop(known_pod(it).uid, None)
        self._tell()

    def _tell(self) -> None:
        self._registry.apply(PodsTold(tuple(self._pods.values())))


def known_pod(it: "Object") -> KnownPod:
    """Keep of a Pod what we want to know: most of it is large, and changes often."""
    metadata = it["metadata"]
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]

    return KnownPod(
        uid=str(metadata["uid"]),
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        phase=str((it.get("status") or {}).get("phase") or ""),
        owner=f"{owners[0]['kind']}/{owners[0]['name']}" if owners else "",
        wishes=wishes_in(metadata.get("annotations") or {}),
    )

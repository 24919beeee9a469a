"""Pods that hold shares of a GPU, and what a drain does with each: pure functions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.kubectl.items import pod_items
from metagpu.kubectl.viewer import NodeAnswer

Object = Mapping[str, Any]
PodName = tuple[str, str]
"""Namespace and name."""
UNNAMED: Final[PodName] = ("", "a pod that is being admitted")
"""The holder of shares that the kubelet has not named yet."""

_HOLDER: Final = re.compile(r"([^/]+)/(\S+) \((.*)\)")
"""A holder in the daemon's status: `namespace/pod (container)`."""
_MIRROR: Final = "kubernetes.io/config.mirror"
"""The annotation of a pod by which the kubelet shows a static pod."""
_ENDED: Final = ("Succeeded", "Failed")


class Holding(msgspec.Struct, frozen=True):
    """Shares of one GPU that a container holds, alone or by a shared ResourceClaim."""

    pod: PodName
    container: str
    shares: int


class DrainedPod(msgspec.Struct, frozen=True):
    """A pod on a GPU that is drained.

    Attributes:
        uid: empty where the API server knows the pod no more.
        controller: as `ReplicaSet/web-1`, empty for none.
        stays: why it is not evicted, empty for a pod that is.
        ends: whether it is deleted already, and needs no eviction.
    """

    name: PodName
    uid: str = ""
    controller: str = ""
    stays: str = ""
    ends: bool = False

    @property
    def title(self) -> str:
        """Return namespace and name, as people write them."""
        return "/".join(part for part in self.name if part)

    @property
    def is_evicted(self) -> bool:
        """Return whether the drain evicts it."""
        return not (self.stays or self.ends)


def holdings_of(status: Object, gpu: str) -> Sequence[Holding]:
    """Return who holds shares of a GPU, by its uuid, in the status of its daemon.

    A share of a ResourceClaim has several holders; a holder's shares of all resources are summed.
    """
    found: dict[tuple[PodName, str], int] = {}
    for lease in status["leases"]:
        if lease["uuid"] == gpu:
            for text in (lease["holder"], *lease.get("sharers", ())):
                holder = _parse(text)
                found[holder] = found.get(holder, 0) + lease["shares"]
    return [Holding(pod, container, count) for (pod, container), count in sorted(found.items())]


def judge_pod(name: PodName, pod: Object | None, node: str, *, force: bool) -> DrainedPod:
    """Return what a drain does with a pod, which is `None` where it has gone.

    Args:
        name: namespace and name.
        pod: the object of the API server. A pod of another node has the name of one that has gone:
            StatefulSets give names again.
        node: the node of the GPU.
        force: evict it too if it is a DaemonSet's, or has no controller.
    """
    if pod is None or pod["spec"].get("nodeName") != node:
        return DrainedPod(name, ends=True)
    metadata = pod["metadata"]
    owners = [it for it in metadata.get("ownerReferences") or () if it.get("controller")]
    kind = str(owners[0]["kind"]) if owners else ""
    controller = f"{kind}/{owners[0]['name']}" if owners else ""
    ends = bool(metadata.get("deletionTimestamp"))
    stays = ""
    if not _asks_for_devices(pod["spec"]):
        stays = "it requests no device: the report of its node is wrong"
    elif _MIRROR in (metadata.get("annotations") or {}):
        stays = "a static pod, which only its node ends"
    elif not force and kind == "DaemonSet":
        stays = "of a DaemonSet; --force evicts it"
    elif not force and not owners:
        stays = "no controller makes it again; --force evicts it"
    return DrainedPod(name, str(metadata["uid"]), controller, "" if ends else stays, ends)


def is_running(pod: Object | None, uid: str) -> bool:
    """Return whether a pod has this uid, and has not ended."""
    if pod is None or pod["metadata"]["uid"] != uid:
        return False
    return (pod.get("status") or {}).get("phase") not in _ENDED


def rows_of(
    holdings: Iterable[Holding], pods: Mapping[PodName, DrainedPod], answer: NodeAnswer, gpu: str
) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table; memory is from the node's usage, where it answered."""
    used = {
        ((it["namespace"], it["pod"]), it["container"]): it
        for it in pod_items([answer])
        if it["uuid"] == gpu
    }
    rows = []
    for it in holdings:
        pod, memory = pods[it.pod], used.get((it.pod, it.container), {})
        rows.append(
            {
                "namespace": it.pod[0],
                "pod": it.pod[1],
                "container": it.container,
                "shares": it.shares,
                "usedMiB": memory.get("usedMiB"),
                "shareMiB": memory.get("shareMiB"),
                "controller": pod.controller or "none",
                "drain": f"stays: {pod.stays}" if pod.stays else "ends" if pod.ends else "evicted",
            }
        )
    return rows


def _asks_for_devices(spec: Object) -> bool:
    """Return whether a pod requests an extended resource, or has a ResourceClaim."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    limits = [(it.get("resources") or {}).get("limits") or {} for it in containers]
    return bool(spec.get("resourceClaims")) or any("/" in name for it in limits for name in it)


def _parse(text: str | None) -> tuple[PodName, str]:
    parts = _HOLDER.fullmatch(text or "")
    return ((parts[1], parts[2]), parts[3]) if parts else (UNNAMED, "")

"""This node's pods as the API server lists them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from metagpu.core.model.shares import Holder

ENDED_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""The phases of a pod whose containers have ended for good."""
STATIC_UID: Final = re.compile("[0-9a-f]{32}")
"""The uid of a static pod, which its kubelet makes; those of the API server have dashes."""


class Rejection(msgspec.Struct, frozen=True):
    """The kubelet did not admit a pod, because of a device plugin.

    Such a pod has failed for good: the kubelet starts none of its containers. They may have run
    before a reboot or a restart of the kubelet.

    Attributes:
        message: the kubelet's message, with the device plugin's reason in it.
        resources: the names of all extended resources that the pod requests.
        version: the pod's resource version as it was read; empty if nobody may delete it: it is
            being deleted, mirrors a static pod, or a container of it runs.
    """

    message: str
    resources: frozenset[str] = frozenset()
    version: str = ""


class KnownPod(msgspec.Struct, frozen=True):
    """A pod as the API server lists it.

    Attributes:
        uid: the uid by which the kubelet knows the pod: of a static pod not that of its mirror.
        phase: the pod's phase, as `Running`.
        owner: kind and name of its controller, as `ReplicaSet/train-7d9f`; empty without one.
        memory_annotations: its annotations about GPU memory (`core/usage/annotations.py`).
        owner_uid: uid of its controller; `owner_api` is the controller's API, as `apps/v1`.
        rejection: why the kubelet did not admit it, `None` for all other pods.
        terminating: whether the pod may end in the next moment: it has been deleted, or all its
            containers have ended for good.
        stopping: whether the kubelet is about to kill the pod's containers, as its grace period is
            nearly over.
        requests: the shares of each resource that the pod requests, as the scheduler counts them.
        claims: the requests of ResourceClaims that each container names: the name of the claim,
            and the request, empty for the whole claim.
        arriving: whether the pod is bound to the node, and the kubelet has not admitted it yet.
        gpu_annotations: its annotations about its GPUs (`core/model/gpu_preference.py`).
        containers: the shares of each resource that each container requests, init containers first.
        handing_on: the init containers whose shares the kubelet gives to later containers again.
    """

    uid: str
    namespace: str
    name: str
    phase: str = ""
    owner: str = ""
    memory_annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    owner_uid: str = ""
    owner_api: str = ""
    rejection: Rejection | None = None
    terminating: bool = False
    stopping: bool = False
    requests: Mapping[str, int] = msgspec.field(default_factory=dict)
    arriving: bool = False
    claims: Mapping[str, frozenset[tuple[str, str]]] = msgspec.field(default_factory=dict)
    gpu_annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    containers: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    handing_on: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def ended(self) -> bool:
        """True if the containers of the pod have ended for good."""
        return self.phase in ENDED_PHASES

    def rooms(self, container: str, resource: str) -> tuple[int, ...]:
        """Return the shares that one GPU should have free for later containers.

        Those are the shares of the whole pod, or else of its largest container.
        """
        if container not in self.handing_on:
            return ()
        counts = [requests.get(resource, 0) for requests in self.containers.values()]
        wanted = self.containers[container].get(resource, 0)
        rooms = self.requests.get(resource, 0), max(counts)
        return tuple(dict.fromkeys(room for room in rooms if room > wanted > 0))


class PodIndex(msgspec.Struct, frozen=True):
    """All pods of the node; empty before the API server has answered, or without one.

    Attributes:
        terminating: namespace and name of the pods that may end in the next moment, or have ended.
        stopping: the uids of the pods whose containers the kubelet is about to kill.
        requested: the shares that all pods request which have not ended.
        arriving: those that pods request which are bound to the node and not admitted yet.
        awaited: whether an API server reports pods, also before its first answer.
        listed: whether it has answered.
        asked: the event loop's time at which the last complete list was requested.
        preferring: whether any of the pods names the GPUs that it prefers.
    """

    by_uid: Mapping[str, KnownPod] = msgspec.field(default_factory=dict)
    by_name: Mapping[tuple[str, str], KnownPod] = msgspec.field(default_factory=dict)
    terminating: frozenset[tuple[str, str]] = frozenset()
    stopping: frozenset[str] = frozenset()
    requested: Mapping[str, int] = msgspec.field(default_factory=dict)
    arriving: Mapping[str, int] = msgspec.field(default_factory=dict)
    awaited: bool = False
    listed: bool = False
    asked: float = float("-inf")
    preferring: bool = False

    @classmethod
    def from_pods(cls, pods: Iterable[KnownPod], asked: float = float("-inf")) -> "PodIndex":
        """Index pods; of two pods of one name, `by_name` has the one that still runs."""
        known = tuple(pods)
        running_last = sorted(known, key=lambda pod: not pod.ended)
        return cls(
            MappingProxyType({pod.uid: pod for pod in known}),
            MappingProxyType({(pod.namespace, pod.name): pod for pod in running_last}),
            frozenset((pod.namespace, pod.name) for pod in known if pod.terminating or pod.ended),
            frozenset(pod.uid for pod in known if pod.stopping),
            _sum_requests(pod for pod in known if not pod.ended),
            _sum_requests(pod for pod in known if pod.arriving),
            awaited=True,
            listed=True,
            asked=asked,
            preferring=any(pod.gpu_annotations for pod in known),
        )

    @property
    def annotated(self) -> tuple[KnownPod, ...]:
        """The pods with annotations about GPU memory."""
        return tuple(pod for pod in self.by_uid.values() if pod.memory_annotations)

    def has_ended(self, pod: Holder | str, since: float) -> bool:
        """Return whether the pod of a holder, or of a uid, has ended.

        The API server says so, or a complete list that was requested later lacks the pod. Without
        such a list nobody knows. A list lacks a static pod also while its mirror is made again.

        Args:
            pod: a container of the pod, or the pod's uid.
            since: the event loop's time at which the kubelet was known to have the pod.
        """
        known = self.by_uid.get(pod) if isinstance(pod, str) else self.find(pod, None)
        if known is None:
            return since < self.asked and not (isinstance(pod, str) and STATIC_UID.fullmatch(pod))
        return known.ended

    def may_have_ended(self, pod: Holder | str, since: float) -> bool:
        """Return whether a complete present list would show that a pod has ended."""
        known = self.by_uid.get(pod) if isinstance(pod, str) else self.find(pod, None)
        return self.listed and known is None and since >= self.asked

    def find(self, holder: Holder, uid: str | None) -> KnownPod | None:
        """Find a container's pod: by its uid where that is known, else by its name."""
        if uid is not None:
            return self.by_uid.get(uid)
        return self.by_name.get((holder.namespace, holder.pod))


def _sum_requests(pods: Iterable[KnownPod]) -> Mapping[str, int]:
    found = Counter[str]()
    for pod in pods:
        found.update(pod.requests)
    return found

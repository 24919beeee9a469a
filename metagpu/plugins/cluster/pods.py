"""This node's Pods: their informer, and the competing device plugins among them.

The informer keeps the few fields that the registry needs. The socket of a competing plugin alone
decides that metagpu does not register a resource (plugins/kubelet/endpoint); the pod, recognized by
its DaemonSet, names the plugin for people.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
from msgspec.structs import replace

from metagpu.core.model.gpu_preference import gpu_annotations
from metagpu.core.model.pods import KnownPod, Rejection
from metagpu.core.model.quantities import whole_number
from metagpu.core.state.events import PodListRequested
from metagpu.core.state.facts import PodsListed
from metagpu.core.state.registry import Registry
from metagpu.core.usage.annotations import memory_annotations
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.watch import Informer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from time import time

from metagpu.core.reports.schema.daemon import CompetingPodReport

PODS: Final = "/api/v1/pods"
REJECTED: Final = "UnexpectedAdmissionError"
"""The kubelet's reason where a device plugin, or the kubelet's device manager, rejects a pod."""
MIRROR: Final = "kubernetes.io/config.mirror"
"""The annotation of a pod by which the kubelet shows a static pod."""
SOON: Final = 3.0
"""Seconds from a Pod's deletion in which most Pods end."""
EARLY: Final = 0.5
"""Seconds by which the end of a grace period may be seen too late."""
STOPPING: Final = 2.0
"""Seconds around the end of a grace period in which the kubelet kills what is left of a Pod."""
_STATUSES: Final = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")


class DeletedPod(msgspec.Struct, frozen=True):
    """The deletion of a Pod. Times are seconds, of the event loop.

    Most Pods end soon after their deletion; the others have until the end of their grace period.

    Attributes:
        seen: when the deletion was seen, with this grace period.
        grace: how long the Pod's containers may still run.
    """

    seen: float
    grace: float

    def is_ending(self, now: float) -> bool:
        """Return whether the Pod may end in the next moment."""
        return now < self.seen + SOON or now >= self.seen + self.grace - EARLY

    def is_stopping(self, now: float) -> bool:
        """Return whether the kubelet is about to kill the Pod's containers.

        At least half of the grace period is the Pod's own.
        """
        begin, end = self._stopping
        return begin <= now < end

    def next_change(self, now: float) -> float:
        """Return the time at which `is_ending` or `is_stopping` may change."""
        times = self.seen + SOON, self.seen + self.grace - EARLY, *self._stopping
        return min((time for time in times if time > now), default=math.inf)

    @property
    def _stopping(self) -> tuple[float, float]:
        kill = self.seen + self.grace
        return kill - min(STOPPING, self.grace / 2), kill + STOPPING


LIST_PERIOD: Final = 2.0
"""Seconds between two complete lists that are requested because pods may have ended."""


class PodInformer(Informer):
    """Reports the Pods of a node, of all namespaces, to the registry."""

    spread = 5.0  # what waits for a Pod, as the end of its grace, may wait for this

    def __init__(self, client: "KubeClient", node: str, registry: Registry) -> None:
        super().__init__(client, PODS, f"spec.nodeName={node}", f"{PODS} on {node}")
        self._registry = registry
        self._pods: dict[str, KnownPod] = {}
        self._deleted: dict[str, DeletedPod] = {}
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Follow the Pods until cancelled, and report when those that are deleted may end."""
        async with anyio.create_task_group() as group:
            group.start_soon(super().run)
            group.start_soon(self._list_on_request)
            while True:
                self._changed = anyio.Event()
                now = anyio.current_time()
                due = min(
                    (pod.next_change(now) for pod in self._deleted.values()), default=math.inf
                )
                with anyio.move_on_at(due):
                    await self._changed.wait()
                    continue
                self._publish()

    async def _list_on_request(self) -> None:
        """List all Pods where that shows whether the pods of leases have ended."""
        with self._registry.events.subscribe(PodListRequested) as requests:
            async for request in requests:
                await anyio.sleep_until(self.asking + LIST_PERIOD)
                if isinstance(request, PodListRequested) and request.at >= self.asking:
                    self.list_again()

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in the complete list of Pods."""
        self._pods = {}
        for item in items:
            self._take_in(item)
        self._publish()

    def on_update(self, item: KubeObject) -> None:
        """Take in a Pod that is new or changed."""
        if self._take_in(item):
            self._publish()

    def on_delete(self, item: KubeObject) -> None:
        """Take in the deletion of a Pod."""
        pod = known_pod(item)
        if str(self._pods.get(pod.uid)) == str(pod):
            del self._pods[pod.uid]
            self._publish()

    def _take_in(self, item: KubeObject) -> bool:
        """Note a Pod, and a new or shorter grace period; return whether it has changed.

        A Pod that was deleted before the API server's last answer, a list or the begin of a watch,
        has less than its grace left. Times are by its clock, which may differ from this node's.
        The deletion of a mirror ends no container: the kubelet makes it again.
        """
        pod, metadata = known_pod(item), item["metadata"]
        grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
        is_mirror, known = pod.uid != metadata["uid"], self._pods.get(pod.uid)
        if is_mirror and known is not None and str(known) != str(pod):
            return False  # anybody may claim to mirror a Pod, and so to be it
        before = self._deleted.get(pod.uid)
        deleted = (
            "deletionTimestamp" in metadata
            and not is_mirror
            and (before is None or grace < before.grace)
        )
        if deleted:
            end = datetime.fromisoformat(metadata["deletionTimestamp"]).timestamp()
            left = max(0.0, min(grace, end - (self._client.date or time())))
            self._deleted[pod.uid] = DeletedPod(anyio.current_time(), left)
            self._changed.set()
        if known == pod:
            return deleted
        self._pods[pod.uid] = pod
        return True

    def _publish(self) -> None:
        now = anyio.current_time()
        self._deleted = {uid: pod for uid, pod in self._deleted.items() if uid in self._pods}
        ending = {uid for uid, pod in self._deleted.items() if pod.is_ending(now)}
        stopping = {uid for uid, pod in self._deleted.items() if pod.is_stopping(now)}
        pods = (
            replace(pod, terminating=pod.terminating or uid in ending, stopping=uid in stopping)
            if uid in self._deleted
            else pod
            for uid, pod in self._pods.items()
        )
        self._registry.apply(PodsListed(tuple(pods), self.asked))


def known_pod(item: KubeObject) -> KnownPod:
    """Return the needed fields of a Pod: the rest is large, and changes often."""
    metadata = item["metadata"]
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    owner = owners[0] if owners else {}

    return KnownPod(
        uid=_kubelets_uid(metadata),
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        phase=str((item.get("status") or {}).get("phase") or ""),
        owner=f"{owner['kind']}/{owner['name']}" if owner else "",
        memory_annotations=memory_annotations(metadata.get("annotations") or {}),
        owner_uid=str(owner.get("uid") or ""),
        owner_api=str(owner.get("apiVersion") or ""),
        rejection=_rejection(item),
        terminating=_containers_ended(item),
        requests=_requests(item.get("spec") or {}),
        arriving=_is_arriving(item.get("status") or {}),
        claims=requests_by_container(item),
        gpu_annotations=gpu_annotations(metadata.get("annotations") or {}),
        containers=_container_requests(item.get("spec") or {}),
        handing_on=_handing_on(item.get("spec") or {}),
    )


def _kubelets_uid(metadata: KubeObject) -> str:
    """Return the uid by which the kubelet knows a Pod; a mirror names another."""
    return str((metadata.get("annotations") or {}).get(MIRROR) or metadata["uid"])


def _container_requests(spec: KubeObject) -> Mapping[str, Mapping[str, int]]:
    """Return the extended resources that containers request, init containers first."""
    containers = *(spec.get("initContainers") or ()), *(spec.get("containers") or ())
    return {
        str(container.get("name")): limits
        for container in containers
        if (limits := _limits(container))
    }


def _handing_on(spec: KubeObject) -> frozenset[str]:
    """Return the init containers, no sidecars, with extended resources."""
    return frozenset(
        str(container.get("name"))
        for container in spec.get("initContainers") or ()
        if container.get("restartPolicy") != "Always" and _limits(container)
    )


def _requests(spec: KubeObject) -> Mapping[str, int]:
    """Return the extended resources that a Pod requests, as the scheduler counts them.

    Containers run together, and sidecars beside them; each init container runs beside the sidecars
    before it.
    """
    found, sidecars, most = Counter[str](), Counter[str](), Counter[str]()
    for container in spec.get("initContainers") or ():
        wanted = _limits(container)
        if container.get("restartPolicy") == "Always":
            sidecars += wanted
            most |= sidecars
        else:
            most |= sidecars + wanted
    for container in spec.get("containers") or ():
        found += _limits(container)
    return (found + sidecars) | most


def _limits(container: KubeObject) -> Counter[str]:
    limits: KubeObject = (container.get("resources") or {}).get("limits") or {}
    return Counter({name: whole_number(n) or 0 for name, n in limits.items() if "/" in name})


def _is_arriving(status: KubeObject) -> bool:
    """Return whether a Pod has still to be admitted: its start time is set then."""
    return status.get("phase") == "Pending" and "startTime" not in status


def _containers_ended(item: KubeObject) -> bool:
    """Return whether the kubelet starts none of a Pod's containers again.

    It reports the end of the containers a second before that of the Pod.
    """
    spec, status = item.get("spec") or {}, item.get("status") or {}
    policy, containers = spec.get("restartPolicy"), spec.get("containers") or ()
    ends = [
        end
        for container_status in status.get("containerStatuses") or ()
        if (end := (container_status.get("state") or {}).get("terminated")) is not None
    ]
    succeeded = all(end.get("exitCode") == 0 for end in ends)
    for_good = policy == "Never" or (policy == "OnFailure" and succeeded)
    return for_good and bool(containers) and len(ends) == len(containers)


def _rejection(item: KubeObject) -> Rejection | None:
    status = item.get("status") or {}
    if status.get("phase") != "Failed" or status.get("reason") != REJECTED:
        return None
    spec = item.get("spec") or {}
    requests = [
        (container.get("resources") or {}).get("limits") or {}
        for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
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
    containers = [
        container_status for name in _STATUSES for container_status in status.get(name) or ()
    ]
    runs = any("running" in (container.get("state") or {}) for container in containers)
    return not (metadata.get("deletionTimestamp") or is_mirror or runs)


def requests_by_container(item: KubeObject) -> Mapping[str, frozenset[tuple[str, str]]]:
    """Return claim and request of each container; an empty request is the whole claim.

    The claim of extended resources is in the status alone.
    """
    spec, status = item.get("spec") or {}, item.get("status") or {}
    extended = status.get("extendedResourceClaimStatus") or {}
    if not spec.get("resourceClaims") and not extended:
        return {}
    statuses = status.get("resourceClaimStatuses") or ()
    made = {made_claim["name"]: made_claim.get("resourceClaimName") for made_claim in statuses}
    names = {
        resource_claim["name"]: resource_claim.get("resourceClaimName")
        or made.get(resource_claim["name"])
        for resource_claim in spec.get("resourceClaims") or ()
    }
    found = defaultdict[str, set[tuple[str, str]]](set)
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for claim in (container.get("resources") or {}).get("claims") or ():
            if name := names.get(claim["name"]):
                found[container["name"]].add((name, claim.get("request") or ""))
    for mapping in extended.get("requestMappings") or ():
        found[mapping["containerName"]].add((extended["resourceClaimName"], mapping["requestName"]))
    return {container: frozenset(those) for container, those in found.items()}


_NVIDIA: Final = "nvidia.com/"
_PROGRAMS: Final = (
    ("HAMi's device plugin", r"(.+-)?hami-device-plugin", (_NVIDIA,)),
    ("NVIDIA's device plugin", r"(.+-)?nvidia-device-plugin(-daemonset|-ds)?", (_NVIDIA,)),
    ("GKE's device plugin", r"nvidia-gpu-device-plugin(-.+)?", (_NVIDIA,)),
    ("cnvrg's MetaGPU", r"(.+-)?metagpu-device-plugin", ("cnvrg.io/",)),
)
"""Names of competing plugins, patterns of their DaemonSets, prefixes of their resources.

The patterns follow the plugins' charts and manifests; the GPU operator's plugin is NVIDIA's.
"""


class CompetingPod(msgspec.Struct, frozen=True):
    """A competing device plugin's pod on this node.

    Attributes:
        program: the plugin's name, for people.
        prefixes: the prefixes of its resource names.
    """

    program: str
    pod: str
    prefixes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.program} (pod {self.pod})"

    def contested(self, resources: Iterable[str]) -> list[str]:
        """Return the resources of these that the plugin may serve too."""
        return sorted(resource for resource in resources if resource.startswith(self.prefixes))


def find_competing_pods(pods: Iterable[KnownPod]) -> tuple[CompetingPod, ...]:
    """Find competing device plugins among the pods of this node."""
    found = []

    for pod in pods:
        kind, _, owner = pod.owner.partition("/")
        if kind != "DaemonSet" or pod.ended:
            continue
        for program, pattern, prefixes in _PROGRAMS:
            if re.fullmatch(pattern, owner):
                found.append(CompetingPod(program, str(pod), prefixes))
                break
    return tuple(sorted(found, key=lambda competing_pod: competing_pod.pod))


def describe_competing_pod(pod: CompetingPod, offered: Iterable[str]) -> str:
    """Describe a competing plugin and its effect on our resources, for an Event."""
    if contested := pod.contested(offered):
        return (
            f"{pod} runs on this node; it may serve {', '.join(contested)} as we do, and "
            "metagpu does not register what it serves. Remove it from this node, or give our "
            "resource another name"
        )
    return (
        f"{pod} runs on this node and allocates its GPUs under other names than ours; metagpu "
        "leaves its containers alone. Remove it from this node"
    )


@dataclass(eq=False)
class CompetingPodWatch:
    """Finds competing plugins among the node's pods, whenever the pods change.

    Attributes:
        on_found: a function that receives each new pod.
        found: the competing pods that run now.
    """

    registry: Registry
    on_found: Callable[[CompetingPod], None]
    found: tuple[CompetingPod, ...] = ()

    async def run(self) -> None:
        """Watch until cancelled; report pods once the offered resources are known."""
        reported: set[CompetingPod] = set()

        async for pods, offered in self.registry.watch(lambda now: (now.pods, bool(now.offers))):
            self.found = find_competing_pods(pods.by_uid.values())
            if not offered:
                continue
            for pod in self.found:
                if pod not in reported:
                    self.on_found(pod)
            reported = set(self.found)

    def name_competitor(self, resource: str) -> str:
        """Name the competing plugins that may serve a resource."""
        names = [str(pod) for pod in self.found if pod.contested([resource])]
        return " or ".join(names) or "another device plugin"

    def report(self, offered: Sequence[str]) -> list[CompetingPodReport]:
        """Return the competing pods."""
        return [
            CompetingPodReport(pod.program, pod.pod, list(pod.contested(offered)))
            for pod in self.found
        ]

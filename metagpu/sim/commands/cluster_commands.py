"""The commands of `metagpu sim` about a simulated cluster.

As the commands about the hardware, each is a value that a connection carries as JSON. The cluster
itself is loaded where it runs, and not by the command line.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from metagpu.core.config.config import name_problem
from metagpu.sim.cluster.claim_manifest import ClaimManifest
from metagpu.sim.cluster.document_forms import ACTED_ON, unread
from metagpu.sim.cluster.pod_manifest import MAX_DEVICES, PodManifest
from metagpu.sim.cluster.views import ClaimView, ClusterReply, PodView
from metagpu.sim.machine.bounds import check_name, check_range
from metagpu.sim.machine.gpu import SimError

if TYPE_CHECKING:
    from metagpu.sim.cluster.single_node import SingleNodeCluster

__all__ = ["AnyClusterCommand", "ClusterCommand", "counted"]

MAX_PODS: Final = 1000
"""Pods of one burst."""


class ClusterCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do"):
    """One request of a user to the cluster."""

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        """Carry the command out.

        Raises:
            MetagpuError: the cluster refuses; the error states why.
        """
        raise NotImplementedError


class ApplyCommand(ClusterCommand, frozen=True, tag="apply"):
    """Create or change the objects of a manifest, all or none, and wait for pods."""

    documents: tuple[Mapping[str, Any], ...]
    namespace: str = "default"

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        outcomes, keys = await cluster.manifests.apply(self.documents, self.namespace)
        titles = dict(zip(outcomes, map(_title, self.documents), strict=True))
        lines = [
            f"{outcome} {', '.join(titles[key] for key in titles if outcomes[key] == outcome)}"
            for outcome in dict.fromkeys(outcomes.values())
        ]
        pods = cluster.views(keys)
        users = {(pod.namespace, pod.name) for pod in pods}
        claims = [
            view
            for view in cluster.claims.views()
            if view.devices and not users.isdisjoint((view.namespace, pod) for pod in view.pods)
        ]
        lines += [*map(describe_pod, pods), *map(describe_claim, claims)]
        objects = cluster.api.store.objects
        specs = [objects[key]["spec"] for key in keys if key in objects]
        if names := dict.fromkeys(name for spec in specs for name in unread(spec)):
            lines.append(f"not looked at here: {', '.join(names)}")
        if kinds := sorted({document["kind"] for document in self.documents} - ACTED_ON):
            lines.append(f"nothing here acts on objects of the kind {', '.join(kinds)}")
        return ClusterReply("\n".join(lines), pods=tuple(pods))


class DeleteCommand(ClusterCommand, frozen=True, tag="delete"):
    """Delete the objects of a manifest with their pods, and wait for their end."""

    documents: tuple[Mapping[str, Any], ...]
    namespace: str = "default"

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        titles = ", ".join(map(_title, self.documents))
        if await cluster.manifests.delete(self.documents, self.namespace):
            return ClusterReply(f"deleted {titles}")
        return ClusterReply(f"{titles}: deleted, and gone when the kubelet can end the pods")


class PodAddCommand(ClusterCommand, frozen=True, tag="pod-add"):
    """Create a pod, and wait until scheduler and kubelet have decided on it."""

    pod: PodManifest

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        pods = await cluster.add_pods([self.pod])
        if not pods:
            raise SimError(f"pod {self.pod.name} was deleted meanwhile")
        return ClusterReply(describe_pod(pods[0]), pods=tuple(pods))


class PodEndCommand(ClusterCommand, frozen=True, tag="pod-end"):
    """Delete a pod, and wait until its kubelet has ended it."""

    name: str
    namespace: str = "default"

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        if await cluster.end_pod(self.name, self.namespace):
            return ClusterReply(f"pod {self.name} has ended")
        return ClusterReply(f"pod {self.name} is deleted, and ends when the kubelet can end it")


class PodListCommand(ClusterCommand, frozen=True, tag="pod-list"):
    """List the pods: phase, requests, devices, and why a pod waits or has failed."""

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        return ClusterReply("", pods=tuple(cluster.pods()))


class ProcessStartCommand(ClusterCommand, frozen=True, tag="process-start"):
    """Start a process, in a pod or by the PID of one that exists elsewhere."""

    pod: str
    namespace: str = "default"
    container: str = ""
    gpu: str = ""
    memory: int | None = None
    load: int = 0

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        check_range("--load", self.load, 0, 100)
        place = self.pod, self.namespace, self.container, self.gpu
        pid = await cluster.start_process(*place, memory=self.memory, load=self.load)
        found = tuple(view for view in cluster.containers.views() if view.pid == pid)
        return ClusterReply("\n".join(map(str, found)), processes=found)


class ProcessEndCommand(ClusterCommand, frozen=True, tag="process-end"):
    """End the processes of a pod, or one on a GPU."""

    pod: str
    namespace: str = "default"

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        found = await cluster.end_processes(self.pod, self.namespace)
        ended = "process has ended" if len(found) == 1 else "processes have ended"
        return ClusterReply(f"{len(found)} {ended} in pod {self.pod}")


class ProcessListCommand(ClusterCommand, frozen=True, tag="process-list"):
    """List the processes in pods: container, GPU, memory and load."""

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        return ClusterReply("", processes=tuple(cluster.containers.views()))


class ClaimAddCommand(ClusterCommand, frozen=True, tag="claim-add"):
    """Create a ResourceClaim with its pod, and wait for devices."""

    claim: ClaimManifest

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        await cluster.manifests.create(self.claim.documents())
        found = [
            view
            for view in cluster.claims.views()
            if (view.name, view.namespace) == (self.claim.name, self.claim.namespace)
        ]
        return ClusterReply("\n".join(map(describe_claim, found)), claims=tuple(found))


class ClaimEndCommand(ClusterCommand, frozen=True, tag="claim-end"):
    """Delete a ResourceClaim with its pods, and wait until its devices are free."""

    name: str
    namespace: str = "default"

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        if await cluster.end_claim(self.name, self.namespace):
            return ClusterReply(f"claim {self.name} has ended")
        return ClusterReply(f"claim {self.name} is deleted, and ends when its pods have ended")


class ClaimListCommand(ClusterCommand, frozen=True, tag="claim-list"):
    """List the ResourceClaims: state, devices, node, pods, and why a claim waits."""

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        return ClusterReply("", claims=tuple(cluster.claims.views()))


class BurstCommand(ClusterCommand, frozen=True, tag="burst"):
    """Create many pods at once, and count what becomes of them."""

    count: int
    resource: str
    sizes: tuple[int, int]
    namespace: str = "default"
    seed: int | None = None

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        check_range("the number of pods", self.count, 1, MAX_PODS)
        check_range("the smallest size", self.sizes[0], 1, MAX_DEVICES)
        check_range("the largest size", self.sizes[1], self.sizes[0], MAX_DEVICES)
        pods = await cluster.burst(self.count, self.resource, self.sizes, self.namespace, self.seed)
        phases = Counter(pod.phase for pod in pods)
        counts = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
        noun = "pod" if len(pods) == 1 else "pods"
        return ClusterReply(f"{len(pods)} {noun}: {counts}", pods=tuple(pods))


class KubeletCommand(ClusterCommand, frozen=True, tag="kubelet"):
    """Restart the kubelet, stop it, or restart it without its checkpoint (forget)."""

    change: Literal["restart", "forget", "stop"]

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        if self.change == "stop":
            await cluster.stop_kubelet()
            return ClusterReply("the kubelet is stopped")
        await cluster.restart_kubelet(forget=self.change == "forget")
        lost = " without its checkpoint" if self.change == "forget" else ""
        return ClusterReply(f"the kubelet was restarted{lost}")


class NodeLabelCommand(ClusterCommand, frozen=True, tag="node-label"):
    """Set labels of the Node, or remove them (KEY-)."""

    labels: Mapping[str, str | None]

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        cluster.label_node(self.labels)
        said = ", ".join(
            f"{name} removed" if value is None else f"{name}={value}"
            for name, value in self.labels.items()
        )
        return ClusterReply(f"labels of node {cluster.name}: {said}")


class NodeShowCommand(ClusterCommand, frozen=True, tag="node-show"):
    """Show the Node: resources with requests, labels, taints and conditions."""

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        return ClusterReply("", node=cluster.node())


class EventListCommand(ClusterCommand, frozen=True, tag="event-list"):
    """List the Events of the Node and of pods, the oldest first."""

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        return ClusterReply("", events=tuple(cluster.events()))


class ConfigMapCommand(ClusterCommand, frozen=True, tag="config-map"):
    """Create or replace a ConfigMap."""

    namespace: str
    name: str
    data: Mapping[str, str]

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        check_name("the namespace", self.namespace)
        check_name("the ConfigMap", self.name)
        cluster.set_config_map(self.namespace, self.name, self.data)
        keys = ", ".join(self.data)
        return ClusterReply(f"ConfigMap {self.namespace}/{self.name} has the keys: {keys}")


class PluginCommand(ClusterCommand, frozen=True, tag="plugin"):
    """Start a second device plugin for a resource, or end it."""

    change: Literal["start", "end"]
    resource: str = ""
    devices: int = 1

    async def apply(self, cluster: "SingleNodeCluster") -> ClusterReply:
        if self.change == "end":
            await cluster.end_plugin()
            return ClusterReply("the second plugin has ended")
        if problem := name_problem(self.resource):
            raise SimError(f"{self.resource!r} is not an extended resource: {problem}")
        check_range("--devices", self.devices, 0, MAX_DEVICES)
        ids = [f"other-{number}" for number in range(self.devices)]
        await cluster.start_plugin(self.resource, ids)
        return ClusterReply(
            f"a second plugin registered {self.resource} with {self.devices} devices"
        )


AnyClusterCommand: TypeAlias = (
    ApplyCommand
    | DeleteCommand
    | PodAddCommand
    | PodEndCommand
    | PodListCommand
    | ProcessStartCommand
    | ProcessEndCommand
    | ProcessListCommand
    | ClaimAddCommand
    | ClaimEndCommand
    | ClaimListCommand
    | BurstCommand
    | KubeletCommand
    | NodeLabelCommand
    | NodeShowCommand
    | EventListCommand
    | ConfigMapCommand
    | PluginCommand
)
"""Any of the commands, for `msgspec.json.decode(data, type=AnyClusterCommand)`."""


def _title(document: Mapping[str, Any]) -> str:
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def describe_pod(pod: PodView) -> str:
    """Return what became of a pod, in one line."""
    why = ": ".join(text for text in (pod.reason, pod.message) if text)
    if pod.gpus:
        gpus = "GPU" if len(pod.gpus) == 1 else "GPUs"
        why = why or f"{counted(pod.resources)} on {gpus} {', '.join(map(str, pod.gpus))}"
    return f"pod {pod} is {pod.phase}{f': {why}' if why else ''}"


def describe_claim(claim: ClaimView) -> str:
    """Return what became of a claim, in one line."""
    found = ", ".join(map(str, claim.devices)) or claim.message
    return f"claim {claim} is {claim.state}{f': {found}' if found else ''}"


def counted(resources: Mapping[str, int]) -> str:
    """Return numbers of devices with their resources' names, as people write them."""
    names: Sequence[str] = [f"{resource}={count}" for resource, count in resources.items()]
    return ", ".join(names)

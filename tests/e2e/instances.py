"""A node whose GPUs are cut by MIG, in the words its tests are written in."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import anyio
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.plugins.pb import v1
from tests.e2e.cluster import IDLE_COMMAND, NAMESPACE, Cluster
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.waiting import wait_for

PREFIX = "nvidia.com/mig-"
SETTLED_S = 90.0
ANSWER_S = 5.0
NOBODYS = "nobody holds it"
"""In a complaint about an instance that is there for no pod."""
MEMORY_SLICES = {"1g.5gb": 1, "2g.10gb": 2, "3g.20gb": 4, "7g.40gb": 8}
"""Of an A100 with 40 GB, by profile."""


def asking(name: str, resource: str, count: int = 1) -> Document:
    """A pod that idles with instances of a resource, and costs the machine little to start.

    Its environment has its own name, by which it is found among the machine's processes.
    """
    main = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "command": IDLE_COMMAND,
        "env": [{"name": "POD", "value": name}],
        "resources": {"limits": {resource: str(count)}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "containers": [main],
            "hostNetwork": True,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
        },
    }


@dataclass(frozen=True)
class Instances:
    """What is on the GPUs, what the kubelet says that pods hold, and what pods were told.

    Attributes:
        made: uuid of each MIG device -> the share it stands for, `GPU-…::2g.10gb@4`.
        halves: GPU instances without a compute instance, as shares.
        held: share -> the pods that hold it, by PodResources.
        told: pod -> the MIG devices in its environment.
    """

    made: Mapping[str, str]
    halves: Sequence[str]
    held: Mapping[str, Sequence[str]]
    told: Mapping[str, Sequence[str]]

    def complaints(self) -> Iterator[str]:
        """Everything that is not where it should be, nothing if all is well."""
        yield from self._given_twice()
        yield from self._misplaced()

    def _given_twice(self) -> Iterator[str]:
        for share, pods in self.held.items():
            if len(pods) > 1:
                yield f"{share} is held twice, by {' and '.join(pods)}"
        for one, other in combinations(sorted(self.held), 2):
            if overlap(one, other):
                yield f"{one} and {other} are held and overlap"
        for device, count in Counter(it for pod in self.told.values() for it in pod).items():
            if count > 1:
                yield f"{device} was told to {count} pods"

    def _misplaced(self) -> Iterator[str]:
        holders = {pod for pods in self.held.values() for pod in pods}
        for pod in sorted(holders | set(self.told)):
            mine = sorted(share for share, pods in self.held.items() if pod in pods)
            devices = self.told.get(pod, ())
            its = sorted(self.made.get(device, f"{device}, which is gone") for device in devices)
            if its != mine:
                yield f"pod {pod} holds {mine} and was told of {its}"
        there = set(self.made.values())
        for share in sorted(set(self.held) - there):
            yield f"pod {self.held[share][0]} holds {share}, which is not there"
        for share in sorted((there | set(self.halves)) - set(self.held)):
            yield f"{share} is there and {NOBODYS}"


@dataclass(frozen=True)
class MigNode:
    """A node with MIG instances, and what is seen of them."""

    cluster: Cluster

    def seen(self) -> Instances:
        """Look at all of it; between two changes only, for it is not one look."""
        made: dict[str, str] = {}
        halves: list[str] = []
        for gpu in self.cluster.daemon.simulated_gpus():
            for instance in gpu["instances"]:
                share = f"{gpu['uuid']}::{instance['place']}"
                made.update(dict.fromkeys(instance["uuids"], share))
                halves += [] if instance["uuids"] else [share]
        return Instances(made, halves, held_shares(), told_devices())

    def await_in_place(self, *excused: str) -> Instances:
        """Wait until every instance is where its pod is, and nowhere else.

        A complaint that has one of EXCUSED in it is none.
        """

        def probe() -> Instances:
            seen = self.seen()
            complaints = [it for it in seen.complaints() if not any(e in it for e in excused)]
            if complaints:
                raise RigError("; ".join(complaints))
            return seen

        return wait_for("every instance to be where its pod is", probe, within_s=SETTLED_S)

    def await_nothing(self) -> None:
        """Wait until no instance is left and nobody holds one."""

        def probe() -> bool:
            seen = self.seen()
            if seen.made or seen.halves or seen.held:
                raise RigError(f"there is {seen.made} {seen.halves}, held is {seen.held}")
            return True

        wait_for("no instance to be left", probe, within_s=SETTLED_S)

    def await_amounts(self, amounts: Mapping[str, tuple[int, int]]) -> None:
        """Wait until the node has these amounts: profile -> capacity and allocatable."""
        for profile, (capacity, allocatable) in amounts.items():
            self.cluster.await_amounts(capacity, allocatable, PREFIX + profile)


def overlap(one: str, other: str) -> bool:
    """Tell whether two shares are of the same slices of one GPU."""
    (gpu, mine), (its, theirs) = _slices(one), _slices(other)
    return gpu == its and bool(mine & theirs)


def _slices(share: str) -> tuple[str, set[int]]:
    gpu, _, place = share.partition("::")
    profile, _, start = place.partition("@")
    return gpu, set(range(int(start), int(start) + MEMORY_SLICES[profile]))


def held_shares() -> dict[str, list[str]]:
    """Share -> the pods that hold it, as the kubelet's PodResources has it."""
    answer = anyio.run(_listed)
    held: dict[str, list[str]] = defaultdict(list)
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name.startswith("nvidia.com/"):
                    for share in devices.device_ids:
                        held[share].append(pod.name)
    return dict(held)


async def _listed() -> v1.ListPodResourcesResponse:
    socket = KUBELET_HOME / "pod-resources" / "kubelet.sock"
    try:
        async with Channel(path=str(socket)) as channel:
            stub = v1.PodResourcesListerStub(channel)
            return await stub.list(v1.ListPodResourcesRequest(), timeout=ANSWER_S)
    except (OSError, GRPCError, StreamTerminatedError) as error:
        raise RigError(f"the kubelet does not say who holds what: {error!r}") from error


def told_devices() -> dict[str, list[str]]:
    """Pod -> the MIG devices that its container was told, from the machine's processes."""
    found: dict[str, list[str]] = {}
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue  # ended meanwhile, or the kernel's own
        if "NVIDIA_VISIBLE_DEVICES=MIG-" in text:
            environment = dict(line.partition("=")[::2] for line in text.split("\0"))
            if "POD" in environment:
                devices = environment["NVIDIA_VISIBLE_DEVICES"]
                found[environment["POD"]] = devices.split(",")
    return found


@contextmanager
def cut(
    cluster: Cluster, configuration: str, gpus: str, *options: str, driver: Path | None = None
) -> Iterator[MigNode]:
    """Have a daemon on other simulated GPUs for the length of the block; and the usual one after.

    Args:
        cluster: the node.
        configuration: what the daemon is told, in any format.
        gpus: as in a node file.
        options: further ones of the daemon.
        driver: a file in which instances outlive the daemon; none by default.
    """
    node_file = cluster.node.places.home / "mig-node.yaml"
    keep = "" if driver is None else f"keep: {json.dumps(str(driver))}\n"
    node_file.write_text(f"gpus: [{gpus}]\n{keep}")
    daemon = cluster.daemon
    daemon.stop()
    daemon.configure(configuration)
    daemon.start("--simulate", str(node_file), *options)
    try:
        yield MigNode(cluster)
    finally:
        cluster.kubectl(
            *("delete", "pods", "--all", f"--namespace={NAMESPACE}", "--grace-period=1"),
            "--wait=false",
        )
        daemon.stop()
        daemon.configure()
        if driver is not None:
            driver.unlink(missing_ok=True)


def failure(document: Document) -> str:
    """Why a pod was not admitted, empty if it was."""
    status = document["status"]
    if status["phase"] != "Failed":
        return ""
    return f"{status.get('reason')}: {status.get('message')}"


def is_settled(document: Document) -> bool:
    """Tell whether a pod runs, has failed, or knows that it has to wait."""
    runs = _conditions(document).get("Ready", {}).get("status") == "True"
    return bool(waits(document) or runs or document["status"]["phase"] == "Failed")


def is_on_its_way(document: Document) -> bool:
    """Tell whether the kubelet has still to admit or refuse a pod, and it has not to wait."""
    return not waits(document) and "startTime" not in document["status"]


def waits(document: Document) -> bool:
    """Tell whether the scheduler has no room for a pod."""
    return bool(_conditions(document).get("PodScheduled", {}).get("reason") == "Unschedulable")


def _conditions(document: Document) -> dict[str, Document]:
    return {it["type"]: it for it in document["status"].get("conditions", ())}


def is_leaving(document: Document) -> bool:
    """Tell whether a pod is being deleted."""
    return "deletionTimestamp" in document["metadata"]


def plain(why: str) -> str:
    """A refusal without what differs each time, for counting."""
    text = re.sub(r"GPU-\S+|\d+g\.\d+gb\S*|mig-\S+|pod-\d+\S*", "…", why)
    return re.sub(r"\d+", "N", text)[:160]

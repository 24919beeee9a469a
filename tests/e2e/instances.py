"""A node whose GPUs have MIG instances: actions and checks."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import anyio
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.plugins.kubelet.pb import v1
from tests.e2e.cluster import IDLE_COMMAND, NAMESPACE, Cluster
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.waiting import wait_for

PREFIX = "nvidia.com/mig-"
SETTLED_S = 90.0
ANSWER_S = 5.0
REFUSED = "UnexpectedAdmissionError", "OutOf"
"""By metagpu or the kubelet's device manager; by the kubelet itself, for the Node's number."""
UNHELD = "no pod holds it"
"""Part of a problem about an instance that belongs to no pod."""
MEMORY_SLICES = {"1g.5gb": 1, "2g.10gb": 2, "3g.20gb": 4, "7g.40gb": 8}
"""Memory slices of an A100 with 40 GB, by profile."""


def mig_pod(name: str, resource: str, count: int = 1) -> Document:
    """Return a pod that idles with instances of a resource, and starts at little cost.

    Its environment has its name, so that its processes are found on the machine.
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
    """The instances on the GPUs, the pods' devices by the kubelet, and by their processes.

    Attributes:
        devices: uuid of each MIG device -> its share, `GPU-…::2g.10gb@4`.
        incomplete: GPU instances without a compute instance, as shares.
        held: share -> the pods that hold it, by PodResources.
        visible: pod -> the MIG devices in its environment.
    """

    devices: Mapping[str, str]
    incomplete: Sequence[str]
    held: Mapping[str, Sequence[str]]
    visible: Mapping[str, Sequence[str]]

    def problems(self) -> Iterator[str]:
        """Yield every instance that is not where it should be."""
        yield from self._duplicates()
        yield from self._misplaced()

    def _duplicates(self) -> Iterator[str]:
        for share, pods in self.held.items():
            if len(pods) > 1:
                yield f"{share} is held twice, by {' and '.join(pods)}"
        for one, other in combinations(sorted(self.held), 2):
            if overlap(one, other):
                yield f"{one} and {other} are held and overlap"
        for device, count in Counter(name for pod in self.visible.values() for name in pod).items():
            if count > 1:
                yield f"{device} is visible to {count} pods"

    def _misplaced(self) -> Iterator[str]:
        holders = {pod for pods in self.held.values() for pod in pods}
        for pod in sorted(holders | set(self.visible)):
            mine = sorted(share for share, pods in self.held.items() if pod in pods)
            devices = self.visible.get(pod, ())
            its = sorted(self.devices.get(device, f"{device}, which is gone") for device in devices)
            if its != mine:
                yield f"pod {pod} holds {mine} and sees {its}"
        there = set(self.devices.values())
        for share in sorted(set(self.held) - there):
            yield f"pod {self.held[share][0]} holds {share}, which does not exist"
        for share in sorted((there | set(self.incomplete)) - set(self.held)):
            yield f"{share} exists and {UNHELD}"


@dataclass(frozen=True)
class MigNode:
    """A node with MIG instances, and checks of them."""

    cluster: Cluster

    def observe(self) -> Instances:
        """Read instances, leases and processes one after the other; only between two changes."""
        devices: dict[str, str] = {}
        incomplete: list[str] = []
        for gpu in self.cluster.daemon.simulated_gpus():
            for instance in gpu["instances"]:
                share = f"{gpu['uuid']}::{instance['placement']}"
                devices.update(dict.fromkeys(instance["uuids"], share))
                incomplete += [] if instance["uuids"] else [share]
        return Instances(devices, incomplete, held_shares(), visible_devices())

    def await_in_place(self, *excused: str) -> Instances:
        """Wait until every instance belongs to the pod that uses it.

        A problem that contains one of EXCUSED is ignored.
        """

        def probe() -> Instances:
            seen = self.observe()
            problems = [
                problem for problem in seen.problems() if not any(e in problem for e in excused)
            ]
            if problems:
                raise RigError("; ".join(problems))
            return seen

        return wait_for("every instance to belong to its pod", probe, within_s=SETTLED_S)

    def await_nothing(self) -> None:
        """Wait until no instance exists and no pod holds one."""

        def probe() -> bool:
            seen = self.observe()
            if seen.devices or seen.incomplete or seen.held:
                raise RigError(f"there is {seen.devices} {seen.incomplete}, held is {seen.held}")
            return True

        wait_for("no instance to be left", probe, within_s=SETTLED_S)

    def await_amounts(self, amounts: Mapping[str, tuple[int, int]]) -> None:
        """Wait until the node has these amounts: profile -> capacity and allocatable."""
        for profile, (capacity, allocatable) in amounts.items():
            self.cluster.await_amounts(capacity, allocatable, PREFIX + profile)


def overlap(one: str, other: str) -> bool:
    """Return whether two shares are of the same slices of one GPU."""
    (gpu, mine), (its, theirs) = _slices(one), _slices(other)
    return gpu == its and bool(mine & theirs)


def _slices(share: str) -> tuple[str, set[int]]:
    gpu, _, place = share.partition("::")
    profile, _, start = place.partition("@")
    return gpu, set(range(int(start), int(start) + MEMORY_SLICES[profile]))


def held_shares() -> dict[str, list[str]]:
    """Return the pods that hold each share, by the kubelet's PodResources."""
    answer = anyio.run(list_pod_resources)
    held: dict[str, list[str]] = defaultdict(list)
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name.startswith("nvidia.com/"):
                    for share in devices.device_ids:
                        held[share].append(pod.name)
    return dict(held)


async def list_pod_resources() -> v1.ListPodResourcesResponse:
    """Return what the kubelet's PodResources lists."""
    async with _pod_resources() as stub:
        return await stub.list(v1.ListPodResourcesRequest(), timeout=ANSWER_S)


async def allocatable_devices() -> Counter[str]:
    """Return how many healthy devices of each resource the kubelet has, held or free."""
    async with _pod_resources() as stub:
        asked = v1.AllocatableResourcesRequest()
        answer = await stub.get_allocatable_resources(asked, timeout=ANSWER_S)
    found = Counter[str]()
    for devices in answer.devices:
        found[devices.resource_name] += len(devices.device_ids)
    return found


@asynccontextmanager
async def _pod_resources() -> AsyncIterator[v1.PodResourcesListerStub]:
    socket = KUBELET_HOME / "pod-resources" / "kubelet.sock"
    try:
        async with Channel(path=str(socket)) as channel:
            yield v1.PodResourcesListerStub(channel)
    except (OSError, GRPCError, StreamTerminatedError) as error:
        raise RigError(f"the kubelet's PodResources does not answer: {error!r}") from error


def visible_devices() -> dict[str, list[str]]:
    """Return the MIG devices in each pod's environment, from the machine's processes."""
    found: dict[str, list[str]] = {}
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue  # the process has ended, or is the kernel's own
        if "NVIDIA_VISIBLE_DEVICES=MIG-" in text:
            environment = dict(line.partition("=")[::2] for line in text.split("\0"))
            if "POD" in environment:
                devices = environment["NVIDIA_VISIBLE_DEVICES"]
                found[environment["POD"]] = devices.split(",")
    return found


@contextmanager
def mig_node(
    cluster: Cluster, configuration: str, gpus: str, *options: str, driver: Path | None = None
) -> Iterator[MigNode]:
    """Run the daemon on other simulated GPUs until the block ends; restore it afterwards.

    Args:
        cluster: the node.
        configuration: the daemon's configuration, in any format.
        gpus: the GPUs, as in a node file.
        options: further ones of the daemon.
        driver: a file in which instances outlive the daemon; none by default.
    """
    state_file = "" if driver is None else f"stateFile: {json.dumps(str(driver))}\n"
    daemon = cluster.daemon
    daemon.stop()
    daemon.configure(configuration)
    daemon.start(*daemon.simulate(f"gpus: [{gpus}]\n{state_file}"), *options)
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
    """Return the reason why a pod was not admitted, empty if it was."""
    status = document["status"]
    if status["phase"] != "Failed":
        return ""
    return f"{status.get('reason')}: {status.get('message')}"


def is_settled(document: Document) -> bool:
    """Return whether a pod runs, has failed, or is unschedulable."""
    runs = _conditions(document).get("Ready", {}).get("status") == "True"
    return bool(is_unschedulable(document) or runs or document["status"]["phase"] == "Failed")


def is_being_admitted(document: Document) -> bool:
    """Return whether a schedulable pod is neither admitted nor refused yet."""
    return not is_unschedulable(document) and "startTime" not in document["status"]


def is_unschedulable(document: Document) -> bool:
    """Return whether the scheduler has no free capacity for a pod."""
    return bool(_conditions(document).get("PodScheduled", {}).get("reason") == "Unschedulable")


def _conditions(document: Document) -> dict[str, Document]:
    return {condition["type"]: condition for condition in document["status"].get("conditions", ())}


def is_leaving(document: Document) -> bool:
    """Return whether a pod is being deleted."""
    return "deletionTimestamp" in document["metadata"]


def generalize(why: str) -> str:
    """Return a refusal without its ids and numbers, for counting."""
    text = re.sub(r"GPU-\S+|\d+g\.\d+gb\S*|mig-\S+|pod-\d+\S*", "…", why)
    return re.sub(r"\d+", "N", text)[:160]

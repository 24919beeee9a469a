"""The node, the daemon and the pods of a test: actions and checks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import first_process
from tests.e2e.rig.waiting import wait_for

RESOURCE = "cnvrg.io/metagpu"
NAMESPACE = "cnvrg"
NOT_THE_SYSTEMS = "metadata.namespace!=kube-system"
GPUS = 8
SHARES_PER_GPU = 100
ALL_SHARES = GPUS * SHARES_PER_GPU
MODEL = "a100-40gb"

CONFIGURATION = f"""\
version: metagpu/v1
health:
  quietPeriod: 1s
pools:
  - name: all
    gpus: all
    backends:
      - backend: fraction
        resource: {RESOURCE}
        sharesPerGpu: {SHARES_PER_GPU}
        metagpuEnv: true
"""

# Process 1 of a container gets no SIGTERM without a handler, and pods should end quickly.
IDLE_COMMAND = ["sh", "-c", "trap 'exit 0' TERM; sleep 1000000000 & wait"]

SHARE_ID = re.compile(r"cnvrg-meta-(?P<index>\d+)-(?P<slot>\d+)-(?P<gpu>GPU-[0-9a-f-]+)")

AMOUNTS_S = 30.0
RUNNING_S = 60.0
GONE_S = 60.0


def container(
    name: str, shares: int, command: Sequence[str] = IDLE_COMMAND, resource: str = RESOURCE
) -> Document:
    """Return a container that holds SHARES of a resource while it runs COMMAND."""
    return {
        "name": name,
        "image": BUSYBOX_IMAGE,
        "command": list(command),
        "resources": {"limits": {resource: str(shares)}},
    }


def pod(name: str, *containers: Document, **spec: object) -> Document:
    """Return a pod of these containers; further fields of its spec may be given."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"containers": list(containers), **spec},
    }


def idle_pod(name: str, shares: int, resource: str = RESOURCE) -> Document:
    """Return a pod that holds SHARES of a resource and otherwise idles."""
    return pod(name, container("main", shares, resource=resource))


@dataclass(frozen=True)
class Holding:
    """The node's GPUs in a running container, as seen from inside."""

    pod: str
    environment: Mapping[str, str]
    devices: frozenset[str]

    @property
    def share_ids(self) -> tuple[str, ...]:
        """Return the ids of the shares, in the order of the container's variable."""
        return tuple(self.environment["CNVRG_META_GPU_DEVICES"].split(","))

    @property
    def visible_gpus(self) -> tuple[str, ...]:
        """Return the GPUs in the container's NVIDIA_VISIBLE_DEVICES."""
        return tuple(self.environment["NVIDIA_VISIBLE_DEVICES"].split(","))

    @property
    def shares_by_gpu(self) -> dict[str, int]:
        """Return the number of held shares by GPU uuid, from the ids."""
        counts: dict[str, int] = {}
        for share in self._parsed():
            counts[share["gpu"]] = counts.get(share["gpu"], 0) + 1
        return counts

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """Return the indices of the GPUs whose shares are held, in order."""
        return tuple(sorted({int(share["index"]) for share in self._parsed()}))

    @property
    def gpu_devices(self) -> frozenset[str]:
        """Return the device files of single GPUs in the container's /dev."""
        return frozenset(name for name in self.devices if re.fullmatch(r"nvidia\d+", name))

    def _parsed(self) -> list[re.Match[str]]:
        found = [SHARE_ID.fullmatch(share) for share in self.share_ids]
        return [share for share in found if share is not None]


@dataclass(frozen=True)
class Incarnation:
    """The fields that change when a pod is replaced or its container restarted."""

    uid: str
    restarts: int
    container: str


class Cluster:
    """Actions of a test on the node, and reads of its state."""

    def __init__(self, node: Node, daemon: Daemon) -> None:
        self.node = node
        self.daemon = daemon
        self.kubectl = node.kubectl

    def repair(self, *options: str) -> None:
        """Restore the node after any test: no pods, all programs running, every share offered.

        OPTIONS are the daemon's options beside its usual ones.
        """
        self.clear()
        if not self.node.containerd.alive:
            self.node.power_on()
        if not self.node.kubelet.alive:
            self.node.start_kubelet()
        healthy = self.node.resource(RESOURCE) == (ALL_SHARES, ALL_SHARES)
        if not (healthy and self.daemon.runs_with(*options)):
            self.daemon.stop()  # the next daemon has new simulated GPUs
            with self.wait_for_new_list():
                self.daemon.start(*options)
        self.await_amounts(ALL_SHARES, ALL_SHARES)
        wait_for("every share to be free", self._all_free, within_s=AMOUNTS_S)

    def _all_free(self) -> bool:
        """Return whether the daemon knows of no holder, also after a restart of the kubelet.

        The Node's numbers may be those of before the restart.
        """
        shares = [gpu["shares"] for gpu in self.daemon.status()["gpus"]]
        return all(
            document["free"] == document["capacity"]
            for known in shares
            for document in known.values()
        )

    @contextmanager
    def wait_for_new_list(self) -> Iterator[None]:
        """Wait at the end of the block until the kubelet received a list in it.

        The Node may still show older numbers, and a pod that comes by them is refused.
        """
        before = self._lists
        yield
        wait_for("the kubelet to receive a list", lambda: self._lists > before, within_s=AMOUNTS_S)

    @property
    def _lists(self) -> int:
        """Return how many lists of the resource the kubelet received so far, by its log."""
        log = self.node.kubelet.log.read_text(errors="replace")
        return log.count(f'"State pushed for device plugin" resource="{RESOURCE}"')

    def clear(self) -> None:
        """Delete the pods of every namespace but kube-system, and wait until they are gone.

        A pod that only ends, in a namespace being deleted, still has its shares in the kubelet's
        checkpoint, and a kubelet that starts counts them until it has heard of all pods.
        """
        self.kubectl(
            *("delete", "pods", "--all-namespaces", f"--field-selector={NOT_THE_SYSTEMS}"),
            *("--grace-period=1", "--wait", f"--timeout={GONE_S:g}s"),
        )

    def await_amounts(self, capacity: int, allocatable: int, resource: str = RESOURCE) -> None:
        """Wait until the node has these amounts of a resource, whatever serves it."""

        def probe() -> bool:
            self.daemon.require_no_crash()
            seen = self.node.resource(resource)
            if seen != (capacity, allocatable):
                raise RigError(f"capacity and allocatable are {seen}")
            return True

        wait_for(f"{capacity} {resource}, {allocatable} allocatable", probe, within_s=AMOUNTS_S)

    def await_running(self, within_s: float = RUNNING_S) -> None:
        """Wait until every pod of the namespace runs."""
        wait_for("all pods to run", self._all_run, within_s=within_s)

    def await_readmitted(self, name: str, before: Incarnation) -> bool:
        """Wait until a booted kubelet has admitted or refused an earlier pod.

        Returns:
            Whether the pod runs again, in place; if not, the pod has failed at admission.
        """

        def probe() -> str:
            document = self.kubectl.get("pod", name, NAMESPACE)
            phase, reason = document["status"]["phase"], document["status"].get("reason", "")
            if phase == "Running" and _runs(document) and _incarnation(document) != before:
                return "runs"
            if phase == "Failed":
                return str(reason)
            raise RigError(_summary(document))

        outcome = wait_for(f"pod {name} to be admitted again or not", probe, within_s=RUNNING_S)
        assert outcome in ("runs", "UnexpectedAdmissionError")
        return outcome == "runs"

    def start(self, *pods: str | Document) -> None:
        """Create pods in one go, and wait until every pod of the namespace runs."""
        self.kubectl.apply(*pods)
        self.await_running()

    def run(self, name: str, shares: int) -> Holding:
        """Start one idle pod with SHARES, and inspect its container."""
        self.start(idle_pod(name, shares))
        return self.inspect_container(name)

    def run_all(self, shares: Mapping[str, int]) -> list[Holding]:
        """Start idle pods, name -> shares, all at once, and inspect each."""
        self.start(*(idle_pod(name, amount) for name, amount in shares.items()))
        return [self.inspect_container(name) for name in shares]

    def inspect_container(self, name: str, container: str = "") -> Holding:
        """Return process 1's environment and /dev of a running container.

        Without a name it is the pod's first container.
        """
        script = "tr '\\0' '\\n' < /proc/1/environ; echo /dev; ls /dev"
        inside = self.execute(name, "sh", "-c", script, container=container)
        variables, _, devices = inside.partition("\n/dev\n")
        pairs = (line.partition("=") for line in variables.splitlines())
        environment = {key: value for key, _, value in pairs}
        return Holding(name, environment, frozenset(devices.split()))

    def execute(self, name: str, *command: str, container: str = "") -> str:
        """Run a command in a running pod, and return what it prints."""
        target = (name, f"--namespace={NAMESPACE}", f"--container={container}")
        return self.kubectl("exec", *target, "--", *command)

    def crash(self, name: str) -> None:
        """End process 1 of a pod's container from inside."""
        with suppress(RigError):  # the command itself dies with the container
            self.execute(name, "kill", "1")

    def incarnations(self) -> dict[str, Incarnation]:
        """Return the incarnation of every running pod of the namespace, by name."""
        return {
            document["metadata"]["name"]: _incarnation(document)
            for document in self.kubectl.list("pods", NAMESPACE)
            if _runs(document)
        }

    def first_process(self, name: str) -> int:
        """Return the machine's pid of process 1 of a running pod's container."""
        _, _, container = self.incarnations()[name].container.partition("://")
        return first_process(container)

    def event_messages(self, name: str, reason: str) -> str:
        """Return the messages of all Events of one REASON about a pod."""
        selector = f"--field-selector=involvedObject.name={name},reason={reason}"
        events = self.kubectl.list("events", NAMESPACE, selector)
        return "\n".join(event["message"] for event in events)

    def delete(self, *names: str, wait: bool = True) -> None:
        """Delete pods, and by default wait until they are gone."""
        target = (*names, f"--namespace={NAMESPACE}")
        self.kubectl("delete", "pod", *target, "--grace-period=1", f"--wait={str(wait).lower()}")

    def _all_run(self) -> bool:
        documents = self.kubectl.list("pods", NAMESPACE)
        waiting = [_summary(document) for document in documents if not _runs(document)]
        if waiting:
            raise RigError(f"not running: {'; '.join(waiting)}")
        return bool(documents)


def _runs(document: Document) -> bool:
    status = document["status"]
    containers = status.get("containerStatuses", ())  # a pod that was just refused has none
    ready = bool(containers) and all(c["ready"] for c in containers)
    return ready and status["phase"] == "Running"


def _incarnation(document: Document) -> Incarnation:
    containers = document["status"]["containerStatuses"]
    restarts = sum(other["restartCount"] for other in containers)
    return Incarnation(document["metadata"]["uid"], restarts, containers[0]["containerID"])


def _summary(document: Document) -> str:
    status = document["status"]
    reason = status.get("reason") or status.get("message") or ""
    return f"{document['metadata']['name']} {status['phase']} {reason}".strip()

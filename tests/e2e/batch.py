"""Jobs and gangs on the node, of one tenant or of several: actions and checks."""

import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.programs import first_process, send
from tests.e2e.rig.waiting import wait_for

OF_JOB = "batch.kubernetes.io/job-name"
SETTLED_S = 90.0
COMMAND = [
    *("sh", "-c"),
    "trap 'exit 0' USR1; trap 'exit 143' TERM; sleep 1000000000 & wait",
]
"""A pod that has done its work at SIGUSR1. One that is evicted has not."""


@dataclass(frozen=True)
class Batch:
    """Jobs in one namespace."""

    cluster: Cluster
    namespace: str = NAMESPACE

    def create(self, *documents: Document) -> None:
        """Create objects, in this namespace; the pods of Jobs idle until `finish`."""
        self.cluster.kubectl.apply(*(self._ours(_idling(document)) for document in documents))

    def _ours(self, document: Document) -> Document:
        metadata = document["metadata"]
        if "namespace" not in metadata:
            return document
        return {**document, "metadata": {**metadata, "namespace": self.namespace}}

    def pods(self, job: str) -> list[Document]:
        """Return the pods of a Job that are not being deleted."""
        found = self.cluster.kubectl.list("pods", self.namespace, f"--selector={OF_JOB}={job}")
        return [document for document in found if "deletionTimestamp" not in document["metadata"]]

    def running(self, job: str) -> list[str]:
        """Return the names of a Job's running pods."""
        return [pod["metadata"]["name"] for pod in self.pods(job) if _phase(pod) == "Running"]

    def await_running(self, job: str, count: int) -> list[str]:
        """Wait until so many pods of a Job run; return their names."""

        def probe() -> list[str]:
            names = self.running(job)
            if len(names) != count:
                raise RigError(f"{job} is {sorted(_phase(pod) for pod in self.pods(job))}")
            return names

        return wait_for(f"{count} pods of {job} to run", probe, within_s=SETTLED_S)

    def await_waiting(self, job: str, count: int) -> None:
        """Wait until the scheduler has found no room for so many pods of a Job."""

        def probe() -> bool:
            waiting = [pod for pod in self.pods(job) if _is_refused_by_scheduler(pod)]
            if len(waiting) != count:
                raise RigError(f"{len(waiting)} pods of {job} wait for the scheduler")
            return True

        wait_for(f"{count} pods of {job} to wait", probe, within_s=SETTLED_S)

    def bound(self, job: str) -> list[str]:
        """Return the names of a Job's pods that have a node."""
        return [pod["metadata"]["name"] for pod in self.pods(job) if pod["spec"].get("nodeName")]

    def finish(self, job: str) -> None:
        """End the running pods of a Job with success."""
        for pod in self.pods(job):
            if _phase(pod) == "Running":
                (container,) = pod["status"]["containerStatuses"]
                _, _, name = container["containerID"].partition("://")
                send(first_process(name), signal.SIGUSR1)

    def await_complete(self, job: str) -> Document:
        """Wait until a Job has completed; return its status."""

        def probe() -> Document | None:
            status: Document = self.cluster.kubectl.get("job", job, self.namespace)["status"]
            types = {
                condition["type"]
                for condition in status.get("conditions", ())
                if condition["status"] == "True"
            }
            if "Failed" in types:
                raise AssertionError(f"job {job} has failed: {status}")
            return status if "Complete" in types else None

        return wait_for(f"job {job} to complete", probe, within_s=SETTLED_S)


@contextmanager
def jobs(cluster: Cluster, *kinds: str, namespace: str = NAMESPACE) -> Iterator[Batch]:
    """Yield a node for Jobs; delete them, and objects of KINDS, after the block."""
    try:
        yield Batch(cluster, namespace)
    finally:
        for kind in ("jobs", *kinds):
            cluster.kubectl(
                *("delete", kind, "--all", f"--namespace={namespace}"),
                *("--cascade=foreground", "--wait", "--timeout=50s"),
            )


def renamed(document: Document, name: str, change: Callable[[Document], object]) -> Document:
    """Return a copy of an object with another name, and its spec changed in place."""
    copied = copy.deepcopy(document)
    copied["metadata"]["name"] = name
    change(copied["spec"])
    return copied


def _idling(document: Document) -> Document:
    if document["kind"] != "Job":
        return document
    found = copy.deepcopy(document)
    spec = found["spec"]["template"]["spec"]
    spec |= {"terminationGracePeriodSeconds": 5, "enableServiceLinks": False}
    for container in spec["containers"]:
        container["command"] = COMMAND
    return found


def _phase(pod: Document) -> str:
    return str(pod["status"]["phase"])


def _is_refused_by_scheduler(pod: Document) -> bool:
    conditions = {condition["type"]: condition for condition in pod["status"].get("conditions", ())}
    return bool(conditions.get("PodScheduled", {}).get("reason") == "Unschedulable")

"""Kueue's manager with the recipe of docs/batch.md: quotas, borrowing, and what is lent returns."""

from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.batch import SETTLED_S, Batch, jobs, renamed
from tests.e2e.cluster import RESOURCE, Cluster
from tests.e2e.kueue import running_kueue
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.daemon("pod")]

RECIPE = REPOSITORY / "deploy" / "queues" / "kueue.yaml"
TENANTS = ("vision", "speech")
PODS = 8
"""Pods of the recipe's Job, of half a GPU each: the quota of its tenant, half of the node."""


@pytest.fixture
def tenants(cluster: Cluster) -> Iterator[list[Batch]]:
    """Run Kueue with the recipe for two tenants of the node."""
    kubectl = cluster.kubectl
    with running_kueue(cluster.node):
        for tenant in TENANTS:
            kubectl.create_namespace(tenant)
            kubectl.apply(*(entry for entry in recipe(tenant) if entry["kind"] != "Job"))
        with jobs(cluster, namespace=TENANTS[0]) as one, jobs(cluster, namespace=TENANTS[1]) as two:
            yield [one, two]
    for tenant in TENANTS:
        kubectl("delete", "namespace", tenant, "--wait=false")


def test_jobs_are_admitted_by_quota_and_lent_quota_returns(tenants: list[Batch]) -> None:
    """A Job over the cohort waits without pods; a tenant's own Job gets lent quota back."""
    vision, speech = tenants
    train = job("vision")
    vision.create(train)
    vision.await_running("train", PODS)
    vision.create(renamed(train, "borrower", lambda _: None))
    vision.await_running("borrower", PODS)

    vision.create(renamed(train, "third", lambda _: None))
    assert f"insufficient unused quota for {RESOURCE}" in reason(vision, "third")
    assert vision.pods("third") == []
    vision.finish("train")
    vision.await_complete("train")
    vision.await_running("third", PODS)

    speech.create(job("speech"))
    speech.await_running("train", PODS)
    running = [name for name in ("borrower", "third") if vision.running(name)]
    assert len(running) == 1
    [evicted] = {"borrower", "third"} - {*running}
    assert reason(vision, evicted)
    assert vision.pods(evicted) == []


def recipe(tenant: str) -> list[Document]:
    """Return the recipe's objects for a tenant, with pods of the tests' image."""
    text = RECIPE.read_text(encoding="utf-8").replace(TENANTS[0], tenant)
    return [*yaml.safe_load_all(text.replace("pytorch/pytorch", BUSYBOX_IMAGE))]


def job(tenant: str) -> Document:
    """Return the recipe's Job for a tenant."""
    [found] = [entry for entry in recipe(tenant) if entry["kind"] == "Job"]
    for container in found["spec"]["template"]["spec"]["containers"]:
        del container["args"]
    return found


def reason(batch: Batch, name: str) -> str:
    """Return why Kueue does not admit a Job, once it has said so."""

    def probe() -> str:
        workloads = batch.cluster.kubectl.list("workloads.kueue.x-k8s.io", batch.namespace)
        messages = {
            (condition["type"], condition["status"]): condition["message"]
            for workload in workloads
            if workload["metadata"]["ownerReferences"][0]["name"] == name
            for condition in workload.get("status", {}).get("conditions", ())
        }
        if not (found := messages.get(("QuotaReserved", "False"))):
            raise RigError(f"the conditions of {name} are {messages}")
        return str(found)

    return wait_for(f"Kueue to let {name} wait", probe, within_s=SETTLED_S)

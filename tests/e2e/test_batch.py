"""A Job whose pods a kubelet refuses, with the manifest of docs/batch.md."""

import pytest

from tests.e2e.batch import SETTLED_S, jobs
from tests.e2e.cluster import CONFIGURATION, RESOURCE, Cluster
from tests.e2e.instances import mig_node
from tests.e2e.pages import manifests
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.waiting import wait_for

TWO = "{model: a100-40gb, count: 2}"
EVERYTHING = CONFIGURATION.replace("gpus: all", "gpus: all\n    offer: all")
REFUSED_S = 60.0


@pytest.mark.long
def test_a_job_completes_although_a_pod_was_refused(cluster: Cluster) -> None:
    """Of three pods two fit; the third is refused, counted, and comes again until there is room."""
    embed = manifests("batch.md", "Jobs that retry")["Job/embed"]
    with mig_node(cluster, EVERYTHING, TWO), jobs(cluster) as batch:
        cluster.await_amounts(200, 200)

        batch.create(embed)
        refused = wait_for(
            "a pod to be refused",
            lambda: [pod for pod in batch.pods("embed") if pod["status"]["phase"] == "Failed"],
            within_s=REFUSED_S,
        )
        first = batch.await_running("embed", 2)
        for document in refused:
            assert seen_by_rules(document) == ({}, [])
            assert document["status"]["reason"] == "UnexpectedAdmissionError"
            assert RESOURCE in document["status"]["message"]

        batch.finish("embed")
        # The two end one after the other.
        wait_for(
            "the third pod to run",
            lambda: set(batch.running("embed")) - set(first),
            within_s=SETTLED_S,
        )
        batch.finish("embed")
        status = batch.await_complete("embed")
        refused = [pod for pod in batch.pods("embed") if pod["status"]["phase"] == "Failed"]
    assert (status["succeeded"], status["completedIndexes"]) == (3, "0-2")
    assert status["failed"] == len(refused), "no rule of podFailurePolicy ignores a refusal"


def seen_by_rules(pod: Document) -> tuple[Document, list[Document]]:
    """Return conditions and container statuses, which a podFailurePolicy reads."""
    status = pod["status"]
    conditions = {
        condition["type"]: condition["status"] for condition in status.get("conditions", ())
    }
    return conditions, status.get("containerStatuses", [])

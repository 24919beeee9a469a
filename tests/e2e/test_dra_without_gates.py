"""ResourceClaims on Kubernetes 1.34, whose feature gates for parts of devices are off."""

import json
from collections.abc import Iterator

import pytest

from metagpu.core.reports.diagnosis import CheckResult, check_resource_claims
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.plugins.cluster.event_recorder import NOTE_LIMIT
from tests.e2e.claims import pod, resource_claim
from tests.e2e.cluster import Cluster
from tests.e2e.fake_node import DRIVER, dra_objects, exactly
from tests.e2e.instances import MigNode, mig_node
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

EARLIER = "1.34"
CONFIGURATION = """\
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends: [{backend: whole}, {backend: fraction}]
"""
GPUS = 2
SETTLED_S = 60.0


@pytest.fixture
def old_node(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[MigNode]:
    """Run the daemon with ResourceClaims alone, on two GPUs."""
    version = next(
        programs.version for programs in Tools.cached().built if programs.name == "kubernetes"
    )
    if not version.startswith(EARLIER):
        pytest.skip(f"Kubernetes {version} has the gates on: run `make e2e KUBERNETES={EARLIER}`")
    cluster = Cluster(node, daemon)
    cluster.clear()
    models = f"{{model: a100-40gb, count: {GPUS}}}"
    with (
        dra_objects(cluster.kubectl),
        mig_node(cluster, CONFIGURATION, models, *account) as live_mig_node,
    ):
        yield live_mig_node
        cluster.clear()
        cluster.kubectl("delete", "resourceclaims", "--all", "--all-namespaces")
        wait_for("leases to end", lambda: not daemon.status()["leases"], within_s=SETTLED_S)


def published(cluster: Cluster) -> list[Document]:
    """Return the devices of all ResourceSlices."""
    slices = json.loads(cluster.kubectl("get", "resourceslices", "-o", "json"))["items"]
    return [
        device
        for piece in slices
        if piece["spec"]["driver"] == DRIVER
        for device in piece["spec"].get("devices") or ()
    ]


def noted(cluster: Cluster, problem: str) -> bool:
    """Return whether an Event of the Node has what was dropped."""
    found = cluster.kubectl.list("events", "default")
    notes = [
        document["message"]
        for document in found
        if document["reason"] == "ResourceSliceFieldsDropped"
    ]
    return problem.encode()[:NOTE_LIMIT].decode() in notes


def test_whole_gpus_work_and_dropped_fields_are_named(old_node: MigNode) -> None:
    """A device that others share would be allocated beside its GPU: whole ones alone are there."""
    cluster, daemon = old_node.cluster, old_node.cluster.daemon
    problem = wait_for(
        "what was dropped",
        lambda: ((daemon.status()["cluster"] or {}).get("resourceSlices") or {}).get("problem"),
        within_s=SETTLED_S,
    )
    print(problem)
    assert "the API server dropped" in problem
    assert "consumesCounters" in problem
    assert "allowMultipleAllocations" in problem
    assert "whole GPUs alone are published" in problem
    assert "api server dropped fields of resource slices" in daemon.log
    result, said, *_ = check_resource_claims(read_report(daemon.status(), StatusReport))
    assert (result, said) == (CheckResult.WARNING, problem)
    wait_for("the Event of the Node", lambda: noted(cluster, problem), within_s=SETTLED_S)
    found = wait_for(
        "whole GPUs alone",
        lambda: (
            len(they := published(cluster)) >= GPUS
            and [document for document in they if document["name"].count("-") == 5]
            and not [document for document in they if document["name"].endswith("-fraction")]
        ),
        within_s=SETTLED_S,
    )
    assert found

    names = [f"whole-{n}" for n in range(GPUS)]
    claim = exactly("gpu", "gpu.metagpu.io")
    cluster.kubectl.apply(
        *(document for name in names for document in (resource_claim(name, claim), pod(name, name)))
    )
    cluster.await_running(within_s=SETTLED_S)
    devices = [cluster.inspect_container(name).gpu_devices for name in names]
    assert {len(device) for device in devices} == {1}
    assert len(frozenset().union(*devices)) == GPUS
    assert sum(lease["shares"] for lease in daemon.status()["leases"]) == GPUS

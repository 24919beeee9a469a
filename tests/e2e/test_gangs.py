"""Gangs of docs/batch.md by the stock scheduler: whole, or not at all."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.batch import Batch, jobs, renamed
from tests.e2e.claims import shares
from tests.e2e.cluster import NAMESPACE, Cluster, idle_pod
from tests.e2e.fake_node import fake_node, together
from tests.e2e.instances import held_shares, mig_node
from tests.e2e.pages import manifests
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.node import Node
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.test_dra_scheduler import FRACTIONS, slices
from tests.e2e.test_mig import ON_DEMAND
from tests.rigs.build import gpu

pytestmark = pytest.mark.long
PAGE, TENANT = "batch.md", "research"
API = "scheduling.k8s.io/v1alpha2"
GANG, FEW = 8, 4
THREE = "{model: a100-40gb, count: 3, mig: true}"


@pytest.fixture(scope="module", autouse=True)
def gates(node: Node, daemon: HostDaemon) -> Iterator[None]:
    """Run the control plane with the gates of the page."""
    del daemon  # it registers again with the kubelet that comes back
    text = (REPOSITORY / "docs" / PAGE).read_text(encoding="utf-8")
    (flags,) = re.findall(r"^--feature-gates=(\S+)$", text, re.MULTILINE)
    assert f"--runtime-config={API}=true" in text
    names = [part.removesuffix("=true") for part in flags.split(",")]
    with node.gated(*names, apis=(API,)):
        yield


@pytest.fixture
def batch(cluster: Cluster) -> Iterator[Batch]:
    """Return the node for gangs; no PodGroup is left, so none has a stale finalizer."""
    with jobs(cluster, "podgroups", "workloads") as live_batch:
        yield live_batch


def test_of_two_gangs_that_cannot_both_fit_one_waits_whole(batch: Batch) -> None:
    """There is room for two more pods, and none of the second gang has a node."""
    cluster = batch.cluster
    cluster.start(*(idle_pod(f"other-{number}", 100) for number in range(3)))
    train = manifests(PAGE, "top")["Job/train"]
    batch.create(train)
    first = batch.await_running("train", GANG)

    batch.create(renamed(train, "next", lambda _: None))
    batch.await_waiting("next", GANG)
    cluster.kubectl.apply(idle_pod("single", 50))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/single", f"--namespace={NAMESPACE}")
    assert batch.bound("next") == []

    held = Counter(gpu for name in first for gpu in cluster.inspect_container(name).visible_gpus)
    assert sorted(held.values()) == [2] * 4
    batch.finish("train")
    batch.await_complete("train")
    assert len(batch.await_running("next", GANG)) == GANG


def test_a_gang_of_mig_instances(batch: Batch) -> None:
    """Four pods have four instances of 3g.20gb; with room for two the next four wait."""
    with mig_node(batch.cluster, ON_DEMAND, THREE) as node:
        node.cluster.await_amounts(6, 6, "nvidia.com/mig-3g.20gb")
        tune = manifests(PAGE, "A gang of MIG instances")["Job/tune"]
        batch.create(tune)
        pods = batch.await_running("tune", FEW)
        assert {pod for holders in held_shares().values() for pod in holders} == set(pods)
        assert len(held_shares()) == FEW

        batch.create(renamed(tune, "next", lambda _: None))
        batch.await_waiting("next", FEW)
        assert batch.bound("next") == []
        batch.finish("tune")
        batch.await_complete("tune")
        batch.await_running("next", FEW)


def test_a_gang_of_claims_waits_for_gpus_and_not_for_shares(node: Node) -> None:
    """Eight pods of 60 shares wait whole on seven GPUs, and have one each of eight."""
    group = manifests(PAGE, "Priorities and preemption")["PodGroup/patient"]
    names = [f"member-{number}" for number in range(GANG)]
    with fake_node(node) as fake:
        specs = slices(*map(gpu, range(GANG - 1)), text=FRACTIONS)
        fake.publish(specs)
        node.kubectl.apply(group)
        try:
            for name in names:
                fake.ask(name, shares(60), group=group["metadata"]["name"])
            assert [fake.settled(name) for name in names] == [()] * GANG
            assert not any(fake.devices(name) for name in names)

            another = together(slices(gpu(GANG - 1), text=FRACTIONS), pool="another")
            fake.publish(another, first=len(specs))
            held = [fake.await_allocated(name) for name in names]
            assert len({device.gpu for devices in held for device in devices}) == GANG
        finally:
            fake.clear()
            node.kubectl("delete", "podgroups", "--all", f"--namespace={NAMESPACE}", "--wait")


@pytest.fixture
def tenant(batch: Batch) -> Iterator[Batch]:
    """Return the node for gangs of another tenant."""
    kubectl = batch.cluster.kubectl
    kubectl.create_namespace(TENANT)
    with jobs(batch.cluster, "podgroups", "workloads", namespace=TENANT) as live_batch:
        yield live_batch
    kubectl("delete", "namespace", TENANT, "--wait=false")


def test_priority_evicts_another_tenants_gang_whole_that_says_so(
    batch: Batch, tenant: Batch
) -> None:
    """All pods of the other gang go, wait whole and come back; none counts as failed."""
    found = manifests(PAGE, "Priorities and preemption")
    batch.create(found["PodGroup/patient"], found["Job/patient"])
    before = set(batch.await_running("patient", GANG))

    tenant.create(*(found[f"{name}/urgent"] for name in ("PriorityClass", "PodGroup", "Job")))
    tenant.await_running("urgent", GANG)
    batch.await_waiting("patient", GANG)
    assert batch.bound("patient") == []

    tenant.finish("urgent")
    tenant.await_complete("urgent")
    assert before.isdisjoint(batch.await_running("patient", GANG))
    status: dict[str, Any] = batch.cluster.kubectl.get("job", "patient", NAMESPACE)["status"]
    assert status.get("failed", 0) == 0
    batch.cluster.kubectl("delete", "priorityclass", "urgent")

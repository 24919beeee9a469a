"""Pods on three nodes, by the profiles of deploy/scheduler: one real node, two kept by kwok."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import ALL_SHARES, NAMESPACE, RESOURCE, Cluster, container, pod
from tests.e2e.kwok import kwok_nodes, node_object
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import Program
from tests.e2e.rig.tools import REPOSITORY, Tools
from tests.e2e.rig.waiting import wait_for

SCHEDULER = REPOSITORY / "deploy" / "scheduler"
PODS, SHARES = 40, 50
PLACED_S = 120.0
OTHERS = ("kept-by-kwok-1", "kept-by-kwok-2")
SCORE = re.compile(
    r'pod="cnvrg/pod-\d+" node="[^"]+" resourceAllocationScorer="(?P<kind>\w+)" '
    r"allocatableResource=\[(?P<has>[\d,]+)\] requestedResource=\[(?P<asked>[\d,]+)\] "
    r"resourceScore=(?P<score>\d+)"
)


@pytest.fixture
def three_nodes(cluster: Cluster) -> Iterator[Cluster]:
    """Keep two nodes as large as the real one beside it."""
    own = cluster.kubectl.get("node", cluster.node.name)["status"]["allocatable"]
    amounts = {name: own[name] for name in ("cpu", "memory", "pods")} | {RESOURCE: str(ALL_SHARES)}
    with kwok_nodes(cluster.node, *(node_object(other, amounts) for other in OTHERS)):
        yield cluster
        cluster.clear()


@contextmanager
def own_scheduler(node: Node) -> Iterator[Path]:
    """Run the program of scheduler.yaml, with its account's rights; yield its log."""
    objects = list(yaml.safe_load_all((SCHEDULER / "scheduler.yaml").read_text()))
    [deployment] = [entry for entry in objects if entry["kind"] == "Deployment"]
    [config_map] = [entry for entry in objects if entry["kind"] == "ConfigMap"]
    node.kubectl.apply(*(entry for entry in objects if entry is not deployment))
    node.kubectl("apply", "--dry-run=server", "-f", str(SCHEDULER / "scheduler.yaml"))
    metadata = deployment["metadata"]
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    credentials = node.credentials(metadata["namespace"], account, node="")
    configuration = yaml.safe_load(config_map["data"]["config.yaml"])
    try:
        with running(node, "own-scheduler", configuration, credentials) as log:
            yield log
    finally:
        node.kubectl("delete", "--ignore-not-found", "-f", str(SCHEDULER / "scheduler.yaml"))


@contextmanager
def second_profiles(node: Node) -> Iterator[Path]:
    """Run the scheduler of profiles.yaml in place of the node's own; yield its log."""
    configuration = yaml.safe_load((SCHEDULER / "profiles.yaml").read_text())
    credentials = node.scheduler.command[1].partition("=")[2]
    node.scheduler.stop()
    try:
        with running(node, "profiles", configuration, credentials) as log:
            yield log
    finally:
        node.scheduler.start()


@contextmanager
def running(
    node: Node, name: str, configuration: Mapping[str, Any], credentials: str
) -> Iterator[Path]:
    """Run a kube-scheduler with a configuration, which logs its scores."""
    path = node.paths.configuration / f"{name}.yaml"
    whole = {
        **configuration,
        "clientConnection": {"kubeconfig": credentials},
        "leaderElection": {"leaderElect": False},
    }
    path.write_text(yaml.safe_dump(whole))
    program = Program(
        name,
        [
            Tools.cached().path("kube-scheduler"),
            f"--config={path}",
            "--secure-port=0",
            "--vmodule=resource_allocation=10",
        ],
        logs=node.paths.logs,
        pids=node.paths.pids,
    )
    program.start()
    try:
        yield program.log
    finally:
        program.stop()


@pytest.mark.long
def test_binpack_fills_one_node_after_the_other(three_nodes: Cluster) -> None:
    """Of 40 pods of half a GPU 16 fill each of two nodes, and 8 are on the third."""
    with own_scheduler(three_nodes.node) as log:
        placed = place(three_nodes, "metagpu-binpack")
    assert sorted(placed.values()) == [8, 16, 16]
    assert_scores(log, "MostAllocated")


@pytest.mark.long
def test_spread_uses_all_nodes_alike(three_nodes: Cluster) -> None:
    """Of 40 pods of half a GPU each of three nodes has 13 or 14."""
    with second_profiles(three_nodes.node) as log:
        placed = place(three_nodes, "metagpu-spread")
        three_nodes.start(small_pod("by-the-default", "default-scheduler"))
    assert sorted(placed.values()) == [13, 13, 14]
    assert_scores(log, "LeastAllocated")


def place(cluster: Cluster, profile: str) -> Counter[str]:
    """Create the pods in one go; return how many run on each node."""
    cluster.kubectl.apply(*(small_pod(f"pod-{number}", profile) for number in range(PODS)))

    def run() -> Counter[str]:
        pods = cluster.kubectl.list("pods", NAMESPACE)
        phases = Counter(other["status"]["phase"] for other in pods)
        if phases != {"Running": PODS}:
            raise RigError(f"the pods are {phases}")
        return Counter(other["spec"]["nodeName"] for other in pods)

    return wait_for(f"{PODS} pods to run by {profile}", run, within_s=PLACED_S)


def small_pod(name: str, profile: str) -> Document:
    """Return a pod whose CPU and memory are nearly nothing beside its shares."""
    main = container("main", SHARES)
    main["resources"]["requests"] = {"cpu": "10m", "memory": "16Mi"}
    return pod(name, main, schedulerName=profile, terminationGracePeriodSeconds=1)


def assert_scores(log: Path, kind: str) -> None:
    """Check that each logged score is what docs/bin-packing.md promises.

    It is the mean of the used, or free, part of CPU, memory and shares in percent, of which the
    shares weigh eight times as much.
    """
    weights = {0: 1, 1: 1, 2: 8}  # the configuration names them in this order
    scores = list(SCORE.finditer(log.read_text(errors="replace")))
    assert len(scores) > PODS
    for score in scores:
        has, asked = ([int(n) for n in score[part].split(",")] for part in ("has", "asked"))
        assert [at for at, amount in enumerate(has) if amount] == list(weights), score[0]
        counts = [h - a if kind == "LeastAllocated" else a for h, a in zip(has, asked, strict=True)]
        points = sum(weight * (100 * counts[at] // has[at]) for at, weight in weights.items())
        assert (score["kind"], int(score["score"])) == (kind, points // 10), score[0]

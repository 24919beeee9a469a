"""Rollouts of the DaemonSet while pods arrive, by versions that work and that do not."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.e2e.cluster import (
    ALL_SHARES,
    CONFIGURATION,
    NAMESPACE,
    RESOURCE,
    Cluster,
    container,
    pod,
)
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.pod_daemon import PodDaemon
from tests.e2e.rig.waiting import wait_for

pytestmark = pytest.mark.daemon("pod")

PER_SECOND = 5
SOON_S = 120.0
SHARES = 4
PERIOD = "10s"
"""The period in which a kubelet raises the Node's amounts by default; each raise lets pods in."""


def arriving(number: int) -> Document:
    """Return a pod with shares that ends by itself."""
    return pod(
        f"arriving-{number}",
        container("main", SHARES, ["sh", "-c", 'test -n "$CNVRG_META_GPU_DEVICES"']),
        restartPolicy="Never",
    )


@contextmanager
def arrivals(cluster: Cluster, count: int) -> Iterator[threading.Thread]:
    """Create pods at five a second, in a thread, while the block lasts and until all are made."""

    def create() -> None:
        for first in range(0, count, PER_SECOND):
            began = time.monotonic()
            cluster.kubectl.apply(*map(arriving, range(first, first + PER_SECOND)))
            time.sleep(max(0.0, began + 1 - time.monotonic()))

    thread = threading.Thread(target=create)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def phases(cluster: Cluster) -> dict[str, str]:
    """Return phase and reason of every arriving pod, by name."""
    return {
        document["metadata"][
            "name"
        ]: f"{document['status']['phase']} {document['status'].get('reason', '')}".strip()
        for document in cluster.kubectl.list("pods", NAMESPACE)
        if document["metadata"]["name"].startswith("arriving-")
    }


@pytest.mark.parametrize(
    ("exchanges", "pods"),
    [
        (3, 60),
        pytest.param(10, 200, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_few_pods_are_refused_over_exchanges(cluster: Cluster, exchanges: int, pods: int) -> None:
    """Pods that arrive during exchanges succeed, but for some that are bound in the last moment."""
    held = cluster.run("holds", 50)
    before = cluster.incarnations()

    done = 0
    with cluster.node.configured_kubelet({"nodeStatusUpdateFrequency": PERIOD}):
        cluster.await_amounts(ALL_SHARES, ALL_SHARES)
        with arrivals(cluster, pods) as thread:
            while done < exchanges or thread.is_alive():
                cluster.daemon.exchange()
                done += 1
        refused = await_ended(cluster, pods, exchanges=exchanges)
        assert cluster.incarnations() == before
        cluster.await_amounts(ALL_SHARES, ALL_SHARES)
        assert cluster.inspect_container("holds") == held
    print(f"{pods} pods over {done} exchanges: {refused} refused")


WRONG = """\
version: metagpu/v1
pools: [{name: all, backends: [{backend: fracton}]}]
"""
MISFIT = """\
version: metagpu/v1
pools: [{name: all, backends: [{backend: mig, profiles: [9g.99gb]}]}]
"""
NEWER = CONFIGURATION + "keyOfAnotherVersion: true\n"
CONFIGURATIONS = {"configuration": WRONG, "profile": MISFIT}
CHANGES = {
    "configuration": ("rollout", "restart"),
    "profile": ("rollout", "restart"),
    "image": ("set", "image", "metagpu=docker.io/library/metagpu:none"),
    "driver": ("set", "env", "METAGPU_SIMULATE-"),
}
"""Changes of the DaemonSet, some of them after one of its configuration, that do not work."""


@pytest.fixture
def ready(cluster: Cluster) -> PodDaemon:
    """Return the daemon once its pod is ready: a rollout deletes at once one that is not yet."""
    assert isinstance(cluster.daemon, PodDaemon)
    cluster.daemon.await_rolled_out()
    return cluster.daemon


@pytest.mark.parametrize("kind", CHANGES)
def test_what_does_not_work_leaves_the_old_daemon_serving(
    cluster: Cluster, ready: PodDaemon, kind: str
) -> None:
    """The rollout stops at a pod that is not ready, and no pod fails before or after its end."""
    before = ready.pid
    try:
        if kind in CONFIGURATIONS:
            ready.configure(CONFIGURATIONS[kind])
        ready.change(*CHANGES[kind])
        assert_old_one_serves(cluster, ready)
        if kind in CONFIGURATIONS:
            assert ready.status()["standby"]["problems"][0].startswith("the configuration: ")
    finally:
        if kind in CONFIGURATIONS:
            ready.configure()
        else:
            ready.change("rollout", "undo")
    ready.await_rolled_out()
    assert (ready.pid == before) == (kind not in CONFIGURATIONS)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)


def test_a_rollback_to_a_file_with_an_unknown_key_leaves_the_daemon_serving(
    cluster: Cluster, ready: PodDaemon
) -> None:
    """The earlier revision has a file of another version: its pod never becomes ready."""
    ready.configure(former=CONFIGURATION)
    ready.change("set", "env", "METAGPU_DEFAULT_PROFILE=former")
    ready.await_rolled_out()
    ready.change("rollout", "undo")
    ready.await_rolled_out()
    before = ready.pid
    try:
        ready.configure(former=NEWER)
        ready.change("rollout", "undo")
        assert_old_one_serves(cluster, ready)
        assert "keyOfAnotherVersion" in ready.status()["standby"]["problems"][0]
    finally:
        ready.change("rollout", "undo")
        ready.configure()
    ready.await_rolled_out()
    assert ready.pid == before
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)


def assert_old_one_serves(cluster: Cluster, daemon: PodDaemon) -> None:
    """Assert that pods get shares while a pod of the DaemonSet is not ready."""
    wait_for("a pod that is not ready", lambda: bool(daemon.waiting()), within_s=SOON_S)
    with arrivals(cluster, 25):
        pass
    await_ended(cluster, 25)
    assert len(daemon.waiting()) == 1
    assert cluster.node.resource(RESOURCE)[0] == ALL_SHARES


REFUSED: Final = "Failed UnexpectedAdmissionError"
MOST_REFUSED: Final = 1
"""Pods that one exchange may refuse: the kubelet may raise the amounts in the last moment, or
admit too late on a busy machine. A plain restart refuses five times as many at this pace."""


def await_ended(cluster: Cluster, count: int, *, exchanges: int = 0) -> int:
    """Wait until all arriving pods have ended; return how many were refused, if these are few."""

    def all_ended() -> bool:
        seen = phases(cluster)
        left = {name: phase for name, phase in seen.items() if phase in ("Pending", "Running")}
        if left or len(seen) < count:
            raise RigError(f"{len(seen)} of {count} pods were made, and these did not end: {left}")
        return True

    wait_for("all pods to end", all_ended, within_s=max(SOON_S, 2.0 * count))
    failed = {name: text for name, text in phases(cluster).items() if text != "Succeeded"}
    assert set(failed.values()) <= {REFUSED}, failed
    assert len(failed) <= exchanges * MOST_REFUSED, failed
    return len(failed)

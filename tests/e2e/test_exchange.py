"""A new daemon takes the node over while pods arrive, and none of them notices."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import ALL_SHARES, NAMESPACE, RESOURCE, Cluster, container, pod
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.waiting import wait_for

PER_SECOND = 5
SHARES = 4


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
        it["metadata"]["name"]: f"{it['status']['phase']} {it['status'].get('reason', '')}".strip()
        for it in cluster.kubectl.list("pods", NAMESPACE)
        if it["metadata"]["name"].startswith("arriving-")
    }


@pytest.mark.parametrize(
    ("exchanges", "pods"),
    [
        (3, 60),
        pytest.param(10, 200, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_no_pod_fails_over_exchanges(cluster: Cluster, exchanges: int, pods: int) -> None:
    """Every pod that arrives during exchanges of the daemon gets its shares and succeeds."""
    held = cluster.run("holds", 50)
    before = cluster.incarnations()

    done = 0
    with arrivals(cluster, pods) as thread:
        while done < exchanges or thread.is_alive():
            cluster.daemon.exchange()
            done += 1
            capacity, allocatable = cluster.node.resource(RESOURCE)
            assert capacity == ALL_SHARES
            assert (allocatable or 0) > ALL_SHARES // 2  # some are held back, as pods come and go

    def all_ended() -> bool:
        seen = phases(cluster)
        return len(seen) == pods and not {"Pending", "Running"} & set(seen.values())

    wait_for("all pods to end", all_ended, within_s=120)
    assert {name: it for name, it in phases(cluster).items() if it != "Succeeded"} == {}
    assert cluster.incarnations() == before
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)
    assert cluster.inspect_container("holds") == held
    print(f"{pods} pods over {done} exchanges: none failed")

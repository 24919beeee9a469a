"""Faults of a cluster beside a running daemon, on a real API server."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cluster import ALL_SHARES, NAMESPACE, SHARES_PER_GPU, idle_pod
from tests.e2e.joined import RULES, SOON_S, Joined, competing_plugin_socket
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_cluster import SHARED, SLICES

FELL_OFF_THE_BUS = 79
OUTAGE_S = 10.0
RECOVERED_S = 150.0
"""Kubernetes' own clients wait up to a minute between two tries."""


@pytest.mark.long
def test_a_fault_is_reported_and_a_missing_right_costs_its_own_feature(member: Joined) -> None:
    """Without the right to the Node's status the Event comes, and the condition with the right."""
    cluster = member.cluster
    member.await_condition("False", "all 8 GPUs are in service")
    wait_for("every feature to work", lambda: not member.problems(), within_s=SOON_S)
    member.forbid("patch", "nodes", "status")

    member.daemon.fault(2, FELL_OFF_THE_BUS)
    member.await_event("GPUUnhealthy", "GPU 2", "XID 79")
    cluster.await_amounts(ALL_SHARES, ALL_SHARES - SHARES_PER_GPU)
    wait_for(
        "status to name the feature", lambda: "condition" in member.problems(), within_s=SOON_S
    )
    assert "docs/permissions.md has the rule to add" in member.problems()["condition"]
    assert member.problems().keys() <= {"condition", "allocatable"}

    member.kubectl.apply(RULES.read_text())
    member.await_condition("True", "GPU 2", "XID 79")
    wait_for("every feature to work again", lambda: not member.problems(), within_s=SOON_S)

    member.daemon.reset(2)
    member.await_condition("False", "all 8 GPUs are in service")
    member.await_event("GPURecovered", "GPU 2")
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)


def test_a_resource_of_another_plugin_is_named_and_left_to_it(member: Joined) -> None:
    """A resource that another plugin serves is registered only after that plugin has gone."""
    cluster = member.cluster
    member.profiles(slices=SLICES, other="")
    registered, _ = member.messages(SHARED)

    with competing_plugin_socket("nvidia-gpu.shared.sock") as socket:
        member.label("slices")
        cluster.await_amounts(400, 400)
        served = f"{SHARED} is served by another device plugin on {socket}"
        member.await_event("CompetingDevicePlugin", served)
        assert member.daemon.status()["competingPlugins"] == {SHARED: str(socket)}
        assert member.messages(SHARED)[0] == registered

    cluster.await_amounts(16, 16, SHARED)
    assert member.daemon.status()["competingPlugins"] == {}


@pytest.mark.long
def test_serving_goes_on_while_the_api_server_is_away(member: Joined) -> None:
    """Pods run on and a new pod gets shares in an outage; later labels are applied again."""
    cluster = member.cluster
    member.profiles(slices=SLICES, other="")
    cluster.start(idle_pod("before", 30))
    before, process = cluster.incarnations(), cluster.first_process("before")

    member.node.apiserver.kill()
    stopped = time.monotonic()
    wait_for(
        "status to report the outage",
        lambda: "cannot be reached" in problem(member),
        within_s=SOON_S,
    )
    with static_pod(member, "static", 40) as holder:
        wait_for("a pod to get shares", lambda: holder in holders(member), within_s=SOON_S)
        wait_for(
            f"{OUTAGE_S:g} s to pass",
            lambda: time.monotonic() - stopped > OUTAGE_S,
            within_s=2 * OUTAGE_S,
        )
        assert Path(f"/proc/{process}").exists()

        member.node.start_api()
        wait_for("the connection to the API server", lambda: not problem(member), within_s=SOON_S)
        member.label("slices")
        cluster.await_amounts(400, 400)
        cluster.kubectl.apply(idle_pod("after", 1, SHARED))
        wait_for(
            "scheduler and kubelet to receive pods again",
            lambda: "after" in cluster.incarnations(),
            within_s=RECOVERED_S,
        )
        assert cluster.incarnations()["before"] == before["before"]
    assert "cluster features failed" not in member.daemon.log  # the log line of a fault of our own


def problem(member: Joined) -> str:
    """Return why the daemon has no connection to the API server, empty when it has one."""
    return str(member.report["problem"])


def holders(member: Joined) -> set[str]:
    """Return the holders of shares, by the daemon's status."""
    return {lease["holder"] for lease in member.daemon.status()["leases"]}


@contextmanager
def static_pod(member: Joined, name: str, shares: int) -> Iterator[str]:
    """Run a static pod until the block ends; yield the holder of its shares.

    A kubelet without an API server admits the pod and calls Allocate.
    """
    folder = member.node.paths.static_pods
    manifest = folder / f"{name}.json"
    manifest.write_text(json.dumps(idle_pod(name, shares)))
    try:
        yield f"{NAMESPACE}/{name}-{member.node.name} (main)"
    finally:
        manifest.unlink()

"""A driver upgrade of the GPU operator, by its labels on a real API server."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ALL_SHARES, NAMESPACE, Cluster, idle_pod
from tests.e2e.joined import SOON_S, Joined, joined
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for

STATE = "nvidia.com/gpu-driver-upgrade-state"
HELD = 30


@pytest.fixture
def draining(node: Node, daemon: HostDaemon, account: tuple[str, ...]) -> Iterator[Joined]:
    """Start the daemon with the option."""
    with joined(Cluster(node, daemon), (*account, "--drain-on-driver-upgrade")) as member:
        yield member


def test_an_upgrade_withdraws_the_shares(draining: Joined) -> None:
    """A pod keeps its shares and has an Event, the next one waits, and gets them at the end."""
    member, cluster = draining, draining.cluster
    cluster.start(idle_pod("before", HELD))
    try:
        member.label("pod-deletion-required", STATE)
        cluster.await_amounts(ALL_SHARES, HELD)
        message = member.await_event("DriverUpgradeUnderWay", f"{NAMESPACE}/before")
        assert "the operator does not see it" in message
        wait_for(
            "the Event of the pod",
            lambda: (
                "the driver of this node" in cluster.event_messages("before", "GPUDriverUpgrade")
            ),
            within_s=SOON_S,
        )
        assert member.report["driverUpgrade"]["summary"] == message
        cluster.kubectl.apply(idle_pod("next", HELD))
        wait_for(
            "the scheduler to find no shares",
            lambda: "Insufficient" in cluster.event_messages("next", "FailedScheduling"),
            within_s=SOON_S,
        )
    finally:
        member.label("uncordon-required", STATE)
    cluster.await_running()
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)
    member.await_event("DriverUpgradeEnded")
    member.label(None, STATE)

"""Pods with ResourceClaims come and go, while daemon and kubelet restart at random moments."""

import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.fake_node import dra_objects
from tests.e2e.instances import MigNode, mig_node
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_both_fronts import (
    CONFIGURATION,
    GPUS,
    SETTLED_S,
    STARTING,
    FrontsCrowd,
)

CLAIMS_ALONE = CONFIGURATION.replace("[device-plugin, dra]", "[dra]")
MAY_LOSE = 1 / 4
"""The part of pods with `limits` that a kubelet without a plugin may refuse: 11 of 57 were."""
BETWEEN = 10
"""Arrivals between two restarts, about."""
LONGEST_S = 240.0
"""For pods to settle after a restart: the kubelet asks again within 90 s at the latest."""


@pytest.fixture
def shared_node(
    node: Node, daemon: Daemon, account: tuple[str, ...], request: pytest.FixtureRequest
) -> Iterator[MigNode]:
    """Run the daemon with ResourceClaims alone or with both fronts."""
    cluster = Cluster(node, daemon)
    cluster.clear()
    models = f"{{model: a100-40gb, count: {GPUS}}}"
    with (
        dra_objects(cluster.kubectl),
        mig_node(cluster, request.param, models, *account) as it,
    ):
        await_registered(cluster)
        yield it


def await_registered(cluster: Cluster) -> None:
    """Wait until the kubelet has the driver."""
    wait_for(
        "the driver to be registered",
        lambda: (cluster.daemon.status()["dra"] or {}).get("registered") is True,
        within_s=SETTLED_S,
    )


def restart_daemon(cluster: Cluster, end: str) -> None:
    """End the daemon by a signal, and start it again."""
    getattr(cluster.daemon, end)()
    cluster.daemon.start_again()


RESTARTS: dict[str, Callable[[Cluster], None]] = {
    "daemon, SIGTERM": lambda it: restart_daemon(it, "stop"),
    "daemon, SIGKILL": lambda it: restart_daemon(it, "kill"),
    "kubelet": lambda it: it.node.restart_kubelet(),
}


def restart_both(cluster: Cluster) -> None:
    """Kill the daemon, restart the kubelet meanwhile, and start the daemon again."""
    cluster.daemon.kill()
    cluster.node.restart_kubelet()
    cluster.daemon.start_again()


RESTARTS["both"] = restart_both


def checked(crowd: FrontsCrowd) -> bool:
    """Check that nothing is held twice; a kubelet that has just started may not answer yet."""
    crowd.check()
    return True


class ClaimsCrowd(FrontsCrowd):
    """Pods with ResourceClaims alone."""

    claims_part = 1.0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("shared_node", "crowd_class"),
    [
        pytest.param(CLAIMS_ALONE, ClaimsCrowd, id="claims"),
        pytest.param(CONFIGURATION, FrontsCrowd, id="both-fronts"),
    ],
    indirect=["shared_node"],
)
def test_restarts_amid_random_claims(
    shared_node: MigNode,
    crowd_class: type[FrontsCrowd],
    record_property: Callable[[str, object], None],
) -> None:
    """Nothing is held twice, no claim stays refused, and all pods settle after each restart."""
    began, cluster = time.monotonic(), shared_node.cluster
    chance, arrivals = random.Random(14), 120  # noqa: S311 - the same pods every time
    made: list[str] = []
    kinds, due = sorted(RESTARTS), chance.randint(1, BETWEEN)
    with cluster.node.api() as api:
        crowd = crowd_class(shared_node, api, chance, log_from=len(cluster.daemon.log))
        crowd.settled_s = LONGEST_S
        while crowd.arrived < arrivals:
            if crowd.arrived >= due:
                due += chance.randint(1, 2 * BETWEEN)
                how = kinds[len(made) % len(kinds)]  # each of them, however many there are
                made.append(how)
                RESTARTS[how](cluster)
                await_registered(cluster)
            pods = crowd.await_settled(STARTING)
            wait_for("the account", lambda: checked(crowd), within_s=SETTLED_S)
            crowd.change(pods)
        pods = crowd.await_settled()
        crowd.check()
        print(
            f"{crowd.arrived} arrivals and {len(made)} restarts in "
            f"{time.monotonic() - began:.0f} s, {dict(crowd.kinds)}; {len(crowd.waited)} waited; "
            f"refused {dict(crowd.lost)}, {crowd.refused_claims}; {made}"
        )
        record_property("refused", crowd.refused)
        assert set(made) == set(RESTARTS)
        crowd.leave(*pods)
        crowd.await_settled(gone=True)
    wait_for("leases to end", lambda: not cluster.daemon.status()["leases"], within_s=SETTLED_S)
    assert crowd.lost.total() <= MAY_LOSE * (arrivals - len(crowd.claimed)), crowd.lost

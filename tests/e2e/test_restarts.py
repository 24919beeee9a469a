"""Pods outlive restarts of kubelet, daemon and node, and keep their shares."""

from collections.abc import Callable

import pytest

from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE
from tests.e2e.cluster import ALL_SHARES, NAMESPACE, Cluster
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.waiting import wait_for

pytestmark = pytest.mark.daemon("pod")

ALMOST_ALL = {f"whole-{n}": 100 for n in range(7)} | {"most-of-one": 60}
THE_REST = 40
KNOWN_HOLDERS = {f"{NAMESPACE}/{name} (main)" for name in ("small", "large")}


def restart_kubelet(cluster: Cluster) -> None:
    """Restart the kubelet, as its upgrade does."""
    cluster.node.restart_kubelet()


def restart_daemon(cluster: Cluster) -> None:
    """Restart the daemon; meanwhile nothing is allocatable."""
    cluster.daemon.stop()
    cluster.await_amounts(ALL_SHARES, 0)
    cluster.daemon.start_again()


def crash_daemon(cluster: Cluster) -> None:
    """Kill the daemon, as the kernel does when memory runs out; it is started again."""
    cluster.daemon.kill()
    cluster.daemon.start_again()


def restart_both(cluster: Cluster) -> None:
    """Kill the daemon while the kubelet is away, which then starts it again."""
    cluster.node.stop_kubelet()
    cluster.daemon.kill()
    cluster.node.start_kubelet()
    cluster.daemon.start_again()


@pytest.mark.parametrize(
    "restart",
    [restart_kubelet, crash_daemon]
    + [pytest.param(both, marks=pytest.mark.long) for both in (restart_daemon, restart_both)],
)
def test_pods_outlive_a_restart(cluster: Cluster, restart: Callable[[Cluster], None]) -> None:
    """Running pods run on untouched, and a new pod gets only free shares."""
    holdings = cluster.run_all(ALMOST_ALL)
    before = cluster.incarnations()

    with cluster.wait_for_new_list():
        restart(cluster)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)

    # Only one GPU has free shares, and just enough: a held share taken for free would show.
    late = cluster.run("late", THE_REST)
    held = {share for holding in holdings for share in holding.share_ids}
    assert not held & set(late.share_ids)
    assert late.visible_gpus == holdings[-1].visible_gpus
    after = cluster.incarnations()
    assert {name: after[name] for name in before} == before
    assert all(incarnation.restarts == 0 for incarnation in after.values())


@pytest.mark.long
def test_a_kubelet_that_lost_its_checkpoint_gives_no_held_share_away(cluster: Cluster) -> None:
    """The kubelet takes all shares for free, and new pods get those that no pod uses."""
    held = {name for one in cluster.run_all({"small": 30, "large": 120}) for name in one.share_ids}
    before = cluster.incarnations()
    wait_for(
        "the daemon to know the holders, and no others",
        lambda: {lease["holder"] for lease in cluster.daemon.status()["leases"]} == KNOWN_HOLDERS,
        within_s=30,
    )

    cluster.node.stop_kubelet()
    (KUBELET_HOME / "device-plugins" / CHECKPOINT_FILE).unlink()
    with cluster.wait_for_new_list():
        cluster.node.start_kubelet()
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)

    rest = ALL_SHARES - len(held)
    late = cluster.run_all({f"late-{n}": 50 for n in range(rest // 50)})
    given = {name for one in late for name in one.share_ids}
    assert len(given) == rest
    assert not given & held
    assert {name: cluster.incarnations()[name] for name in before} == before


def test_a_restarted_container_keeps_its_shares(cluster: Cluster) -> None:
    """The kubelet starts a container again with its first Allocate answer."""
    holding = cluster.run("phoenix", 150)
    before = cluster.incarnations()["phoenix"]

    cluster.crash("phoenix")

    wait_for(
        "the container to be started again",
        lambda: cluster.incarnations().get("phoenix", before).restarts == before.restarts + 1,
        within_s=60,
    )
    assert cluster.inspect_container("phoenix") == holding


def test_shares_of_a_pod_deleted_while_the_kubelet_was_away_are_free(cluster: Cluster) -> None:
    """The shares of a pod deleted without a kubelet are free afterwards."""
    cluster.run("forgotten", 600)

    cluster.node.stop_kubelet()
    cluster.delete("forgotten", wait=False)
    with cluster.wait_for_new_list():
        cluster.node.start_kubelet()
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)

    everything = cluster.run("everything", ALL_SHARES)
    assert len(everything.share_ids) == ALL_SHARES


@pytest.mark.daemon("host")
def test_a_node_comes_back_from_a_power_cut(cluster: Cluster) -> None:
    """After a boot with the daemon first, every share is back and pods have what they had.

    A booted kubelet admits the earlier pods again, from its checkpoint, without calling
    Allocate. A pod whose shares are registered in that moment starts again in place; any other
    fails for good, with UnexpectedAdmissionError. A daemon that is up before the kubelet usually
    wins this race of milliseconds. Both outcomes are right, and no third is.
    """
    holdings = {holding.pod: holding for holding in cluster.run_all({"small": 30, "large": 150})}
    before = cluster.incarnations()

    cluster.node.power_off()
    cluster.daemon.kill()
    cluster.daemon.start()
    with cluster.wait_for_new_list():
        cluster.node.power_on()
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)

    for name, holding in holdings.items():
        if cluster.await_readmitted(name, before[name]):
            after = cluster.incarnations()[name]
            assert after.uid == before[name].uid
            assert after.container != before[name].container
            assert cluster.inspect_container(name) == holding
        else:
            cluster.delete(name)
    new = cluster.run("new", 100)
    assert sorted(new.shares_by_gpu.values()) == [100]

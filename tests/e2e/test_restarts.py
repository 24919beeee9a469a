"""Pods outlive restarts of everything around them, and keep what they hold."""

from collections.abc import Callable

import pytest

from tests.e2e.cluster import ALL_SHARES, Cluster
from tests.e2e.rig.waiting import wait_for

ALMOST_ALL = {f"whole-{n}": 100 for n in range(7)} | {"most-of-one": 60}
THE_REST = 40


def restart_kubelet(cluster: Cluster) -> None:
    """As an upgrade of the kubelet does."""
    cluster.node.restart_kubelet()


def restart_daemon(cluster: Cluster) -> None:
    """As an upgrade of metagpu does; while it is away, nothing is allocatable."""
    assert cluster.daemon.stop() == 0
    cluster.await_amounts(ALL_SHARES, 0)
    cluster.daemon.start()


def crash_daemon(cluster: Cluster) -> None:
    """As the kernel does when memory runs out."""
    cluster.daemon.kill()
    cluster.await_amounts(ALL_SHARES, 0)
    cluster.daemon.start()


def restart_both(cluster: Cluster) -> None:
    """The daemon is back before the kubelet."""
    cluster.node.stop_kubelet()
    assert cluster.daemon.stop() == 0
    cluster.daemon.start()
    cluster.node.start_kubelet()


@pytest.mark.parametrize("restart", [restart_kubelet, restart_daemon, crash_daemon, restart_both])
def test_pods_outlive_a_restart(cluster: Cluster, restart: Callable[[Cluster], None]) -> None:
    """Running pods run on untouched, and a new pod gets only what nobody holds."""
    holdings = cluster.run_all(ALMOST_ALL)
    before = cluster.incarnations()

    with cluster.offered_anew():
        restart(cluster)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)

    # Only one GPU has room, and just enough: one share taken for free would show.
    late = cluster.run("late", THE_REST)
    held = {share for holding in holdings for share in holding.share_ids}
    assert not held & set(late.share_ids)
    assert late.visible_gpus == holdings[-1].visible_gpus
    after = cluster.incarnations()
    assert {name: after[name] for name in before} == before
    assert all(incarnation.restarts == 0 for incarnation in after.values())


def test_a_restarted_container_keeps_its_shares(cluster: Cluster) -> None:
    """The kubelet starts a container again with the answer it was given once."""
    holding = cluster.run("phoenix", 150)
    before = cluster.incarnations()["phoenix"]

    cluster.crash("phoenix")

    wait_for(
        "the container to be started again",
        lambda: cluster.incarnations().get("phoenix", before).restarts == before.restarts + 1,
        within_s=60,
    )
    assert cluster.look_inside("phoenix") == holding


def test_shares_of_a_pod_deleted_while_the_kubelet_was_away_are_free(cluster: Cluster) -> None:
    """Nothing is lost when a pod goes while nobody is there to see it."""
    cluster.run("forgotten", 600)

    cluster.node.stop_kubelet()
    cluster.delete("forgotten", wait=False)
    with cluster.offered_anew():
        cluster.node.start_kubelet()
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)

    everything = cluster.run("everything", ALL_SHARES)
    assert len(everything.share_ids) == ALL_SHARES


def test_a_node_comes_back_from_a_power_cut(cluster: Cluster) -> None:
    """After a boot with the daemon first, every share is back and pods have what they had.

    A booted kubelet admits the pods of before anew, from its checkpoint, without asking
    Allocate again. A pod whose shares are registered in that moment it starts again in place;
    any other it fails for good, with UnexpectedAdmissionError. It is a race of milliseconds,
    which a daemon that is up before the kubelet usually wins. Both outcomes are right, and
    no third is.
    """
    holdings = {holding.pod: holding for holding in cluster.run_all({"small": 30, "large": 150})}
    before = cluster.incarnations()

    cluster.node.power_off()
    cluster.daemon.kill()
    cluster.daemon.start()
    with cluster.offered_anew():
        cluster.node.power_on()
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)

    for name, holding in holdings.items():
        if cluster.await_readmitted(name, before[name]):
            after = cluster.incarnations()[name]
            assert after.uid == before[name].uid
            assert after.container != before[name].container
            assert cluster.look_inside(name) == holding
        else:
            cluster.delete(name)
    new = cluster.run("new", 100)
    assert sorted(new.shares_by_gpu.values()) == [100]

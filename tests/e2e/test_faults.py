"""Effects of a GPU's fault on the node and its pods."""

import pytest

from tests.e2e.cluster import ALL_SHARES, SHARES_PER_GPU, Cluster

pytestmark = pytest.mark.daemon("pod")

FELL_OFF_THE_BUS = 79


def test_a_failed_gpu_is_unavailable_until_it_recovers(cluster: Cluster) -> None:
    """An XID 79 withdraws one GPU's shares only; its recovery brings them back."""
    victim = cluster.run("victim", 30)
    before = cluster.incarnations()
    (index,), (gpu,) = victim.gpu_indices, victim.visible_gpus

    cluster.daemon.fault(index, FELL_OFF_THE_BUS)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES - SHARES_PER_GPU)
    elsewhere = cluster.run("elsewhere", 6 * SHARES_PER_GPU)
    assert gpu not in elsewhere.shares_by_gpu
    assert cluster.incarnations()["victim"] == before["victim"]

    cluster.daemon.reset(index)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)
    assert cluster.incarnations()["victim"] == before["victim"]
    assert cluster.inspect_container("victim") == victim

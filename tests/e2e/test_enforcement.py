"""What happens to a pod that uses more memory of a GPU than its share."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import CONFIGURATION, Cluster
from tests.e2e.rig.waiting import wait_for

ENFORCED = CONFIGURATION.replace(
    "    gpus: all\n", "    gpus: all\n    memoryEnforcement: {policy: kill}\n"
)
WITHIN_MIB, ABOVE_MIB = 9_000, 20_000
"""Beside 25 shares of 40960 MiB: less than they are, and about twice as much."""
SOON_S = 30.0


@pytest.fixture
def strict(cluster: Cluster) -> Iterator[Cluster]:
    """A node that ends who uses too much, and the gentle one again afterwards."""
    cluster.daemon.configure(ENFORCED)
    yield cluster
    cluster.daemon.configure()


def test_a_pod_above_its_share_is_ended_and_its_neighbour_stays(strict: Cluster) -> None:
    """Processes have their pods' names; one that takes too much ends, and nobody else does."""
    greedy, neighbour = strict.run("greedy", 25), strict.run("neighbour", 25)
    before = strict.incarnations()
    (gpu,) = greedy.gpu_indices
    assert neighbour.gpu_indices == (gpu,)
    pids = {name: strict.first_process(name) for name in before}
    for pid in pids.values():
        strict.daemon.use(gpu, pid, WITHIN_MIB)

    def named() -> bool:
        seen = {
            container["pod"]: (process["pid"], process["innerPid"])
            for container in strict.daemon.processes()["containers"]
            for part in container["gpus"]
            for process in part["processes"]
        }
        return seen == {name: (pid, 1) for name, pid in pids.items()}

    wait_for("mgctl to name both pods' processes", named, within_s=SOON_S)
    assert strict.incarnations() == before

    strict.daemon.use(gpu, pids["greedy"], ABOVE_MIB)
    wait_for(
        "the greedy pod's container to be started anew",
        lambda: strict.incarnations().get("greedy", before["greedy"]) != before["greedy"],
        within_s=SOON_S,
    )
    assert strict.incarnations()["neighbour"] == before["neighbour"]

    for pid in pids.values():
        strict.daemon.free(gpu, pid)

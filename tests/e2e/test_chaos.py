"""Random schedules of pods, restarts and faults on the real kubelet, judged from outside."""

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.node import CONFIGURATIONS, GPUS, MIG
from tests.chaos.shrink import shrink
from tests.chaos.steps import REAL, draw, story
from tests.conftest import PIECE
from tests.e2e.chaos import faults
from tests.e2e.claims import driver_file, node_of_both_apis
from tests.e2e.cluster import Cluster
from tests.e2e.instances import MigNode
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.node import Node
from tests.fuzz.__main__ import commits

MINUTES = float(os.environ.get("MINUTES") or 0)
"""No schedule begins later; the first one always does."""
SEED = int(os.environ.get("SEED") or 1000 * int(os.environ.get(PIECE) or commits()))
LENGTH = 4
SCHEDULE_S = 600
"""A limit of one schedule; few take more than a minute."""


@pytest.fixture
def node_of_chaos(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[MigNode]:
    """Run the daemon with the pools of `tests.chaos`."""
    cluster = Cluster(node, daemon)
    with node_of_both_apis(cluster, account, CONFIGURATIONS["all"], GPUS, MIG) as live_mig_node:
        yield live_mig_node


@pytest.mark.timeout(60 * MINUTES + SCHEDULE_S)
def test_random_schedules_leave_no_fault(
    node_of_chaos: MigNode, record_property: Callable[[str, object], None]
) -> None:
    """Nothing is held twice, destroyed or given while closed, and at rest all is on offer."""
    driver = driver_file(node_of_chaos.cluster)
    began, seed = time.monotonic(), SEED
    while seed == SEED or time.monotonic() - began < 60 * MINUTES:
        steps = draw(seed, LENGTH, REAL)
        print(f"seed {seed}, at {time.monotonic() - began:.0f} s", flush=True)
        broken, log = faults(node_of_chaos, driver, steps)
        print(*log, *broken, sep="\n", flush=True)
        if broken and os.environ.get("SHRINK"):
            steps = shrink(steps, lambda shorter: bool(faults(node_of_chaos, driver, shorter)[0]))
        assert not broken, "\n".join((f"SEED={seed}", story(steps), *broken))
        seed += 1
    record_property("schedules", seed - SEED)

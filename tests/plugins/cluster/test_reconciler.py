"""The loop of each reconciler: when it runs again."""

import anyio

from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.settings import ClusterTiming
from tests.rigs.waiting import becomes, skip

LATER_S, PAUSE_S = 600.0, 60.0


async def test_the_next_run_is_due_from_the_end_of_the_last() -> None:
    """The pause after a run is a part of what the work asked for, and not added to it."""
    runs = list[float]()

    async def work() -> float:
        runs.append(anyio.current_time())
        return LATER_S

    reconciler = Reconciler("anything", work, ClusterTiming(), interval=PAUSE_S)
    async with anyio.create_task_group() as group:
        group.start_soon(reconciler.run)
        reconciler.trigger()
        await becomes(lambda: len(runs) == 1)
        skip(LATER_S)
        await becomes(lambda: len(runs) == 2)
        group.cancel_scope.cancel()
    assert LATER_S <= runs[1] - runs[0] < LATER_S + PAUSE_S

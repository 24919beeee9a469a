"""The loop of each reconciler: when it runs again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.reconciler import Reconciler, backoff_of
from metagpu.plugins.cluster.settings import ClusterTiming
from tests.plugins.cluster.rig import QUICK
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


@asynccontextmanager
async def failing(
    runs: list[float], errors: list[float], timing: ClusterTiming
) -> AsyncIterator[Reconciler]:
    """Run a reconciler that fails for each error, of which each is a delay that it asks for."""

    async def work() -> None:
        runs.append(anyio.current_time())
        if errors:
            raise ClusterError("away", retry_after=errors.pop())

    reconciler = Reconciler("anything", work, timing, interval=0.0)
    async with anyio.create_task_group() as group:
        group.start_soon(reconciler.run)
        reconciler.trigger()
        yield reconciler
        group.cancel_scope.cancel()


async def test_the_api_server_says_when_to_try_again() -> None:
    """A server that throttles is left alone for so long."""
    runs = list[float]()
    async with failing(runs, [PAUSE_S], QUICK) as reconciler:
        await becomes(lambda: reconciler.problem == "away")
        await anyio.sleep(0.2)
        assert len(runs) == 1
        skip(1.5 * PAUSE_S)
        await becomes(lambda: len(runs) == 2 and not reconciler.problem)


async def test_a_success_ends_the_delays() -> None:
    """The first failure after a success is tried again soon."""
    runs, errors = list[float](), [0.0] * 30
    async with failing(
        runs, errors, ClusterTiming(backoff_first=0.01, backoff_longest=1e9)
    ) as reconciler:
        for count in range(1, 31):
            await becomes(lambda wanted=count: len(runs) >= wanted)  # type: ignore[misc] # of a loop
            skip(1e9)
        await becomes(lambda: len(runs) >= 31 and not reconciler.problem)
        errors.append(0.0)
        reconciler.trigger()
        await becomes(lambda: len(runs) >= 33)


def test_nodes_that_fail_together_try_again_apart() -> None:
    """An API server that returns is not asked by all nodes in the same moment."""
    assert len({backoff_of(ClusterTiming()).next() for _ in range(20)}) > 1

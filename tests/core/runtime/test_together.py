"""Works that begin together and are waited for."""

from functools import partial

import anyio

from metagpu.core.runtime.together import start_together


async def test_all_begin_and_all_are_waited_for() -> None:
    """Works that end are at work together, and all are done at the return."""
    at_work, most, done = 0, 0, 0

    async def work() -> None:
        nonlocal at_work, most, done
        at_work += 1
        most = max(most, at_work)
        await anyio.wait_all_tasks_blocked()
        at_work, done = at_work - 1, done + 1

    async with anyio.create_task_group() as group:
        await start_together(group, [work] * 5, max_wait=60)
        assert (most, done) == (5, 5)


async def test_one_that_hangs_delays_no_other_for_long() -> None:
    """A work that does not end is left behind, and goes on."""
    may_end, done = anyio.Event(), list[int]()

    async def work(number: int) -> None:
        if number == 0:
            await may_end.wait()
        done.append(number)

    async with anyio.create_task_group() as group:
        await start_together(group, [partial(work, it) for it in range(3)], max_wait=0.01)
        assert done == [1, 2]
        may_end.set()
    assert done == [1, 2, 0]

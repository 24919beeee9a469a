"""One collection of usage for all callers at about the same time."""

import anyio

from metagpu.core.usage.collector import CachedUsage, NodeUsage, UsageCollector


class SlowCollector(UsageCollector):
    """A collector that waits for the test, and counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = anyio.Event()

    async def collect(self) -> NodeUsage:
        """Return no usage."""
        self.begun += 1
        await self.may_end.wait()
        return NodeUsage(at=self.begun)


async def test_callers_share_a_collection() -> None:
    """All callers during a collection share its result."""
    census = SlowCollector()
    looks, heard = CachedUsage(census, age=60), []

    async def ask() -> None:
        heard.append((await looks.latest()).at)

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        census.may_end.set()

    assert (census.begun, set(heard)) == (1, {1})


async def test_an_old_result_is_collected_again() -> None:
    """A result beyond its age is collected again."""
    census = SlowCollector()
    census.may_end.set()
    looks = CachedUsage(census, age=0)

    assert [(await looks.latest()).at for _ in range(3)] == [1, 2, 3]


async def test_a_cancelled_caller_leaves_the_collection_to_others() -> None:
    """A caller that is cancelled during a collection costs the others no answer."""
    census = SlowCollector()
    looks, heard = CachedUsage(census, age=60), []

    async def ask() -> None:
        heard.append((await looks.latest()).at)

    async with anyio.create_task_group() as group:
        first = anyio.CancelScope()

        async def leave() -> None:
            with first:
                await ask()

        group.start_soon(leave)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(ask)
        first.cancel()
        census.may_end.set()

    assert heard == [2]

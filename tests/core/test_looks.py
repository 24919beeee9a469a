"""One look at the GPUs for all who ask at about the same time."""

import anyio

from metagpu.core.census import Census, Findings, Looks


class Slow(Census):
    """Looks when it is let, and counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = anyio.Event()

    async def take(self) -> Findings:
        """Find nothing."""
        self.begun += 1
        await self.may_end.wait()
        return Findings(at=self.begun)


async def test_a_crowd_shares_a_look() -> None:
    """However many ask while it is being looked, there is one look, and all have it."""
    census = Slow()
    looks, heard = Looks(census, age=60), []

    async def ask() -> None:
        heard.append((await looks.latest()).at)

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        census.may_end.set()

    assert (census.begun, set(heard)) == (1, {1})


async def test_what_is_older_is_looked_at_anew() -> None:
    """Beyond its age a look is not given any more."""
    census = Slow()
    census.may_end.set()
    looks = Looks(census, age=0)

    assert [(await looks.latest()).at for _ in range(3)] == [1, 2, 3]


async def test_a_caller_that_goes_leaves_the_look_to_others() -> None:
    """Who hangs up while it is being looked for it costs nobody else the answer."""
    census = Slow()
    looks, heard = Looks(census, age=60), []

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

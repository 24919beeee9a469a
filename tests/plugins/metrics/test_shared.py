"""What takes work to make is made once for all who ask at about the same time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from metagpu.plugins.metrics import shared as module
from metagpu.plugins.metrics.shared import Shared
from tests.heard import heard


@dataclass
class Maker:
    """Makes numbers, each when it is let."""

    made: int = 0
    gate: anyio.Event = field(default_factory=anyio.Event)

    async def make(self) -> int:
        """Make the next number."""
        self.made += 1
        number = self.made
        await self.gate.wait()
        return number


@asynccontextmanager
async def shared(maker: Maker, age: float) -> AsyncIterator[Shared[int]]:
    """Make values while the block lasts."""
    it = Shared("numbers", maker.make, age)
    async with anyio.create_task_group() as group:
        group.start_soon(it.run)
        yield it
        group.cancel_scope.cancel()


async def test_all_who_ask_together_have_the_same() -> None:
    """One is made for a hundred, and who asks soon after has it too."""
    maker, got = Maker(), list[int | None]()

    async with shared(maker, age=3600) as it:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                got.append(await it.get())

            for _ in range(100):
                group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            maker.gate.set()
        assert await it.get() == 1

    assert got == [1] * 100


async def test_what_is_old_is_made_again() -> None:
    """And only when somebody asks."""
    maker = Maker()
    maker.gate.set()

    async with shared(maker, age=0) as it:
        assert [await it.get() for _ in range(3)] == [1, 2, 3]
        await anyio.wait_all_tasks_blocked()

    assert maker.made == 3


async def test_who_asks_may_go() -> None:
    """What was begun for somebody is finished for the next."""
    maker = Maker()

    async with shared(maker, age=3600) as it:
        with anyio.move_on_after(0):
            await it.get()
        await anyio.wait_all_tasks_blocked()
        maker.gate.set()
        assert await it.get() == 1

    assert maker.made == 1


async def test_patience_ends_with_what_was_known() -> None:
    """Nothing at first, later the last value; and what hangs is not begun a second time."""
    maker = Maker()

    async with shared(maker, age=0) as it:
        assert await it.get(patience=0.01) is None
        maker.gate.set()
        await anyio.wait_all_tasks_blocked()
        maker.gate = anyio.Event()

        assert [await it.get(patience=0.01) for _ in range(3)] == [1, 1, 1]
        await anyio.wait_all_tasks_blocked()

    assert maker.made == 2


async def test_a_fault_is_told_and_the_next_try_may_succeed() -> None:
    """Who waits gets nothing, not what was known before; making goes on."""
    maker = Maker()
    maker.gate.set()

    async def make() -> int:
        number = await maker.make()
        if number == 2:
            raise ZeroDivisionError
        return number

    with heard(module) as logs:
        async with anyio.create_task_group() as group:
            it = Shared("numbers", make, age=0)
            group.start_soon(it.run)
            assert [await it.get() for _ in range(3)] == [1, None, 3]
            group.cancel_scope.cancel()

    assert [(entry["event"], entry["what"]) for entry in logs] == [
        ("what monitoring asks for could not be made", "numbers")
    ]

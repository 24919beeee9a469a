"""Concurrent requests share one computation of an expensive value."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from metagpu.plugins.http import server as module
from metagpu.plugins.http.server import SingleFlight
from tests.rigs.logs import capture_module_logs


@dataclass
class Maker:
    """A source of numbers whose calls block until released."""

    made: int = 0
    gate: anyio.Event = field(default_factory=anyio.Event)

    async def make(self) -> int:
        """Make the next number."""
        self.made += 1
        number = self.made
        await self.gate.wait()
        return number


@asynccontextmanager
async def shared(maker: Maker, age: float) -> AsyncIterator[SingleFlight[int]]:
    """Run the single flight until the block ends."""
    flight = SingleFlight("numbers", maker.make, age)
    async with anyio.create_task_group() as group:
        group.start_soon(flight.run)
        yield flight
        group.cancel_scope.cancel()


async def test_concurrent_requests_share_one_value() -> None:
    """A hundred concurrent requests, and one soon after, share one value."""
    maker, got = Maker(), list[int | None]()

    async with shared(maker, age=3600) as flight:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                got.append(await flight.get())

            for _ in range(100):
                group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            maker.gate.set()
        assert await flight.get() == 1

    assert got == [1] * 100


async def test_an_old_value_is_computed_again() -> None:
    """An old value is computed again at the next request only."""
    maker = Maker()
    maker.gate.set()

    async with shared(maker, age=0) as flight:
        assert [await flight.get() for _ in range(3)] == [1, 2, 3]
        await anyio.wait_all_tasks_blocked()

    assert maker.made == 3


async def test_a_value_that_is_no_longer_true_is_not_shared_with_later_requests() -> None:
    """Requests from a change on get a value that was begun after it; earlier ones do not wait."""
    maker, got = Maker(), list[tuple[str, int | None]]()

    async with shared(maker, age=3600) as flight, anyio.create_task_group() as group:

        async def ask(name: str) -> None:
            got.append((name, await flight.get()))

        group.start_soon(ask, "before")
        await anyio.wait_all_tasks_blocked()  # the first computation is under way
        flight.invalidate()
        group.start_soon(ask, "after")
        await anyio.wait_all_tasks_blocked()
        maker.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert await flight.get() == 2

    assert got == [("before", 1), ("after", 2)]


async def test_a_request_may_be_cancelled() -> None:
    """A computation goes on for the next request when its first request is cancelled."""
    maker = Maker()

    async with shared(maker, age=3600) as flight:
        with anyio.move_on_after(0):
            await flight.get()
        await anyio.wait_all_tasks_blocked()
        maker.gate.set()
        assert await flight.get() == 1

    assert maker.made == 1


async def test_a_timeout_returns_the_last_value() -> None:
    """A timeout returns nothing at first, later the last value; a hung call runs once."""
    maker = Maker()

    async with shared(maker, age=0) as flight:
        assert await flight.get(max_wait=0.01) is None
        maker.gate.set()
        await anyio.wait_all_tasks_blocked()
        maker.gate = anyio.Event()

        assert [await flight.get(max_wait=0.01) for _ in range(3)] == [1, 1, 1]
        await anyio.wait_all_tasks_blocked()

    assert maker.made == 2


async def test_a_failure_is_logged_and_the_next_try_may_succeed() -> None:
    """A failed computation returns nothing, not the old value; the next may succeed."""
    maker = Maker()
    maker.gate.set()

    async def make() -> int:
        number = await maker.make()
        if number == 2:
            raise ZeroDivisionError
        return number

    with capture_module_logs(module) as logs:
        async with anyio.create_task_group() as group:
            flight = SingleFlight("numbers", make, age=0)
            group.start_soon(flight.run)
            assert [await flight.get() for _ in range(3)] == [1, None, 3]
            group.cancel_scope.cancel()

    assert [(entry["event"], entry["value"]) for entry in logs] == [
        ("computation failed", "numbers")
    ]

"""Waiting for conditions without an event, and skipping the time of deadlines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import anyio
from anyio import to_thread

TICK: Final = 0.01
"""Seconds of a tick on a machine that does nothing else."""


async def until(is_so: Callable[[], Awaitable[bool]], deadline: float = 30) -> None:
    """Poll until an asynchronous predicate holds."""
    with anyio.fail_after(deadline):
        while not await is_so():  # noqa: ASYNC110 - files and processes send no events
            await anyio.sleep(0.01)


def skip(seconds: float) -> None:
    """Advance the running loop's clock, so that all deadlines up to then have passed.

    So a test needs no short deadline, which a busy machine might miss.
    """
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]


def stop_clock() -> None:
    """Stop the running loop's clock: only `skip` advances it, however slow the machine is."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # type: ignore[method-assign]


async def becomes(is_so: Callable[[], object], deadline: float = 30) -> None:
    """Poll until a predicate holds."""

    async def now() -> bool:
        return bool(is_so())

    await until(now, deadline)


@dataclass
class Ticks:
    """The ticks that a block took, so far or in all."""

    count: int = 0


@asynccontextmanager
async def within(limit: Callable[[], int], problem: Callable[[], str]) -> AsyncIterator[Ticks]:
    """Count the ticks of a block; end it with an error if they are more than `limit()`.

    A tick is a sleep of 10 ms and a turn of a thread. A busy machine delays ticks as it delays what
    is measured, so that a limit in ticks fails for what waits, and not for what is slow.

    Raises:
        AssertionError: with `problem()`.
    """
    ticks, late = Ticks(), False

    async def count() -> None:
        nonlocal late
        while ticks.count < limit():
            await anyio.sleep(TICK)
            await to_thread.run_sync(int)
            ticks.count += 1
        late = True
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        yield ticks
        group.cancel_scope.cancel()
    if late:
        raise AssertionError(f"after {ticks.count} ticks: {problem()}")

"""Waiting for conditions without an event, and skipping the time of deadlines."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio


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


async def becomes(is_so: Callable[[], object], deadline: float = 30) -> None:
    """Poll until a predicate holds."""

    async def now() -> bool:
        return bool(is_so())

    await until(now, deadline)

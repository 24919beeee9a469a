"""Waiting for what nobody announces, and not waiting for what only time brings."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio


async def until(is_so: Callable[[], Awaitable[bool]], deadline: float = 30) -> None:
    """Look again and again until it is so."""
    with anyio.fail_after(deadline):
        while not await is_so():  # noqa: ASYNC110 - nobody rings when a file or a process changes
            await anyio.sleep(0.01)


def skip(seconds: float) -> None:
    """Turn the running loop's clock forward: deadlines up to there have passed, all of them.

    A test that wants a deadline to pass needs no short one then, which a busy machine might miss.
    """
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]


async def becomes(is_so: Callable[[], object], deadline: float = 30) -> None:
    """Look again and again until something in this process is so."""

    async def now() -> bool:
        return bool(is_so())

    await until(now, deadline)

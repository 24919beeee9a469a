"""Waiting for what nobody announces."""

from collections.abc import Awaitable, Callable

import anyio


async def until(is_so: Callable[[], Awaitable[bool]], deadline: float = 30) -> None:
    """Look again and again until it is so."""
    with anyio.fail_after(deadline):
        while not await is_so():  # noqa: ASYNC110 - nobody rings when a file or a process changes
            await anyio.sleep(0.01)


async def becomes(is_so: Callable[[], object], deadline: float = 30) -> None:
    """Look again and again until something in this process is so."""

    async def now() -> bool:
        return bool(is_so())

    await until(now, deadline)

"""Works that begin one after the other, and wait for each other for a moment only."""

from collections.abc import Awaitable, Callable, Iterable

import anyio
from anyio.abc import TaskGroup


async def start_in_turn(
    group: TaskGroup, works: Iterable[Callable[[], Awaitable[None]]], max_wait: float
) -> None:
    """Start each work when the one before has ended, or has taken `max_wait` seconds.

    Return when the last one has ended or taken as long; what takes longer goes on in the group.
    Threads of Python that run at once pass one lock to and fro: one after the other they take less
    processor time. One that hangs delays no other for long.
    """
    for work in works:
        ended = anyio.Event()
        group.start_soon(_run, work, ended)
        with anyio.move_on_after(max_wait):
            await ended.wait()


async def _run(work: Callable[[], Awaitable[None]], ended: anyio.Event) -> None:
    await work()
    ended.set()

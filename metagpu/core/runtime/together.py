"""Works that begin together and are waited for as long as they go on."""

from collections.abc import Awaitable, Callable, Iterable

import anyio
from anyio.abc import TaskGroup


async def start_together(
    group: TaskGroup, works: Iterable[Callable[[], Awaitable[None]]], max_wait: float
) -> None:
    """Start all works, and wait for each, in their order, at most `max_wait` seconds.

    For works that are done in turn, as the calls of GPUs in one thread: as long as each takes its
    moment, all are waited for. One that hangs delays the caller for that moment only, and goes on
    in the group.
    """
    ends = []
    for work in works:
        ends.append(anyio.Event())
        group.start_soon(_run, work, ends[-1])
    for end in ends:
        if not end.is_set():
            with anyio.move_on_after(max_wait):
                await end.wait()


async def _run(work: Callable[[], Awaitable[None]], ended: anyio.Event) -> None:
    await work()
    ended.set()

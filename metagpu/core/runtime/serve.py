"""The main task group: a signal or the first failure ends the process."""

import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import structlog

from metagpu.core.errors import MetagpuError

log = structlog.get_logger()


async def serve(
    *tasks: Callable[[], Coroutine[Any, Any, None]],
    reload: Callable[[], Awaitable[None]],
    over: anyio.Event | None = None,
) -> None:
    """Run all tasks until SIGTERM or SIGINT, or until it is over; SIGHUP reloads.

    Signals that come during a reload are heard: a reload that waits delays no end, and is followed
    by one more for all SIGHUPs that came meanwhile.

    At the end all tasks are cancelled together; each leaves its blocks in order, so the kubelet
    sees its streams end before the process ends. A task that fails ends the others, and its error
    is raised.

    Raises:
        MetagpuError: all tasks were cancelled, neither by a signal nor because it is over.
    """
    wanted, over = anyio.Event(), over or anyio.Event()

    async def reload_when_wanted() -> None:
        nonlocal wanted
        while True:
            await wanted.wait()
            wanted = anyio.Event()
            await reload()

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await over.wait()
                group.cancel_scope.cancel()

            for task in (reload_when_wanted, end, *tasks):
                group.start_soon(task)

            async for received in signals:
                if received is signal.SIGHUP:
                    wanted.set()
                else:
                    log.info("stopping", signal=received.name)
                    group.cancel_scope.cancel()
                    return
    if not over.is_set():
        raise MetagpuError("all tasks of metagpu ended without a signal: a fault of metagpu's own")

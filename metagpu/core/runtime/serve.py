"""The main task group: a signal or the first failure ends the process."""

import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import structlog

from metagpu.core.errors import InternalError

log = structlog.get_logger()


async def serve(
    *tasks: Callable[[], Coroutine[Any, Any, None]],
    reload: Callable[[], Awaitable[None]],
    over: anyio.Event | None = None,
) -> bool:
    """Run all tasks until SIGTERM or SIGINT, or until it is over; SIGHUP reloads.

    Signals that come during a reload are heard: a reload that waits delays no end, and is followed
    by one more for all SIGHUPs that came meanwhile.

    At the end all tasks are cancelled together; each leaves its blocks in order, so the kubelet
    sees its streams end before the process ends. A task that fails ends the others, and its error
    is raised.

    Returns:
        Whether a signal asked for the end, also one that came while all ended for another reason.

    Raises:
        InternalError: all tasks were cancelled, neither by a signal nor because it is over.
    """
    wanted, over = anyio.Event(), over or anyio.Event()

    async def reload_when_wanted() -> None:
        nonlocal wanted
        while True:
            await wanted.wait()
            wanted = anyio.Event()
            await reload()

    stopped = False
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as listening:
            async with anyio.create_task_group() as group:

                async def end() -> None:
                    await over.wait()
                    group.cancel_scope.cancel()

                async def listen() -> None:
                    nonlocal stopped
                    async for received in signals:
                        if received is signal.SIGHUP:
                            wanted.set()
                        else:
                            log.info("stopping", signal=received.name)
                            stopped = True
                            group.cancel_scope.cancel()

                listening.start_soon(listen)
                for task in (reload_when_wanted, end, *tasks):
                    group.start_soon(task)
            listening.cancel_scope.cancel()
    if not (stopped or over.is_set()):
        raise InternalError("all tasks of metagpu ended without a signal: a fault of metagpu's own")
    return stopped

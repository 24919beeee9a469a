"""The main task group: a signal or the first failure ends the process."""

import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import structlog

from metagpu.core.errors import MetagpuError

log = structlog.get_logger()


async def serve(
    *tasks: Callable[[], Coroutine[Any, Any, None]], reload: Callable[[], Awaitable[None]]
) -> None:
    """Run all tasks until SIGTERM or SIGINT; SIGHUP reloads.

    Signals that come during a reload are heard: a reload that waits delays no end, and is followed
    by one more for all SIGHUPs that came meanwhile.

    At the end all tasks are cancelled together; each leaves its blocks in order, so the kubelet
    sees its streams end before the process ends. A task that fails ends the others, and its error
    is raised.

    Raises:
        MetagpuError: all tasks were cancelled, and not by a signal.
    """
    wanted = anyio.Event()

    async def reload_when_wanted() -> None:
        nonlocal wanted
        while True:
            await wanted.wait()
            wanted = anyio.Event()
            await reload()

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as group:
            for task in (reload_when_wanted, *tasks):
                group.start_soon(task)

            async for received in signals:
                if received is signal.SIGHUP:
                    wanted.set()
                else:
                    log.info("stopping", signal=received.name)
                    group.cancel_scope.cancel()
                    return
    raise MetagpuError("all tasks of metagpu ended without a signal: a fault of metagpu's own")

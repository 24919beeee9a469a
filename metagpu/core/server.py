"""Run things until a signal says stop: one task group, the first failure ends the process."""

import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import structlog

log = structlog.get_logger()


async def serve(
    *tasks: Callable[[], Coroutine[Any, Any, None]], reload: Callable[[], Awaitable[None]]
) -> None:
    """Run all tasks until SIGTERM or SIGINT; SIGHUP reloads.

    Tasks are cancelled together at the end; each leaves its blocks in its own order, so the kubelet
    sees its streams end before the process does. A task that fails ends the others and raises.
    """
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(task)

            async for received in signals:
                if received is signal.SIGHUP:
                    await reload()
                else:
                    log.info("stopping", signal=received.name)
                    group.cancel_scope.cancel()
                    return

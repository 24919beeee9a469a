"""Restarts of tasks that the node can do without."""

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import structlog

log = structlog.get_logger()


async def run_with_restart(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, *, delay: float = 30.0
) -> None:
    """Run an optional task; log a fault in it, and start it again after a delay.

    Args:
        work: the task; its normal end is final.
        name: its name in the log.
        delay: seconds from a fault to the next start.
    """
    while True:
        try:
            await work()
        except Exception:
            log.exception("task failed", task=name, restart_after=f"{delay:g}s")
        else:
            return
        await anyio.sleep(delay)

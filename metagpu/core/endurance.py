"""Keeps what the node can do without, and keeps its faults from everything else."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio
import structlog

ANEW: Final = 30.0
"""Seconds before something begins anew that the node can do without, after a fault in it."""

log = structlog.get_logger()


async def enduring(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Run something that the node can do without: a fault in it is told, and ends nothing else."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("a part of metagpu failed; it begins anew", part=name, after=f"{ANEW:g}s")
        else:
            return
        await anyio.sleep(ANEW)

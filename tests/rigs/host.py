"""Real processes for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import Process


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[Process]:
    """Run a real process while the block lasts, `sleep 60` by default."""
    process = await anyio.open_process(command or ("sleep", "60"), stdin=None)

    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()

"""The fixture that finds blocking calls finds them, where it should and only there."""

import time
from pathlib import Path

import anyio
import pytest
from blockbuster import BlockingError

from metagpu.core.errors import MetagpuError
from metagpu.plugins.control import SOCKET_NAME, ask, controlled
from metagpu.plugins.serving import identity_of


async def test_metagpu_must_not_block_the_loop(tmp_path: Path) -> None:
    """A blocking call of ours on the event loop is an error."""
    async with controlled(tmp_path, {}):
        with pytest.raises(BlockingError, match=r"socket\.connect"):
            ask(tmp_path, {"command": "status"})


async def test_metagpu_may_block_a_thread(tmp_path: Path) -> None:
    """The same call in a thread is right."""
    async with controlled(tmp_path, {}):
        with pytest.raises(MetagpuError, match="no command"):
            await anyio.to_thread.run_sync(ask, tmp_path, {"command": "status"})


async def test_a_look_at_a_socket_file_is_allowed(tmp_path: Path) -> None:
    """What is listed as legitimate is let pass."""
    assert identity_of(tmp_path / SOCKET_NAME) is None


async def test_tests_may_do_as_they_like() -> None:
    """Calls without metagpu among their callers are not looked at."""
    time.sleep(0)  # noqa: ASYNC251 - this is what is tested

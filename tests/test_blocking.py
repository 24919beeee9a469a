"""The fixture that finds blocking calls finds those of metagpu on the loop, and no others."""

import time
from pathlib import Path

import anyio
import pytest
from blockbuster import BlockingError

from metagpu.core.errors import MetagpuError
from metagpu.core.runtime.files import file_identity
from metagpu.plugins.control.client import SOCKET_NAME, send_request
from metagpu.plugins.control.socket import control_server


async def test_metagpu_must_not_block_the_loop(tmp_path: Path) -> None:
    """A blocking call of metagpu on the event loop is an error."""
    async with control_server(tmp_path, {}):
        with pytest.raises(BlockingError, match=r"socket\.connect"):
            send_request(tmp_path, {"command": "status"})


async def test_metagpu_may_block_a_thread(tmp_path: Path) -> None:
    """The same call in a thread is allowed."""
    async with control_server(tmp_path, {}):
        with pytest.raises(MetagpuError, match="no command"):
            await anyio.to_thread.run_sync(send_request, tmp_path, {"command": "status"})


async def test_a_check_of_a_socket_file_is_allowed(tmp_path: Path) -> None:
    """A blocking call on the list of exceptions is allowed."""
    assert file_identity(tmp_path / SOCKET_NAME) is None


async def test_tests_may_block() -> None:
    """Blocking calls without metagpu among their callers are not checked."""
    time.sleep(0)  # noqa: ASYNC251 - this is what is tested

"""systemd hears that the daemon is ready, and that its event loop turns."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from metagpu.host.service import report_state
from tests.rigs.waiting import skip


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """Listen as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        listener.settimeout(30)
        yield listener


async def heard(listener: socket.socket) -> bytes:
    """Return the next message."""
    return await to_thread.run_sync(listener.recv, 100)


@pytest.mark.parametrize("abstract", [False, True])
async def test_readiness_is_reported_when_it_comes(tmp_path: Path, *, abstract: bool) -> None:
    """One message says that the daemon is ready, on a socket in a folder or without a name."""
    ready = anyio.Event()
    address = f"@{tmp_path}/notify" if abstract else str(tmp_path / "notify")

    with manager(address) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(report_state, ready, {"NOTIFY_SOCKET": address})
            await anyio.wait_all_tasks_blocked()
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.recv(100)
            listener.settimeout(30)
            ready.set()
            assert await heard(listener) == b"READY=1"


async def test_the_watchdog_hears_of_the_loop_also_before_it_is_ready(tmp_path: Path) -> None:
    """Every half period a message says that the loop turns; one more says that it is ready."""
    ready, address = anyio.Event(), str(tmp_path / "notify")
    # A message each half hour: a socket that is full loses what comes, READY as well.
    given = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3600000000"}

    with manager(address) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(report_state, ready, given)
            for _ in range(3):
                assert await heard(listener) == b"WATCHDOG=1"
                skip(1800)
            assert await heard(listener) == b"WATCHDOG=1"
            ready.set()
            assert await heard(listener) == b"READY=1"
            skip(1800)
            assert await heard(listener) == b"WATCHDOG=1"
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "given", [{}, {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "1000"}]
)
async def test_without_a_service_manager_nothing_happens(given: dict[str, str]) -> None:
    """A daemon that systemd did not start, or whose systemd has gone, serves all the same."""
    ready = anyio.Event()
    ready.set()
    with anyio.move_on_after(0.05):
        await report_state(ready, given)

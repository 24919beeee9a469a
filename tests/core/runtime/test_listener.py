"""Listening sockets."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import anyio
import pytest

from metagpu.core.runtime.listener import SO_PASSRIGHTS, accept, unix_listener
from metagpu.core.runtime.rate_limit import TokenBucket


async def test_a_socket_is_there_while_the_block_lasts(tmp_path: Path) -> None:
    """The socket's file has the given mode and is removed with the block."""
    path = tmp_path / "s.sock"

    with unix_listener(path, mode=0o600, backlog=1):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116 - as others see it
    assert not path.exists()


def test_a_socket_of_another_process_stays(tmp_path: Path) -> None:
    """A socket file that another process has put in the path meanwhile is not removed."""
    path = tmp_path / "s.sock"

    with unix_listener(path, mode=0o600, backlog=1):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_a_path_that_is_too_long_leaves_nothing(tmp_path: Path) -> None:
    """The error is the kernel's, and no socket stays open."""
    with pytest.raises(OSError), unix_listener(tmp_path / ("x" * 200), mode=0o600, backlog=1):  # noqa: PT011 - the kernel's own
        pass


def test_descriptors_are_refused_to_their_sender(tmp_path: Path) -> None:
    """Nobody sends a descriptor, whose close may make the receiver wait, where the kernel can."""
    path = tmp_path / "s.sock"

    with unix_listener(path, mode=0o600, backlog=1), socket.socket(socket.AF_UNIX) as caller:
        if not _has_passrights(caller):
            pytest.skip("this kernel is older than Linux 6.16")
        caller.connect(str(path))
        with pytest.raises(PermissionError):
            socket.send_fds(caller, [b"x"], [0])
        caller.send(b"x")


def _has_passrights(any_socket: socket.socket) -> bool:
    try:
        any_socket.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
    except OSError:
        return False
    return True


async def test_connections_come_at_the_rate(tmp_path: Path) -> None:
    """One of three callers is accepted at once; the others wait in the kernel until it is time."""
    path, bucket = tmp_path / "s.sock", TokenBucket(burst=1, rate=1000)
    callers = [socket.socket(socket.AF_UNIX) for _ in range(3)]

    with unix_listener(path, mode=0o600, backlog=8) as listener:
        for caller in callers:
            caller.connect(str(path))
        accepted = 0
        with anyio.fail_after(30):
            async for connection in accept(listener, bucket):
                connection.close()
                accepted += 1
                if accepted == len(callers):
                    break
    for caller in callers:
        caller.close()


async def test_a_failure_to_accept_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that calls while no descriptor is left is accepted once one is free."""
    failures = [OSError(24, "Too many open files")]
    loop = asyncio.get_running_loop()
    real = loop.sock_accept

    async def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await real(listener)

    path = tmp_path / "s.sock"
    with (
        unix_listener(path, mode=0o600, backlog=8) as listener,
        socket.socket(socket.AF_UNIX) as caller,
    ):
        monkeypatch.setattr(loop, "sock_accept", failing)
        caller.connect(str(path))
        with anyio.fail_after(30):
            async for connection in accept(
                listener, TokenBucket(burst=1, rate=1000), retry_delay=0.01
            ):
                connection.close()
                break
    assert failures == []

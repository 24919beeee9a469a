"""Listening sockets."""

import asyncio
import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path

import anyio
import pytest

from metagpu.core.runtime import listener
from metagpu.core.runtime.listener import SO_PASSRIGHTS, accept, unix_listener
from metagpu.core.runtime.rate_limit import TokenBucket
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes


async def test_accepts_of_asyncio_that_fail_are_one_line_a_second(tmp_path: Path) -> None:
    """A daemon without free descriptors does not flood its log, and serves once it has some."""
    path, served = tmp_path / "s.sock", anyio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.set()
        writer.close()

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with capture_module_logs(listener) as entries, ExitStack() as stack:
        listener.log_failed_accepts_once(every=60)
        async with await asyncio.start_unix_server(serve, path):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            most = client.fileno() + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            client.connect(str(path))
            await becomes(lambda: bool(entries))
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            with anyio.fail_after(30):
                await served.wait()
    assert [entry["event"] for entry in entries] == ["connection not accepted"]


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
            async for connection, source in accept(listener, bucket):
                connection.close()
                assert source == ""
                accepted += 1
                if accepted == len(callers):
                    break
    for caller in callers:
        caller.close()


class Exhausted(socket.socket):
    """A listener whose first connection finds no free descriptor."""

    failures = 1

    def accept(self) -> tuple[socket.socket, object]:
        """Fail once, then accept."""
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_a_failure_to_accept_ends_nothing() -> None:
    """A client that calls while no descriptor is left is accepted once one is free."""
    with Exhausted() as listener, socket.socket() as caller:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
        caller.connect(listener.getsockname())
        rate = TokenBucket(burst=1, rate=1000)
        async with aclosing(accept(listener, rate, retry_delay=0.01)) as accepted:
            with anyio.fail_after(30):
                connection, _ = await anext(accepted)
            connection.close()

    assert listener.failures == 0


@contextmanager
def connected(listener: socket.socket, source: str, count: int) -> Iterator[list[socket.socket]]:
    """Connect to a listener from an address of the loopback, so many times."""
    with ExitStack() as clients:
        made = []
        for _ in range(count):
            client = clients.enter_context(socket.socket())
            client.bind((source, 0))
            client.connect(listener.getsockname())
            made.append(client)
        yield made


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """Listen on a port of the loopback."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
        yield listener


async def test_no_source_keeps_another_out(listening: socket.socket) -> None:
    """A client that comes behind a crowd of one address has the second turn, not the last."""
    with connected(listening, "127.0.0.2", 60), connected(listening, "127.0.0.1", 1):
        sources = []
        async with aclosing(accept(listening, TokenBucket(1000, 1000))) as accepted:
            async for connection, source in accepted:
                connection.close()
                sources.append(source)
                if len(sources) == 3:
                    break

    assert [source == "127.0.0.1" for source in sources] == [False, True, False]


async def test_all_addresses_of_the_loopback_have_one_turn(listening: socket.socket) -> None:
    """A user of this machine binds any of 16 million; other programs bind none."""
    sources: list[str] = []
    with ExitStack() as crowd:
        for number in range(50):
            crowd.enter_context(connected(listening, f"127.0.1.{number}", 1))
        crowd.enter_context(connected(listening, "127.0.0.1", 1))
        async with aclosing(accept(listening, TokenBucket(1000, 1000))) as accepted:
            async for connection, source in accepted:
                connection.close()
                sources.append(source)
                if len(sources) == 2:
                    break

    assert sources[1] == "127.0.0.1"


async def test_of_too_many_that_wait_the_largest_source_loses_one(
    listening: socket.socket,
) -> None:
    """A crowd takes no descriptors without end, and no place of others."""
    with (
        connected(listening, "127.0.0.1", 1) as [other],
        connected(listening, "127.0.0.2", 30) as crowd,
    ):
        async with aclosing(
            accept(listening, TokenBucket(1000, 1000), most_waiting=10)
        ) as accepted:
            first, source = await anext(accepted)
            lost = [client for client in crowd if is_reset(client)]
            first.close()

        assert source == "127.0.0.1"
        assert len(lost) == len(crowd) - 9
        assert is_reset(other) is False


def is_reset(client: socket.socket) -> bool:
    """Return whether the other side has closed a connection at once."""
    client.setblocking(False)  # noqa: FBT003 - the socket module's signature
    try:
        client.recv(1)
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False
    return False

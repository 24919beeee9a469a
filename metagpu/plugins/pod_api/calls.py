"""The daemon's side of the relay: started, listened to, and killed when it hangs."""

import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Final

import anyio
import msgspec

from metagpu.core.contracts.host import Peer
from metagpu.core.contracts.programs import RunChild
from metagpu.core.errors import MetagpuError, describe_error
from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.listener import remove_socket

RELAY: Final = Path(__file__).with_name("relay")

_MESSAGE: Final = 4096
"""Bytes of the longest message of the relay."""
_DESCRIPTORS: Final = 2


class RelayFailed(MetagpuError):
    """Raised when the relay cannot be started, ends, hangs, or loses its file."""


class RelaySettings(msgspec.Struct, frozen=True):
    """The limits that the relay keeps, by the names of its command line.

    Attributes:
        request_limit: bytes of a caller.
        reading_time: seconds that a caller has for each part of its answer, of 64 KiB at most.
        accept_burst: connections accepted at once.
        accepted: connections accepted a second, of all pods; the others wait in the kernel.
        call_burst: calls given to the daemon at once.
        calls: calls given to the daemon a second, in turns by pod.
        pod_calls: calls of one pod that the daemon has at once; its others wait.
        beat: seconds between two signs of life.
        passrights: the socket option that refuses descriptors to their sender, when it is 0.
    """

    request_limit: int
    reading_time: float
    accept_burst: int
    accepted: float
    call_burst: int
    calls: float
    pod_calls: int
    beat: float
    passrights: int


class RelayedCall(msgspec.Struct, frozen=True):
    """A caller, and a connection of the relay that carries the caller's bytes.

    Attributes:
        peer: the caller; `None` where it is in a pid namespace that metagpu does not see.
    """

    connection: socket.socket
    peer: Peer | None

    def close(self) -> None:
        """Close the connection, and the descriptor of the caller."""
        self.connection.close()
        if self.peer is not None:
            os.close(self.peer.pidfd)


@asynccontextmanager
async def relayed_calls(
    path: Path,
    settings: RelaySettings,
    run_child: RunChild,
    *,
    silence: float,
    proc: Path = Path("/proc"),
) -> AsyncIterator[AsyncGenerator[RelayedCall, None]]:
    """Listen at `path` by a relay while the block lasts; the block closes its calls.

    Args:
        path: of the socket; a socket that is there already is replaced.
        settings: the limits of callers.
        run_child: starts the relay.
        silence: seconds without a sign of life after which the relay has failed.
        proc: where the kernel shows processes.

    Raises:
        RelayFailed: the relay cannot be started; the calls raise it when the relay ends or hangs.
    """
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.setblocking(False)  # noqa: FBT003 - the socket module's signature
    words = (f"{name}={number}" for name, number in msgspec.structs.asdict(settings).items())
    command = [sys.executable, "-I", "-S", str(RELAY), str(path), str(proc), *words]

    async with AsyncExitStack() as stack:
        stack.enter_context(closing(channel))
        with closing(theirs):
            try:
                await stack.enter_async_context(run_child(command, stdin=theirs.fileno()))
            except OSError as error:
                problem = f"{command[0]} cannot be started: {describe_error(error)}"
                raise RelayFailed(problem) from error

        word, _ = await _receive(channel, silence)
        if word != b"listening":
            problem = word.decode(errors="replace").removeprefix("failed ")
            raise RelayFailed(
                f"cannot listen on {path}: {problem}; run as root, or name another folder with "
                "--pod-dir"
            )
        stack.callback(remove_socket, path, file_identity(path))
        yield _calls(path, channel, silence)


async def _calls(
    path: Path, channel: socket.socket, silence: float
) -> AsyncGenerator[RelayedCall, None]:
    while True:
        message, descriptors = await _receive(channel, silence)
        word, _, pid = message.partition(b" ")
        if word == b"alive" and file_identity(path) is None:
            raise RelayFailed(f"{path} was removed; it is made again")
        if word == b"call" and descriptors:  # none arrive where this process has no file left
            connection, *pidfds = descriptors
            peer = Peer(int(pid), pidfds[0]) if pidfds else None
            carried = socket.socket(fileno=connection)
            carried.setblocking(False)  # noqa: FBT003 - the socket module's signature
            yield RelayedCall(carried, peer)


async def _receive(channel: socket.socket, silence: float) -> tuple[bytes, list[int]]:
    """Receive a message with its descriptors.

    Raises:
        RelayFailed: the relay has ended, or is silent.
    """
    # Whatever kept this process from listening meanwhile, a message that is there counts.
    with anyio.move_on_after(silence):
        await anyio.wait_readable(channel)
    try:
        message, descriptors, _, _ = socket.recv_fds(
            channel, _MESSAGE, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        raise RelayFailed(f"the relay of calls gave no sign of life for {silence:g} s") from None
    except ConnectionError:
        message, descriptors = b"", []
    if not message:
        raise RelayFailed("the relay of calls has ended")
    return message, descriptors

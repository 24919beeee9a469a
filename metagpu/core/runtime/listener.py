"""Listening unix sockets, and connections accepted at a limited rate."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import structlog

from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.rate_limit import TokenBucket

SO_PASSRIGHTS: Final = 83
"""asm-generic/socket.h, since Linux 6.16: whether a peer may send descriptors; 1 by default."""

log = structlog.get_logger()


@contextmanager
def unix_listener(path: Path, *, mode: int, backlog: int) -> Iterator[socket.socket]:
    """Listen on a unix socket until the block ends, then remove its file.

    The mode is set before the socket listens, so only permitted processes connect. Where the
    kernel can, it refuses descriptors to who sends them: the close of a received one may take as
    long as its sender wants. A file that another process has put in the socket's place stays.

    Raises:
        OSError: the socket cannot be bound; a path of more than 107 bytes cannot.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(path))
        identity = file_identity(path)
        try:
            path.chmod(mode)
            with suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            listener.listen(backlog)
            listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
            yield listener
        finally:
            remove_socket(path, identity)


def remove_socket(path: Path, identity: tuple[int, int, int] | None) -> None:
    """Remove a socket file, unless another process has put its own in its place."""
    if identity is not None and file_identity(path) == identity:
        path.unlink(missing_ok=True)


async def accept(
    listener: socket.socket, rate: TokenBucket, *, retry_delay: float = 1.0
) -> AsyncGenerator[socket.socket, None]:
    """Yield connections at a limited rate; the others wait in the kernel.

    A connection that cannot be accepted, for want of a descriptor or because its client has gone,
    is logged; the next one is accepted after `retry_delay` seconds.
    """
    loop = asyncio.get_running_loop()

    while True:
        await anyio.sleep(rate.reserve(loop.time()))
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            log.warning("connection not accepted", error=str(error))
            await anyio.sleep(retry_delay)
        else:
            yield connection

"""The socket that containers call: who calls is known by the kernel, and may do it so often.

Whatever a caller does costs the caller: it is accepted when its turn comes, has little time and
room for its request, few connections for each pod, and is dropped when it does not read.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import structlog

from metagpu.core.allowance import Allowance
from metagpu.core.errors import MetagpuError
from metagpu.core.host import Container, Host
from metagpu.plugins import frames, pod_folder
from metagpu.plugins.frames import Request

CONNECTIONS: Final = 256
CONNECTIONS_OF_A_POD: Final = 4
REQUESTS_AT_ONCE: Final = 20
REQUESTS_A_SECOND: Final = 5.0
"""Of each pod."""
REQUEST_TIME: Final = 2.0
"""Seconds a caller has for its request."""
READING_TIME: Final = 5.0
"""Seconds a caller has to make room for more of its answer."""

_ACCEPTED_AT_ONCE: Final = 50
_ACCEPTED_A_SECOND: Final = 200.0
"""Of everybody: the others wait in the kernel, and cost nothing there."""
_AFTER_FAILURE: Final = 1.0
"""Seconds until the next is accepted."""
_REMEMBERED: Final = 256
"""Pods whose requests are counted, before those that are long silent are forgotten."""

log = structlog.get_logger()


class Refused(MetagpuError):
    """Raised when a caller gets no answer; the text is for who called."""


@dataclass(slots=True)
class Conversation:
    """What an answer is given to: a caller's stdout and stderr."""

    connection: socket.socket

    async def out(self, text: str) -> None:
        """Say something on stdout."""
        await self.send(frames.output(text))

    async def complain(self, text: str) -> None:
        """Say a line on stderr."""
        await self.send(frames.complaint(f"mgctl: {text}\n"))

    async def send(self, data: bytes) -> None:
        """Send what fits in the time that a caller has.

        Raises:
            TimeoutError: if it does not read.
            OSError: if it has gone.
        """
        with anyio.fail_after(READING_TIME):
            await asyncio.get_running_loop().sock_sendall(self.connection, data)


Responder = Callable[[Container, Request, Conversation], Awaitable[int]]
"""Answers a container's request; gives the exit status."""


@dataclass(slots=True)
class _Caller:
    """What a pod has taken of us."""

    connections: int = 0
    requests: Allowance = field(
        default_factory=lambda: Allowance(REQUESTS_AT_ONCE, REQUESTS_A_SECOND)
    )


class PodSocket:
    """Serves the folder's socket."""

    def __init__(self, folder: Path, host: Host, respond: Responder) -> None:
        self._folder = folder
        self._host = host
        self._respond = respond
        self._callers: dict[str, _Caller] = {}

    async def run(self) -> None:
        """Answer until cancelled.

        Raises:
            MetagpuError: if the socket cannot be made.
        """
        with pod_folder.listening(self._folder) as listener:
            await self._accept(listener)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        places = anyio.Semaphore(CONNECTIONS)
        turns = Allowance(_ACCEPTED_AT_ONCE, _ACCEPTED_A_SECOND)

        async def converse(connection: socket.socket) -> None:
            try:
                await self._converse(connection)
                # Closed with something unread, it would be an error to who reads our answer.
                with suppress(OSError):
                    connection.recv(frames.REQUEST_LIMIT)
            finally:
                connection.close()
                places.release()

        async with anyio.create_task_group() as group:
            while True:
                await places.acquire()
                await anyio.sleep(turns.reserve(loop.time()))
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    # We have no descriptor left, or the caller no patience. Neither is an end.
                    log.warning("a call from a container was not taken", error=str(error))
                    places.release()
                    await anyio.sleep(_AFTER_FAILURE)
                else:
                    group.start_soon(converse, connection)

    async def _converse(self, connection: socket.socket) -> None:
        """Answer one caller; whatever goes wrong is its own matter, or a line in the log."""
        to = Conversation(connection)

        try:
            try:
                status = await self._answer(to)
            except MetagpuError as error:
                await to.complain(str(error))
                status = 1
            await to.send(frames.end(status))
        except (OSError, TimeoutError, EOFError):
            pass  # it has gone, or does not read
        except Exception:
            log.exception("a request from a container failed")

    async def _answer(self, to: Conversation) -> int:
        container = await self._container(to.connection)

        caller = self._caller(container.pod_uid)
        if caller.connections >= CONNECTIONS_OF_A_POD:
            raise Refused(
                f"this pod has {CONNECTIONS_OF_A_POD} calls open already; end one of them"
            )
        caller.connections += 1

        try:
            request = await _request(to.connection)
            if not caller.requests.take(asyncio.get_running_loop().time()):
                raise Refused(
                    f"this pod asks too often: {REQUESTS_A_SECOND:g} requests a second are "
                    "answered; `-w` looks again by itself"
                )
            return await self._while_it_listens(container, request, to)
        finally:
            caller.connections -= 1

    async def _while_it_listens(
        self, container: Container, request: Request, to: Conversation
    ) -> int:
        """Answer until that is done, or the caller hangs up or says more than it has to.

        Raises:
            EOFError: if it hung up.
        """
        status: int | None = None
        failure: Exception | None = None

        async def hang_up(scope: anyio.CancelScope) -> None:
            with suppress(OSError):
                await asyncio.get_running_loop().sock_recv(to.connection, 1)
            scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(hang_up, group.cancel_scope)
            try:
                status = await self._respond(container, request, to)
            except Exception as error:  # noqa: BLE001 - raised below, outside of the group
                failure = error
            group.cancel_scope.cancel()

        if failure is not None:
            raise failure
        if status is None:
            raise EOFError
        return status

    async def _container(self, connection: socket.socket) -> Container:
        """Say which container calls.

        Raises:
            Refused: if it is none of a pod, or we cannot see it.
        """
        identity = await self._host.peer(connection)
        if identity is None:
            raise Refused(
                "metagpu cannot see who asks, so it answers nothing: its pod needs "
                "`hostPID: true` to know the containers of this node"
            )
        if identity.container is None:
            raise Refused(
                "this socket answers containers of pods alone; on the node, root asks with "
                "metagpu's own mgctl"
            )
        return identity.container

    def _caller(self, pod: str) -> _Caller:
        now = asyncio.get_running_loop().time()
        if len(self._callers) >= _REMEMBERED:
            self._callers = {
                uid: caller
                for uid, caller in self._callers.items()
                if caller.connections or not caller.requests.is_full(now)
            }
        return self._callers.setdefault(pod, _Caller())


async def _request(connection: socket.socket) -> Request:
    """Read a request.

    Raises:
        Refused: if it takes too long.
        NotUnderstood: if it is none.
        EOFError: if the caller hangs up.
    """
    try:
        with anyio.fail_after(REQUEST_TIME):
            size = frames.size_of(await _read(connection, frames.LENGTH.size))
            return frames.request_of(await _read(connection, size))
    except TimeoutError:
        raise Refused(f"no request came within {REQUEST_TIME:g} s") from None


async def _read(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data

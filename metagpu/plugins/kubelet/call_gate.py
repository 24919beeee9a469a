"""The gate of the kubelet's calls: closed while another daemon takes over.

A closed gate holds calls, and sends no lists. Held calls are forwarded to the successor once it
serves, or answered here after all if it fails: the kubelet, which makes one allocation at a time
and sets no deadline, sees nothing but a slower answer.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
import structlog
from grpclib.exceptions import StreamTerminatedError

from metagpu.core.model.shares import ResourceName
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.grpc_server import Connections, StreamingCalls

FORWARD_DEADLINE: Final = 30.0
"""Seconds for the successor's answer: the kubelet's own limit for PreStartContainer."""

log = structlog.get_logger()


class CallGate:
    """Lets calls in, holds them, or forwards them to another daemon."""

    def __init__(self) -> None:
        self._closed = self._detached = False
        self._sockets: Mapping[ResourceName, Path] = {}
        self._running = self._held = self._forwarded = 0
        self._served: dict[StreamingCalls, Connections] = {}
        self._changed = anyio.Event()

    @property
    def closed(self) -> bool:
        """True while calls are held or forwarded."""
        return self._closed

    async def answer(
        self,
        resource: ResourceName,
        method: str,
        request: bytes,
        own: Callable[[bytes], Awaitable[bytes]],
    ) -> tuple[bytes, bool]:
        """Answer a call; return the answer, and whether the successor gave it.

        Raises:
            GRPCError: the successor refuses the call.
            Exception: any error of `own`.
        """
        self._held += 1
        try:
            while self._closed:
                changed, socket = self._changed, self._sockets.get(resource)
                if socket is not None:
                    self._forwarded += 1
                    try:
                        return await call_raw(socket, method, request, FORWARD_DEADLINE), True
                    except (OSError, StreamTerminatedError) as error:
                        log.warning("successor did not answer", method=method, error=str(error))
                    finally:
                        self._forwarded -= 1
                await changed.wait()
        finally:
            self._held -= 1
            self._notify()

        self._running += 1
        try:
            return await own(request), False
        finally:
            self._running -= 1
            self._notify()

    @property
    def forwards(self) -> bool:
        """True once the successor may have granted shares."""
        return bool(self._sockets)

    @contextmanager
    def serving(self, calls: StreamingCalls, connections: Connections) -> Iterator[None]:
        """Know a service's lists and connections while the block lasts."""
        self._served[calls] = connections
        try:
            yield
        finally:
            del self._served[calls]

    async def close(self, deadline: float) -> bool:
        """Hold all calls from now on; return whether those let in have ended.

        If they did not within `deadline` seconds, the gate is open again.
        """
        self._closed, self._detached = True, False
        with anyio.move_on_after(deadline):
            while self._running:
                await self._changed.wait()
        if self._running:
            self.open()
        return self._closed

    def open(self) -> None:
        """Answer held calls and those to come, and send lists again."""
        self._closed, self._sockets = False, {}
        self._notify()

    def expect_detach(self) -> None:
        """Note that the kubelet is about to forget which plugins the lists are of."""
        self._detached = True

    async def reopen(self, within: float) -> None:
        """Serve again after the successor failed.

        A kubelet that has forgotten these plugins would not notice their end: the lists end now,
        which it does not notice either, and each endpoint registers again.
        """
        if self._detached:
            await self.end_lists(within)
        self.open()

    async def hand_over(
        self, sockets: Mapping[ResourceName, Path], deadline: float, within: float
    ) -> None:
        """Forward calls to the successor's sockets, and end all lists.

        Connections stay open for calls to come. A kubelet that closes them at the end of a list
        would lose calls: those that are held have `deadline` seconds to be answered before.
        """
        self._sockets = sockets
        self._notify()
        with anyio.move_on_after(deadline):
            while self._held:
                await self._changed.wait()
        await self.end_lists(within)

    async def end_lists(self, within: float) -> None:
        """End all lists, and wait until the kubelet has seen it.

        A kubelet that has forgotten these plugins does not show it, and has `within` seconds; any
        other closes its connections at once.
        """
        for calls in self._served:
            calls.cancel()
        with anyio.move_on_after(within):
            for connections in tuple(self._served.values()):
                await connections.wait_closed()

    async def wait_answered(self) -> None:
        """Wait until the successor has answered what was forwarded to it, or is too late."""
        with anyio.move_on_after(FORWARD_DEADLINE):
            while self._closed and self._forwarded:
                await self._changed.wait()

    async def wait_open(self) -> None:
        """Wait until the gate is open."""
        while self._closed:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

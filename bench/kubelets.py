"""Kubelets that know the time at which their socket was bound.

Their clocks start just before the socket is bound: Python's audit events report the call.
"""

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
from grpclib.client import Channel
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from bench.null_plugin import PassThrough
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.kubelet import SimKubelet
from metagpu.sim.kubelet.transport import AbortableServer

_SOCKET: Final = "kubelet.sock"
_TIMEOUT: Final = 30.0

_bound: dict[str, float] = {}
"""When each path was last bound (`time.perf_counter`)."""


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "socket.bind":
        _bound[str(args[1])] = time.perf_counter()


sys.addaudithook(_note)


class Kubelet(ABC):
    """A kubelet that starts again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def life(self) -> AbstractAsyncContextManager[None]:
        """Run the kubelet from a start, which wipes all sockets, to a sudden death."""

    async def registered(self, count: int) -> float:
        """Wait for `count` registrations in this life; return the seconds since the bind.

        Raises:
            TimeoutError: fewer registrations come in time.
        """
        await self._wait(lambda: self._registrations() >= count)
        return time.perf_counter() - _bound[str(self.directory / _SOCKET)]

    async def listed(self, count: int) -> None:
        """Wait for `count` first lists in this life.

        Raises:
            TimeoutError: fewer lists come in time.
        """
        await self._wait(lambda: self._lists() >= count)

    @abstractmethod
    async def _wait(self, predicate: Callable[[], bool]) -> None: ...

    @abstractmethod
    def _registrations(self) -> int: ...

    @abstractmethod
    def _lists(self) -> int: ...


class TimedSimKubelet(Kubelet):
    """The simulated kubelet: it dials back, asks for options, writes checkpoints."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._kubelet = SimKubelet(directory)
        self._before = (0, 0)

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Restart the kubelet."""
        self._before = self._totals()
        await self._kubelet.restart()
        try:
            yield
        finally:
            await self._kubelet.crash()

    async def _wait(self, predicate: Callable[[], bool]) -> None:
        await self._kubelet.wait_for(predicate, within=_TIMEOUT)

    def _registrations(self) -> int:
        return self._totals()[0] - self._before[0]

    def _lists(self) -> int:
        return self._totals()[1] - self._before[1]

    def _totals(self) -> tuple[int, int]:
        kubelet = self._kubelet
        return sum(kubelet.registrations.values()), sum(kubelet.lists.values())


class MinimalKubelet(Kubelet, v1beta1.RegistrationBase):
    """A kubelet that accepts every plugin, asks for its list, and does nothing else.

    It shows which part of the time is the simulated kubelet's own.

    Attributes:
        lists_plugins: whether it asks for lists; a kubelet that does not is about to die.
    """

    lists_plugins = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._accepted = self._listed = 0
        self._changed = anyio.Event()
        self._streams: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Serve until the block ends, then abort."""
        self._accepted = self._listed = 0
        door = AbortableServer([self])
        await door.open(self.directory / _SOCKET, wipe=self.directory)
        try:
            yield
        finally:
            await door.abort()
            for stream in list(self._streams):
                stream.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """Accept a plugin.

        Raises:
            GRPCError: the plugin's socket does not exist; a real kubelet reports that after 10 s.
        """
        socket = self.directory / message.endpoint
        if not _is_there(socket):
            raise GRPCError(Status.UNKNOWN, "failed to dial device plugin")
        self._accepted += 1
        if self.lists_plugins:
            task = asyncio.create_task(self._follow(socket))
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
        self._tell()
        return v1beta1.Empty()

    async def _follow(self, socket: Path) -> None:
        async with Channel(path=str(socket), codec=PassThrough()) as channel:
            request = channel.request(
                "/v1beta1.DevicePlugin/ListAndWatch", Cardinality.UNARY_STREAM, bytes, bytes
            )
            with suppress(StreamTerminatedError):
                async with request as stream:
                    await stream.send_message(b"", end=True)
                    while await stream.recv_message() is not None:
                        self._listed += 1
                        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _wait(self, predicate: Callable[[], bool]) -> None:
        with anyio.fail_after(_TIMEOUT):
            while not predicate():
                await self._changed.wait()

    def _registrations(self) -> int:
        return self._accepted

    def _lists(self) -> int:
        return self._listed


def _is_there(socket: Path) -> bool:
    return socket.exists()


@asynccontextmanager
async def simulated(
    directory: Path, pod_resources: Path | None = None
) -> AsyncIterator[SimKubelet]:
    """Run a simulated kubelet until the block ends."""
    async with SimKubelet(directory, pod_resources=pod_resources).running() as kubelet:
        yield kubelet


async def _stay(directory: Path) -> None:
    async with MinimalKubelet(directory).life():
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_stay, Path(sys.argv[1]))

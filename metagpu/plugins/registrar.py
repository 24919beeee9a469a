"""The kubelet's Registration service: found when it listens, told of one resource at a time.

All resources lose a kubelet in the same moment and register with the next one in the same moment,
so they share one connection to it: four of their own take longer than the four calls.
"""

from typing import Final

import anyio
import structlog
from grpclib.client import Channel
from grpclib.exceptions import GRPCError

from metagpu.core.errors import KubeletError, why
from metagpu.plugins.kubelet_directory import KubeletDirectory
from metagpu.plugins.pb import v1beta1

DEADLINE: Final = 15.0
"""Seconds for a registration; the kubelet itself gives up dialling us back after 10."""
PAUSE: Final = (0.001, 1.0)
"""First and longest pause, in seconds, while the kubelet's socket refuses connections."""
PATIENCE: Final = 5.0
"""Seconds without a kubelet after which that is told, once: a restart takes less, a wrong folder
for ever."""

log = structlog.get_logger()


class Registrar:
    """The one connection, there while somebody holds a line."""

    def __init__(self, directory: KubeletDirectory) -> None:
        self._directory = directory
        self._channel: Channel | None = None
        self._connecting = anyio.Lock()
        self._lines: set[Line] = set()

    async def line(self) -> "Line":
        """Wait for a kubelet that listens, and give a line to it, to be closed after use."""
        line = Line(self)
        self._lines.add(line)

        try:
            async with self._connecting:
                await self._connect()
        except BaseException:
            line.close()
            raise
        return line

    async def _connect(self) -> None:
        """Connect, unless there is a connection that holds.

        A starting kubelet binds its socket first and listens a moment later, so the first tries
        follow each other within milliseconds.
        """
        pause, began, told = PAUSE[0], anyio.current_time(), False

        while True:
            kubelet = self._directory.kubelet()
            channel = self._channel or Channel(path=str(self._directory.kubelet_socket))
            self._channel = channel
            try:
                await channel.__connect__()
            except OSError as error:
                if not told and anyio.current_time() - began >= PATIENCE:
                    told = True
                    self._tell_absence(error)
                pause = PAUSE[0] if kubelet is None else min(pause * 2, PAUSE[1])
                await self._directory.replaced(kubelet, PAUSE[1] if kubelet is None else pause)
            else:
                if told:
                    log.info("the kubelet takes registrations")
                return

    def _tell_absence(self, error: OSError) -> None:
        log.warning(
            "no kubelet takes registrations; waiting for one",
            socket=str(self._directory.kubelet_socket),
            why=why(error),
            mend="start the kubelet, or name its device-plugins folder with --kubelet-dir",
        )

    async def register(self, request: v1beta1.RegisterRequest) -> None:
        """Register once (see `Line.register`)."""
        if self._channel is None:
            raise ConnectionError("the line is closed")

        try:
            await v1beta1.RegistrationStub(self._channel).register(request, timeout=DEADLINE)
        except GRPCError as error:
            raise KubeletError(error.message or error.status.name) from error
        except TimeoutError as error:
            raise KubeletError(f"no answer within {DEADLINE:g} s") from error
        except AssertionError as error:  # betterproto2's word for it
            raise KubeletError("it answered without a message") from error

    def let_go(self, line: "Line") -> None:
        """End the connection with its last line."""
        self._lines.discard(line)
        if not self._lines and self._channel is not None:
            self._channel.close()
            self._channel = None


class Line:
    """One caller's hold of the connection."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def register(self, request: v1beta1.RegisterRequest) -> None:
        """Register once.

        Raises:
            KubeletError: if the kubelet says no, or nothing.
            OSError: if it goes away.
            StreamTerminatedError: likewise.
        """
        await self._registrar.register(request)

    def close(self) -> None:
        """Hang up; doing so again does nothing."""
        self._registrar.let_go(self)

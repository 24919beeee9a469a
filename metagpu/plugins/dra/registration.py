"""The registration of the driver: two sockets, found by the kubelet itself.

The kubelet watches a folder for registration sockets, asks each for its service, and says how it
went. A kubelet that starts finds the socket that stands; the socket's end deregisters the driver.
"""

import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from struct import Struct
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.errors import describe_error
from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.plugins.kubelet.fast_codec import check_message
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, serve_grpc, unary_method
from metagpu.plugins.kubelet.pb import pluginregistration as pb

_PATH: Final = "/pluginregistration.Registration/"
_TYPE: Final = "DRAPlugin"
_CREDENTIALS: Final = Struct("3i")
"""The kernel's `struct ucred`: pid, uid, gid."""

log = structlog.get_logger()


class RegistrationTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        poll: between two checks of the sockets' files.
        answer: for another driver to say who it is.
    """

    poll: float = 1.0
    answer: float = 1.0


TIMING: Final = RegistrationTiming()


class RegistrationStatus(msgspec.Struct):
    """The kubelet's last word of the driver; it may change at each of its starts.

    Attributes:
        registered: whether the kubelet has the driver.
        problem: why it has not, empty if it has.
    """

    registered: bool = False
    problem: str = "the kubelet has not asked yet"


class DraRegistration:
    """Serves a driver, and keeps it registered.

    Attributes:
        status: what the kubelet said last.

    Args:
        driver: the name of the driver.
        kubelet_root: the kubelet's own folder, which has the sockets of its plugins.
        services: the names of the gRPC services, the preferred one first.
        methods: the methods of these services.
        on_registered: is called whenever the kubelet has registered the driver.
    """

    def __init__(
        self,
        driver: str,
        kubelet_root: Path,
        services: tuple[str, ...],
        methods: Callable[[StreamingCalls], Mapping[str, Method]],
        timing: RegistrationTiming = TIMING,
        *,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self.status = RegistrationStatus()
        self._driver = driver
        self._services = services
        self._methods = methods
        self._timing = timing
        self._on_registered = on_registered
        self._socket = kubelet_root / "plugins_registry" / f"{driver}-reg.sock"
        self._endpoint = kubelet_root / "plugins" / driver / "dra.sock"
        self._logged = LogOnce()

    async def run(self) -> None:
        """Serve until cancelled; serve again what is removed by somebody else."""
        while True:
            try:
                await self._serve_once()
            except OSError as error:
                self.status.registered = False
                self.status.problem = describe_error(error)
                if self._logged.is_new(self._socket, self.status.problem):
                    log.error("dra sockets failed", error=self.status.problem)
                await anyio.sleep(self._timing.poll)

    async def _serve_once(self) -> None:
        """Serve until the service's own socket is lost.

        The service comes first: the kubelet calls it as soon as it sees the registration. It goes
        on while the registration is made again.
        """
        await self._wait_for_others()
        calls = StreamingCalls()
        async with _socket_at(self._endpoint, self._methods(calls), calls) as served:
            while served():
                await self._wait_for_others()
                registration = self._registration_methods()
                async with _socket_at(self._socket, registration, StreamingCalls()) as offered:
                    log.info("dra driver served", driver=self._driver, socket=str(self._socket))
                    while served() and offered():  # noqa: ASYNC110 - of files
                        await anyio.sleep(self._timing.poll)
                log.warning("dra socket lost", driver=self._driver)

    async def _wait_for_others(self) -> None:
        """Wait while another process serves a driver of this name for the kubelet.

        None of ours does so meanwhile. Another daemon has our endpoint too: each would remove the
        other's sockets, for ever.
        """
        while (other := await self._find_other()) is not None:
            self.status.registered = False
            self.status.problem = (
                f"{other} as the driver {self._driver} of this kubelet; stop it, or give this one "
                "another name by `dra.driver`"
            )
            if self._logged.is_new("other", other):
                log.error("competing dra driver found", problem=self.status.problem)
            await anyio.sleep(self._timing.poll)

    async def _find_other(self) -> str | None:
        """Return who answers on our registration socket, and with which endpoint."""
        try:
            method = f"{_PATH}GetInfo"
            answer = await call_raw(self._socket, method, b"", self._timing.answer)
            process = await to_thread.run_sync(_listening_process, self._socket)
        except (OSError, GRPCError, StreamTerminatedError):
            return None  # there is none, or its daemon has ended
        try:
            check_message(answer, {})
            endpoint = pb.PluginInfo.parse(answer).endpoint
        except Exception as error:  # noqa: BLE001 - the generated class has no error of its own
            log.warning(
                "dra socket of no driver",
                socket=str(self._socket),
                error=f"its answer is not a PluginInfo: {describe_error(error)}",
                effect="metagpu serves there now",
            )
            return None
        return f"{process} serves {endpoint}"

    def _registration_methods(self) -> Mapping[str, Method]:
        calls = {"GetInfo": self._get_info, "NotifyRegistrationStatus": self._notify}
        return {f"{_PATH}{name}": unary_method(call) for name, call in calls.items()}

    async def _get_info(self, _: bytes) -> bytes:
        return bytes(
            pb.PluginInfo(
                type=_TYPE,
                name=self._driver,
                endpoint=str(self._endpoint),
                supported_versions=list(self._services),
            )
        )

    async def _notify(self, request: bytes) -> bytes:
        said = pb.RegistrationStatus.parse(request)
        self.status.registered, self.status.problem = said.plugin_registered, said.error
        if said.plugin_registered:
            log.info("dra driver registered", driver=self._driver)
            self._on_registered()
        else:
            log.error("dra driver refused", driver=self._driver, error=said.error)
        return bytes(pb.RegistrationStatusResponse())


def _listening_process(path: Path) -> str:
    """Return the process that listens on a socket, for people.

    Raises:
        OSError: none does.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMING.answer)
        connection.connect(str(path))
        size = _CREDENTIALS.size
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = _CREDENTIALS.unpack(found)
    return f"process {pid}" if pid else "a process of another pid namespace"


@asynccontextmanager
async def _socket_at(
    path: Path, methods: Mapping[str, Method], calls: StreamingCalls
) -> AsyncIterator[Callable[[], bool]]:
    """Serve at a path; the block gets a check of whether the file is still there.

    Raises:
        OSError: the socket cannot be made.
    """
    await to_thread.run_sync(_make_way, path)
    async with serve_grpc(path, methods, calls):
        identity = file_identity(path)
        yield lambda: file_identity(path) == identity


def _make_way(path: Path) -> None:
    """Make the folder of a socket, and remove the socket of a daemon that was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)

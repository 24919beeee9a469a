"""The gRPC transport of the simulated kubelet: its servers, and its plugin client.

Both ends can vanish as a dead process does, which grpclib's own closing does not do: grpclib leaves
open streams and connections as they are.
"""

import asyncio
import contextlib
import os
import socket
import stat
import weakref
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from anyio import to_thread
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server

from metagpu.plugins.kubelet.grpc_client import UnixChannel, call_alone
from metagpu.plugins.kubelet.grpc_server import stop_accepting
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.pods import DeviceError

if TYPE_CHECKING:
    from grpclib._typing import IServable

RECEIVE_LIMIT = 4 * 1024 * 1024  # grpc-go's default; the kubelet does not change it
BACKLOG = 4096  # Go's; asyncio takes a connect to a full unix socket for a success, and then fails
BACK_OFF = 1.0  # grpc-go's first pause between two attempts to connect


# ---- serving -------------------------------------------------------------------------------


class AbortableServer(Server):
    """A gRPC server on one unix socket that can drop every connection at once."""

    def __init__(self, services: "list[IServable]") -> None:
        super().__init__(services)
        self._protocols = weakref.WeakSet[H2Protocol]()
        self._listener: socket.socket | None = None

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self._protocols.add(protocol)
        return protocol

    async def open(self, path: Path, *, wipe: Path | None = None) -> None:
        """Replace the file at `path` by a listening socket and serve there.

        With `wipe`, all sockets directly in that directory are deleted first, `path` before the
        others, as the kubelet does at its start (§2): regular files and sub-directories stay.

        Raises:
            OSError: the socket cannot be bound; paths are limited to 107 bytes.
        """
        self._listener = await to_thread.run_sync(_listen, path, wipe)
        await self.start(sock=self._listener, backlog=BACKLOG)

    async def abort(self) -> None:
        """Stop as by SIGKILL: no call is answered any more and the socket file stays."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await stop_accepting(listener)
        self.close()
        for protocol in list(self._protocols):
            _abort(protocol)
        await self.wait_closed()


def _listen(path: Path, wipe: Path | None) -> socket.socket:
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for other in wipe.iterdir() if wipe is not None else ():
        with contextlib.suppress(FileNotFoundError):  # its owner may delete it too
            if stat.S_ISSOCK(other.stat().st_mode):
                other.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _abort(protocol: H2Protocol) -> None:
    if not protocol.connection.is_closing():
        protocol.connection._transport.abort()  # noqa: SLF001  grpclib offers a polite end only
    protocol.processor.close()


# ---- calling -------------------------------------------------------------------------------


class _GreetingProtocol(H2Protocol):
    """A client connection that notices the server's first frame, or its end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.greeted = asyncio.Event()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.greeted.set()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.greeted.set()


class _LocalChannel(UnixChannel):
    """A channel with the kubelet's `:authority: localhost` (§1.2)."""

    def _get_authority(self, host: str, port: int) -> str:  # noqa: ARG002  grpclib's signature
        return "localhost"

    def _protocol_factory(self) -> H2Protocol:
        plain = super()._protocol_factory()
        return _GreetingProtocol(plain.handler, plain.config, plain.h2_config)

    async def greet(self) -> None:
        """Connect and wait for the server's first frame, as grpc-go does.

        Raises:
            OSError: no server listens, or the server hung up.
        """
        protocol = cast("_GreetingProtocol", await self.__connect__())
        await protocol.greeted.wait()
        if not self._connected:
            raise ConnectionResetError


class _LimitedCodec(ProtoCodec):
    """A codec that refuses messages over grpc-go's receive limit (§1.2).

    A refusal ends the stream.
    """

    def decode(self, data: bytes, message_type: Any) -> Any:  # noqa: ANN401  grpclib's signature
        if len(data) > RECEIVE_LIMIT:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"grpc: received message larger than max ({len(data)} vs. {RECEIVE_LIMIT})",
            )
        return super().decode(data, message_type)


class PluginClient:
    """The kubelet's client of one registered device plugin socket.

    Every call raises DeviceError with the text of grpc-go, and has no deadline without a `timeout`
    argument.
    """

    def __init__(self, resource: str, path: str) -> None:
        self.resource = resource
        self.path = path
        self._channel = _LocalChannel(Path(path), _LimitedCodec())
        self._closed = False
        self._stub = v1beta1.DevicePluginStub(self._channel)

    async def dial(self, timeout: float) -> None:  # noqa: ASYNC109  it becomes an error of ours
        """Connect; retry until a server answers.

        Raises:
            DeviceError: no server answered in time.
        """
        try:
            async with asyncio.timeout(timeout):
                while True:
                    with contextlib.suppress(OSError):
                        return await self._channel.greet()
                    await asyncio.sleep(BACK_OFF)
        except TimeoutError:
            raise DeviceError("failed to dial device plugin: context deadline exceeded") from None

    async def options(self) -> v1beta1.DevicePluginOptions:
        """Call GetDevicePluginOptions."""
        with self._calling():
            return await call_alone(self._stub.get_device_plugin_options())

    async def lists(self) -> AsyncGenerator[list[v1beta1.Device], None]:
        """Call ListAndWatch; end when the stream does, however it does."""
        with contextlib.suppress(DeviceError), self._calling():
            stream = cast(
                "AsyncGenerator[v1beta1.ListAndWatchResponse, None]", self._stub.list_and_watch()
            )
            async with contextlib.aclosing(stream) as messages:
                async for message in messages:
                    yield message.devices

    async def prefer(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Call GetPreferredAllocation; no response means no preference."""
        question = v1beta1.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        request = v1beta1.PreferredAllocationRequest(container_requests=[question])
        with self._calling():
            answer = await call_alone(self._stub.get_preferred_allocation(request))
        return answer.container_responses[0].device_i_ds if answer.container_responses else []

    async def allocate(self, ids: list[str]) -> list[v1beta1.ContainerAllocateResponse]:
        """Call Allocate for one container."""
        container = v1beta1.ContainerAllocateRequest(devices_ids=ids)
        with self._calling():
            request = v1beta1.AllocateRequest(container_requests=[container])
            answer = await call_alone(self._stub.allocate(request))
        return answer.container_responses

    async def pre_start(self, ids: list[str], timeout: float) -> None:  # noqa: ASYNC109  on the wire
        """Call PreStartContainer with a deadline."""
        with self._calling():
            request = v1beta1.PreStartContainerRequest(devices_ids=ids)
            await call_alone(self._stub.pre_start_container(request, timeout=timeout))

    def close(self) -> None:
        """Close all calls and the connection; later calls fail. May be repeated."""
        self._closed = True
        self._channel.close()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        if self._closed:  # otherwise grpclib would connect again
            raise _closing()
        try:
            with _as_go():
                yield
        except DeviceError as error:
            raise self._explain(error) from error.__cause__

    def _explain(self, error: DeviceError) -> DeviceError:
        # grpclib has one exception for a connection lost and one that we have closed.
        ended = isinstance(error.__cause__, StreamTerminatedError)
        return _closing() if ended and self._closed else error


@contextlib.contextmanager
def _as_go() -> Iterator[None]:
    """Turn grpclib's errors into the texts of grpc-go."""
    try:
        yield
    except GRPCError as error:
        raise _rpc_error(_go_name(error.status), error.message or "") from error
    except TimeoutError as error:
        raise _rpc_error("DeadlineExceeded", "context deadline exceeded") from error
    except StreamTerminatedError as error:
        if str(error).startswith("Stream reset"):
            code = str(error).rpartition(" ")[2]
            text = f"stream terminated by RST_STREAM with error code: {code}"
            raise _rpc_error("Internal", text) from error
        raise _rpc_error("Unavailable", "error reading from server: EOF") from error
    except OSError as error:
        text = f'connection error: desc = "transport: {os.strerror(error.errno or 0)}"'
        raise _rpc_error("Unavailable", text) from error


def _rpc_error(code: str, text: str) -> DeviceError:
    return DeviceError(f"rpc error: code = {code} desc = {text}")


def _closing() -> DeviceError:
    return _rpc_error("Canceled", "grpc: the client connection is closing")


def _go_name(status: Status) -> str:
    if status is Status.CANCELLED:
        return "Canceled"
    return "OK" if status is Status.OK else status.name.title().replace("_", "")

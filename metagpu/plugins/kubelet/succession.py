"""The first registrations of a daemon that takes over from another one.

A kubelet up to v1.36 knows plugins by resource name alone: the end of the old daemon's list
disconnects the new plugin if that has registered, and marks all devices unhealthy if it has not. A
registration that fails makes the kubelet forget the old plugin, whose end then has no effect; its
devices, and its connection for calls, stay until the next registration
(docs/development/kubelet.md §1.4). So each resource is registered in three steps: one registration
that fails, the end of the old list, the new registration. In between, the kubelet counts the old
list's devices, and its calls go to the old daemon, which forwards them.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import anyio
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError

from metagpu.core.errors import KubeletError, TakeoverFailed
from metagpu.core.model.shares import ResourceName
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, serve_grpc
from metagpu.plugins.kubelet.messages import build_register_request
from metagpu.plugins.kubelet.registration import RegistrationLease

if TYPE_CHECKING:
    from grpclib.server import Stream

_OPTIONS: Final = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
_REASON: Final = "metagpu takes over from an older daemon; its registration follows"


class OldDaemon(Protocol):
    """The kubelet's side of the daemon that is about to end.

    Both functions raise `TakeoverFailed` if it does not do so.
    """

    async def expect_detach(self) -> None:
        """Report that the kubelet is about to forget its plugins, before it does."""
        ...

    async def end_lists(self, sockets: Mapping[ResourceName, Path]) -> None:
        """Make it forward its calls to these sockets, and end its lists."""
        ...


class Succession:
    """Registers the resources of an old daemon without a gap.

    Attributes:
        failure: why the old daemon goes on, `None` as long as it does not. No resource of it is
            registered from then on.

    Args:
        resources: those that the kubelet has from the old daemon, and the new one offers.
        old: the old daemon.
    """

    def __init__(self, resources: Collection[ResourceName], old: OldDaemon) -> None:
        self.resources = frozenset(resources)
        self._old = old
        self._sockets: dict[ResourceName, Path] = {}
        self._detaching = anyio.Lock()
        self._expected = False
        self._ended = anyio.Event()
        self.failure: TakeoverFailed | None = None

    def is_due(self, resource: ResourceName) -> bool:
        """Return whether the old daemon still has a resource."""
        return resource in self.resources and not self._ended.is_set()

    async def wait_turn(
        self,
        directory: KubeletDirectory,
        resource: ResourceName,
        path: Path,
        lease: RegistrationLease,
    ) -> None:
        """Wait until a resource that is served at `path` can be registered without a gap.

        That is never, once the old daemon goes on.

        Raises:
            OSError: the connection to the kubelet breaks.
            StreamTerminatedError: likewise.
        """
        if not self.is_due(resource):
            return
        try:
            await self._expect_detach()
            await _fail_to_register(directory, resource, lease)
            self._sockets[resource] = path
            if self._sockets.keys() == self.resources:
                await self._old.end_lists(self._sockets)
                self._ended.set()
        except TakeoverFailed as error:
            self.failure = error
            await anyio.sleep_forever()
        await self._ended.wait()

    async def _expect_detach(self) -> None:
        async with self._detaching:
            if self.failure is not None:
                raise self.failure
            if not self._expected:
                await self._old.expect_detach()
                self._expected = True


async def _fail_to_register(
    directory: KubeletDirectory, resource: ResourceName, lease: RegistrationLease
) -> None:
    """Make the kubelet forget a resource's plugin, by a registration that fails."""

    async def refuse(stream: "Stream[bytes, bytes]") -> None:
        await stream.recv_message()
        raise GRPCError(Status.FAILED_PRECONDITION, _REASON)

    path = directory.new_socket_path(resource)
    methods = {_OPTIONS: Method(refuse, Cardinality.UNARY_UNARY, bytes, bytes)}
    async with serve_grpc(path, methods, StreamingCalls(), linger=0):
        with suppress(KubeletError):
            await lease.register(build_register_request(resource, path.name, pre_start=False))

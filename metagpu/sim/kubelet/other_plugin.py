"""Another device plugin, which registers a resource name with a kubelet and ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoint import RegistrationClient
from metagpu.plugins.kubelet.messages import build_register_request
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.transport import AbortableServer


class _Service(v1beta1.DevicePluginBase):
    """A plugin with a list that never changes."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.listed = anyio.Event()
        self._ids = ids

    async def get_device_plugin_options(
        self, message: v1beta1.Empty
    ) -> v1beta1.DevicePluginOptions:
        del message
        return v1beta1.DevicePluginOptions()

    async def list_and_watch(
        self, message: v1beta1.Empty
    ) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        del message
        devices = [v1beta1.Device(id=share_id, health="Healthy") for share_id in self._ids]
        yield v1beta1.ListAndWatchResponse(devices=devices)
        self.listed.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def other_plugin(folder: Path, resource: str, ids: Sequence[str]) -> AsyncIterator[None]:
    """Register a resource with a folder's kubelet; end with the block, as if killed.

    Raises:
        KubeletError: the kubelet refuses.
        OSError: the kubelet cannot be reached.
    """
    service, socket = _Service(ids), folder / "other-plugin.sock"
    server = AbortableServer([service])
    await server.open(socket)
    try:
        lease = await RegistrationClient(KubeletDirectory(folder)).acquire()
        try:
            await lease.register(build_register_request(resource, socket.name, pre_start=False))
        finally:
            lease.close()
        await service.listed.wait()
        yield
    finally:
        await server.abort()
        socket.unlink(missing_ok=True)

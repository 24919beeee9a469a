"""Registration, and the streams of registered plugins (kubelet.md §1.2-§1.4)."""

import asyncio
import contextlib
import os.path
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.device_manager import DeviceManagerState
from metagpu.sim.kubelet.pods import DeviceError
from metagpu.sim.kubelet.transport import PluginClient

VERSION = "v1beta1"
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_LIMIT = 253
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_NAME_LIMIT = 63


def is_extended_resource(name: str) -> bool:
    """Return whether the kubelet accepts a resource name (§1.3)."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    domain, _, rest = f"requests.{name}".partition("/")
    return (
        len(domain) <= _SUBDOMAIN_LIMIT
        and _SUBDOMAIN.fullmatch(domain) is not None
        and len(rest) <= _NAME_LIMIT
        and _NAME.fullmatch(rest) is not None
    )


class KubeletStats:
    """Statistics by resource name, over all processes, and a way to wait for changes."""

    def __init__(self) -> None:
        self.registrations: Counter[str] = Counter()
        self.lists: Counter[str] = Counter()
        self.open_streams: Counter[str] = Counter()
        self.refusals: list[str] = []
        self._changed = anyio.Event()

    def changed(self) -> None:
        """Wake all waiting tasks."""
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for(self, predicate: Callable[[], bool], *, within: float) -> None:
        """Wait until the predicate holds; every change evaluates it again.

        Raises:
            TimeoutError: the predicate did not hold in time.
        """
        with anyio.fail_after(within):
            while not predicate():
                await self._changed.wait()


class RegistrationService(v1beta1.RegistrationBase):
    """The Registration service of one kubelet process, and its streams.

    Clients are kept by resource name as in v1.36, from which three hazards follow (§1.4): the end
    of an old stream disconnects the newest client; a failed registration makes the kubelet forget
    the good client of that name, whose end then goes unnoticed; nothing is ever retried. With
    `fixed_clashes` they are kept by name and socket path, as upstream's PR #135437 does.
    """

    def __init__(
        self,
        state: DeviceManagerState,
        directory: Path,
        stats: KubeletStats,
        *,
        save: Callable[[], Awaitable[None]],
        dial_timeout: float,
        fixed_clashes: bool,
    ) -> None:
        self._state = state
        self._directory = directory
        self._stats = stats
        self._save = save
        self._dial_timeout = dial_timeout
        self._fixed_clashes = fixed_clashes
        self._clients: dict[tuple[str, str], PluginClient] = {}
        self._plugins: set[PluginClient] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._ended = False

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """Register a plugin: check, dial back, read its options, open its list, answer.

        Raises:
            GRPCError: always UNKNOWN; the message states the reason.
        """
        try:
            _check(message)
            await self._connect(message)
        except DeviceError as error:
            self._stats.refusals.append(str(error))
            self._stats.changed()
            raise GRPCError(Status.UNKNOWN, str(error)) from error
        return v1beta1.Empty()

    async def _connect(self, message: v1beta1.RegisterRequest) -> None:
        path = _join(self._directory, message.endpoint)
        plugin = PluginClient(message.resource_name, path)
        self._plugins.add(plugin)
        key = (plugin.resource, path if self._fixed_clashes else "")
        self._clients[key] = plugin
        try:
            await plugin.dial(self._dial_timeout)
            options = await _options(plugin)
        except (DeviceError, asyncio.CancelledError):
            # Another client may be registered under this key by now: the first hazard of a failure.
            self._clients.pop(key, None)
            self._close(plugin)
            raise
        self._state.set_endpoint(plugin.resource, plugin, options)
        self._stats.registrations[plugin.resource] += 1
        task = asyncio.create_task(self._follow(key, plugin))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        self._stats.changed()

    async def _follow(self, key: tuple[str, str], plugin: PluginClient) -> None:
        """Read a plugin's device lists until its stream ends; never retry."""
        resource = plugin.resource
        self._stats.open_streams[resource] += 1
        self._stats.changed()
        try:
            async with contextlib.aclosing(plugin.lists()) as lists:
                async for devices in lists:
                    self._state.replace_devices(resource, devices)
                    self._stats.lists[resource] += 1  # with the devices, before anybody else runs
                    await self._save()
                    self._stats.changed()
        finally:
            self._stats.open_streams[resource] -= 1
        if not self._ended:
            self._disconnect(key)
        self._stats.changed()

    def _disconnect(self, key: tuple[str, str]) -> None:
        # Looked up by key: it may be another client than the one whose stream has ended. And
        # when a failed registration took the entry away, nobody is disconnected at all.
        client = self._clients.pop(key, None)
        if client is None:
            return
        self._close(client)
        endpoint = self._state.endpoints.get(client.resource)
        if not self._fixed_clashes or (endpoint is not None and endpoint.plugin is client):
            self._state.stop_endpoint(client.resource)

    def _close(self, plugin: PluginClient) -> None:
        self._plugins.discard(plugin)
        plugin.close()

    async def close_plugins(self) -> None:
        """Close all connections to plugins, as the death of the process does."""
        self._ended = True
        for plugin in list(self._plugins):
            self._close(plugin)
        await asyncio.gather(*self._streams)


def _check(message: v1beta1.RegisterRequest) -> None:
    if message.version != VERSION:
        raise DeviceError(
            f'requested API version "{message.version}" is not supported by kubelet. '
            f'Supported version is ["{VERSION}"]'
        )
    if not is_extended_resource(message.resource_name):
        raise DeviceError(f'the ResourceName "{message.resource_name}" is invalid')


def _join(directory: Path, endpoint: str) -> str:
    """Join paths as Go's filepath.Join; an absolute endpoint is below too."""
    return os.path.normpath(f"{directory}/{endpoint}")


async def _options(plugin: PluginClient) -> v1beta1.DevicePluginOptions:
    try:
        return await plugin.options()
    except DeviceError as error:
        raise DeviceError(f"failed to get device plugin options: {error}") from error

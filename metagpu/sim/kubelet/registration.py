"""Registration, and the life of what was registered (kubelet.md §1.2-§1.4)."""

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

from metagpu.plugins.pb import v1beta1
from metagpu.sim.kubelet.ledger import Ledger
from metagpu.sim.kubelet.pods import DeviceError
from metagpu.sim.kubelet.wire import Plugin

VERSION = "v1beta1"
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_LIMIT = 253
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_NAME_LIMIT = 63


def is_extended_resource(name: str) -> bool:
    """Tell whether the kubelet takes a resource name (§1.3)."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    domain, _, rest = f"requests.{name}".partition("/")
    return (
        len(domain) <= _SUBDOMAIN_LIMIT
        and _SUBDOMAIN.fullmatch(domain) is not None
        and len(rest) <= _NAME_LIMIT
        and _NAME.fullmatch(rest) is not None
    )


class Tally:
    """What happened so far, by resource name, over all lifetimes; and a way to await more."""

    def __init__(self) -> None:
        self.registrations: Counter[str] = Counter()
        self.lists: Counter[str] = Counter()
        self.open_streams: Counter[str] = Counter()
        self.refusals: list[str] = []
        self._changed = anyio.Event()

    def changed(self) -> None:
        """Wake everyone who waits."""
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for(self, predicate: Callable[[], bool], *, within: float) -> None:
        """Wait until the predicate holds; it is asked after every change.

        Raises:
            TimeoutError: it did not hold in time.
        """
        with anyio.fail_after(within):
            while not predicate():
                await self._changed.wait()


class Registration(v1beta1.RegistrationBase):
    """The Registration service of one kubelet lifetime, and its streams.

    Clients are kept by resource name as in v1.36, from which three hazards follow (§1.4): the end
    of an old stream disconnects the newest client; a failed registration makes the kubelet forget
    the good client of that name, whose end then goes unnoticed; nothing is ever retried. With
    `fixed_clashes` they are kept by name and socket path, as upstream's PR #135437 does.
    """

    def __init__(
        self,
        ledger: Ledger,
        directory: Path,
        tally: Tally,
        *,
        save: Callable[[], Awaitable[None]],
        dial_timeout: float,
        fixed_clashes: bool,
    ) -> None:
        self._ledger = ledger
        self._directory = directory
        self._tally = tally
        self._save = save
        self._dial_timeout = dial_timeout
        self._fixed_clashes = fixed_clashes
        self._clients: dict[tuple[str, str], Plugin] = {}
        self._plugins: set[Plugin] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._ended = False

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """Take a plugin: check, dial back, ask for its options, open its list, answer.

        Raises:
            GRPCError: UNKNOWN, always; only the message tells why.
        """
        try:
            _check(message)
            await self._connect(message)
        except DeviceError as error:
            self._tally.refusals.append(str(error))
            self._tally.changed()
            raise GRPCError(Status.UNKNOWN, str(error)) from error
        return v1beta1.Empty()

    async def _connect(self, message: v1beta1.RegisterRequest) -> None:
        path = _join(self._directory, message.endpoint)
        plugin = Plugin(message.resource_name, path)
        self._plugins.add(plugin)
        key = (plugin.resource, path if self._fixed_clashes else "")
        self._clients[key] = plugin
        try:
            await plugin.dial(self._dial_timeout)
            options = await _options(plugin)
        except (DeviceError, asyncio.CancelledError):
            # Whoever is registered under this key by now: the first hazard of a failed try.
            self._clients.pop(key, None)
            self._close(plugin)
            raise
        self._ledger.connected(plugin.resource, plugin, options)
        self._tally.registrations[plugin.resource] += 1
        task = asyncio.create_task(self._follow(key, plugin))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        self._tally.changed()

    async def _follow(self, key: tuple[str, str], plugin: Plugin) -> None:
        """Read a plugin's list until its stream ends; never try again."""
        resource = plugin.resource
        self._tally.open_streams[resource] += 1
        self._tally.changed()
        try:
            async with contextlib.aclosing(plugin.lists()) as lists:
                async for devices in lists:
                    self._ledger.received(resource, devices)
                    await self._save()
                    self._tally.lists[resource] += 1
                    self._tally.changed()
        finally:
            self._tally.open_streams[resource] -= 1
        if not self._ended:
            self._disconnect(key)
        self._tally.changed()

    def _disconnect(self, key: tuple[str, str]) -> None:
        # Looked up by key: it may be another client than the one whose stream has ended. And
        # when a failed registration took the entry away, nobody is disconnected at all.
        client = self._clients.pop(key, None)
        if client is None:
            return
        self._close(client)
        endpoint = self._ledger.endpoints.get(client.resource)
        if not self._fixed_clashes or (endpoint is not None and endpoint.plugin is client):
            self._ledger.disconnected(client.resource)

    def _close(self, plugin: Plugin) -> None:
        self._plugins.discard(plugin)
        plugin.close()

    async def vanish(self) -> None:
        """Drop all connections to plugins, as the death of the process does."""
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
    """Join as Go's filepath.Join does: an absolute endpoint lands below the directory too."""
    return os.path.normpath(f"{directory}/{endpoint}")


async def _options(plugin: Plugin) -> v1beta1.DevicePluginOptions:
    try:
        return await plugin.options()
    except DeviceError as error:
        raise DeviceError(f"failed to get device plugin options: {error}") from error

"""A device plugin in forty lines, and a kubelet to register it with."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint
from grpclib.client import Channel

from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.kubelet import SimContainer, SimKubelet, SimPod
from metagpu.sim.kubelet.transport import AbortableServer

GPU = "example.com/gpu"
NIC = "example.com/nic"


def device(name: str, *nodes: int, health: str = "Healthy") -> v1beta1.Device:
    """Create a device; without nodes the device has no topology at all."""
    numa = [v1beta1.NumaNode(id=node) for node in nodes]
    topology = v1beta1.TopologyInfo(nodes=numa) if nodes else None
    return v1beta1.Device(id=name, health=health, topology=topology)


def devices(names: str, *nodes: int) -> list[v1beta1.Device]:
    """Create healthy devices from names with blanks between."""
    return [device(name, *nodes) for name in names.split()]


def pod(name: str, *containers: tuple[str, int], init: Iterable[SimContainer] = ()) -> SimPod:
    """Return a pod of containers that ask for GPUs."""
    return SimPod(
        name,
        uid=f"uid-{name}",
        containers=tuple(SimContainer(container, {GPU: count}) for container, count in containers),
        init_containers=tuple(init),
    )


def wrapped(text: str) -> str:
    """Return the pod's message for an error of the device manager."""
    return f"Allocate failed due to {text}, which is unexpected"


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def dice(seed: int) -> random.Random:
    """Return repeatable random numbers."""
    return random.Random(seed)  # noqa: S311  chance, not secrets


class Door(Protocol):
    """A kubelet at which plugins register."""

    socket: Path


class FakePlugin(v1beta1.DevicePluginBase):
    """A plugin that does as the test wants; `refusal`, when set, is its answer."""

    def __init__(
        self,
        resource: str,
        listed: list[v1beta1.Device],
        *,
        prefer: Callable[[v1beta1.ContainerPreferredAllocationRequest], list[str]] | None = None,
        pre_start: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.resource = resource
        self.listed = listed
        self.options = v1beta1.DevicePluginOptions(
            pre_start_required=pre_start is not None,
            get_preferred_allocation_available=prefer is not None,
        )
        self.endpoint = ""
        self.refusal: Exception | None = None
        self.list_refusal: Exception | None = None
        self.options_asked = 0
        self.calls: list[str] = []
        self.questions: list[v1beta1.ContainerPreferredAllocationRequest] = []
        self.allocations: list[list[str]] = []
        self.pre_started: list[list[str]] = []
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        self.answers = 1
        self.padding = ""
        self.is_bare = False
        self.streams: list[asyncio.Queue[list[v1beta1.Device] | None]] = []
        self.cancelled = anyio.Event()
        self._prefer = prefer
        self._pre_start = pre_start

    def send(self, *listed: v1beta1.Device) -> None:
        """Send a new list on every open stream."""
        self.listed = list(listed)
        for stream in self.streams:
            stream.put_nowait(self.listed)

    def hang_up(self) -> None:
        """End every stream; the server keeps running."""
        for stream in self.streams:
            stream.put_nowait(None)

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def get_device_plugin_options(
        self,
        message: v1beta1.Empty,  # noqa: ARG002
    ) -> v1beta1.DevicePluginOptions:
        """Return the options."""
        self.calls.append("get_device_plugin_options")
        self.options_asked += 1
        self._refuse()
        return self.options

    async def list_and_watch(
        self,
        message: v1beta1.Empty,  # noqa: ARG002
    ) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        """Send the current list, then every list that `send` is given."""
        self.calls.append("list_and_watch")
        if self.list_refusal is not None:
            raise self.list_refusal
        queue: asyncio.Queue[list[v1beta1.Device] | None] = asyncio.Queue()
        self.streams.append(queue)
        queue.put_nowait(self.listed)
        try:
            while (listed := await queue.get()) is not None:
                yield v1beta1.ListAndWatchResponse(devices=listed)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.streams.remove(queue)

    async def get_preferred_allocation(
        self, message: v1beta1.PreferredAllocationRequest
    ) -> v1beta1.PreferredAllocationResponse:
        """Return the answer that the test wants."""
        self.calls.append("get_preferred_allocation")
        self._refuse()
        (question,) = message.container_requests
        self.questions.append(question)
        assert self._prefer is not None
        answer = v1beta1.ContainerPreferredAllocationResponse(device_i_ds=self._prefer(question))
        return v1beta1.PreferredAllocationResponse(container_responses=[answer])

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        """Return an environment variable of its own and one that every plugin gives."""
        self.calls.append("allocate")
        (request,) = message.container_requests
        self.allocations.append(request.devices_ids)
        if self.before_answer is not None:
            await self.before_answer()
        self._refuse()
        variable = self.resource.partition("/")[2].upper()
        answer = v1beta1.ContainerAllocateResponse(
            envs={
                variable: ",".join(sorted(request.devices_ids)),
                "LAST": variable,
                "PAD": self.padding,
            },
            mounts=[v1beta1.Mount(container_path="/shared", host_path=f"/{variable}")],
            devices=[v1beta1.DeviceSpec(container_path=f"/dev/{variable}", permissions="rw")],
            cdi_devices=[v1beta1.CdiDevice(name="example.com/all=all")],
        )
        if self.is_bare:  # a real container starts with it
            answer = v1beta1.ContainerAllocateResponse(envs={"GPU": answer.envs[variable]})
        return v1beta1.AllocateResponse(container_responses=[answer] * self.answers)

    async def pre_start_container(
        self, message: v1beta1.PreStartContainerRequest
    ) -> v1beta1.PreStartContainerResponse:
        """Record the ids, then do as the test wants."""
        self.pre_started.append(message.devices_ids)
        self._refuse()
        assert self._pre_start is not None
        await self._pre_start()
        return v1beta1.PreStartContainerResponse()

    @asynccontextmanager
    async def serving(
        self, directory: Path, endpoint: str = "p.sock"
    ) -> AsyncIterator[AbortableServer]:
        """Serve on a socket until the block ends; vanish at its end, or before."""
        self.endpoint = endpoint
        door = AbortableServer([self])
        await door.open(directory / endpoint)
        try:
            yield door
        finally:
            await door.abort()

    @asynccontextmanager
    async def registered(
        self, kubelet: SimKubelet, endpoint: str = "p.sock"
    ) -> AsyncIterator[AbortableServer]:
        """Serve, register, and wait for the kubelet to have the first list."""
        before = kubelet.lists[self.resource]
        async with self.serving(kubelet.directory, endpoint) as door:
            await self.register(kubelet)
            await kubelet.wait_for(lambda: kubelet.lists[self.resource] > before)
            yield door

    async def register(
        self, kubelet: Door, *, version: str = "v1beta1", resource: str | None = None
    ) -> None:
        """Call Register once."""
        async with Channel(path=str(kubelet.socket)) as channel:
            await v1beta1.RegistrationStub(channel).register(
                v1beta1.RegisterRequest(
                    version=version,
                    endpoint=self.endpoint,
                    resource_name=self.resource if resource is None else resource,
                )
            )


async def dials(kubelet: SimKubelet, plugins: int = 1) -> None:
    """Wait until the kubelet has dialled so many plugins that still serve."""
    with anyio.fail_after(30):
        while not (life := kubelet._process) or len(life.registration._plugins) < plugins:
            await checkpoint()
    await anyio.wait_all_tasks_blocked()

"""A node for the tests of `plugins/`: our endpoints, a registry, a simulated kubelet.

The GPUs are facts that the test applies, so that nothing but the kubelet's side is at work.
"""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
from grpclib.client import Channel

from metagpu.core.config.config import parse
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import GpuFaulted, GpuRecovered, GpusFound
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoints import serve_offers
from metagpu.plugins.kubelet.granting import EnsureCdiNames, no_cdi
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod

METAGPU = "cnvrg.io/metagpu"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CONFIG = """
version: metagpu/v1
pools:
  - name: all
    backends:
      - backend: fraction
        sharesPerGpu: 10
"""
OFFER_ALL = CONFIG + "        offer: all\n"
RESOURCES = ("example.com/a", "example.com/b", "example.com/c", "example.com/d")
FOUR_RESOURCES = "version: metagpu/v1\npools:\n" + "".join(
    f"  - name: p{n}\n    gpus: {{index: {n}}}\n"
    f"    backends: [{{backend: fraction, resource: {name}}}]\n"
    for n, name in enumerate(RESOURCES)
)


def gpu(index: int, *, numa_node: int | None = None) -> Gpu:
    """Build a GPU of 40 GiB with a uuid that its index gives."""
    return Gpu(
        id=GpuId(f"GPU-{UUID(int=index)}"),
        index=index,
        name="NVIDIA A100-SXM4-40GB",
        memory=40960 * MIB,
        minor=index,
        numa_node=numa_node,
    )


@dataclass
class Node:
    """The node under test; `kubelet` is not running until the test enters `kubelet.running()`."""

    kubelet: SimKubelet
    registry: Registry = field(default_factory=Registry)
    layout: Layout = field(default_factory=lambda: Layout((), {}, ()))
    record: KubeletCallStats = field(default_factory=KubeletCallStats)

    @property
    def directory(self) -> Path:
        """Return the device-plugins folder."""
        return self.kubelet.directory

    def find(self, *gpus: Gpu) -> None:
        """Apply the fact that NVML finds GPUs."""
        self.registry.apply(GpusFound(gpus, at=0))

    def offer(self, config: str = CONFIG) -> None:
        """Offer the layout of a configuration over the GPUs found."""
        gpus = [state.gpu for state in self.registry.snapshot.gpus.values()]
        self.layout = build_layout(parse(config, "test", installed_backends()), gpus, Injection())
        self.registry.apply(self.layout.offer_fact)

    def fault(self, index: int, reason: str = "XID 79: GPU has fallen off the bus") -> None:
        """Apply a fault of a GPU."""
        self.registry.apply(GpuFaulted(gpu(index).id, reason, at=1))

    def recover(self, index: int) -> None:
        """Apply the recovery of a GPU."""
        self.registry.apply(GpuRecovered(gpu(index).id, "mended", at=2))

    def counts(self, resource: str = METAGPU) -> tuple[int, int]:
        """Return the kubelet's capacity and allocatable; 0 for a resource that it does not know."""
        return (
            self.kubelet.capacity().get(resource, 0),
            self.kubelet.allocatable().get(resource, 0),
        )

    async def until(self, capacity: int, allocatable: int, resource: str = METAGPU) -> None:
        """Wait until the kubelet has these counts."""
        await self.kubelet.wait_for(lambda: self.counts(resource) == (capacity, allocatable))

    def sockets(self) -> list[Path]:
        """List our sockets in the folder."""
        return sorted(self.directory.glob("metagpu-*.sock"))


def pod(name: str, shares: int, resource: str = METAGPU) -> SimPod:
    """Build a pod of one container, `main`."""
    return SimPod.single(name, {resource: shares})


def simulated_kubelet(tmp_path: Path, **settings: Any) -> SimKubelet:  # noqa: ANN401
    """Build a kubelet whose random choices are repeatable."""
    return SimKubelet(
        tmp_path / "device-plugins",
        pod_resources=tmp_path / "pod-resources.sock",
        rng=random.Random(1),  # noqa: S311 - chance, not secrets
        **settings,
    )


@asynccontextmanager
async def node(
    tmp_path: Path,
    *gpus: Gpu,
    config: str = CONFIG,
    kubelet: SimKubelet | None = None,
    make_directory: bool = True,
    ensure_cdi_names: EnsureCdiNames = no_cdi,
    timing: KubeletTiming = TIMING,
) -> AsyncIterator[Node]:
    """Serve a node with these GPUs (two by default) while the block lasts."""
    directory = tmp_path / "device-plugins"
    if make_directory:
        directory.mkdir(mode=0o750, exist_ok=True)
    made = Node(kubelet or simulated_kubelet(tmp_path))
    made.find(*(gpus or (gpu(0), gpu(1))))
    made.offer(config)

    async with anyio.create_task_group() as group:
        group.start_soon(
            partial(
                serve_offers,
                ensure_cdi_names=ensure_cdi_names,
                pod_resources=tmp_path / "pod-resources.sock",
                timing=timing,
            ),
            made.registry,
            KubeletDirectory(directory),
            lambda resource: made.layout.backends[resource],
            made.record,
        )
        yield made
        group.cancel_scope.cancel()


def drop_list(live_node: Node, resource: str = METAGPU) -> None:
    """Close the kubelet's connection to our endpoint, as it does after a broken list."""
    assert live_node.kubelet._process is not None
    live_node.kubelet._process.registration._clients[resource, ""].close()


@asynccontextmanager
async def endpoint_of(live_node: Node) -> AsyncIterator[v1beta1.DevicePluginStub]:
    """Connect to our only endpoint as the kubelet does, beside the kubelet."""
    [socket] = live_node.sockets()

    async with Channel(path=str(socket)) as channel:
        yield v1beta1.DevicePluginStub(channel)


def ids(*slots: tuple[int, int]) -> list[str]:
    """Return the ids of shares named by (GPU index, number)."""
    return [f"{gpu(index).id}::m{number:02d}" for index, number in slots]


async def allocate(
    stub: v1beta1.DevicePluginStub, *containers: Sequence[str]
) -> list[v1beta1.ContainerAllocateResponse]:
    """Ask for shares, a list of ids for each container."""
    requests = [v1beta1.ContainerAllocateRequest(devices_ids=list(wanted)) for wanted in containers]
    answer = await stub.allocate(v1beta1.AllocateRequest(container_requests=requests))
    return answer.container_responses

"""The whole agent on a simulated node with a simulated kubelet, in the test's own loop."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
from msgspec.structs import replace

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.paths import AgentPaths
from metagpu.agent.timing import AgentTiming
from metagpu.core.contracts.host import Host
from metagpu.core.contracts.programs import Programs
from metagpu.core.health.watch import DEFAULT_TIMING, HealthTiming
from metagpu.core.model.driver_roots import RootOptions
from metagpu.core.model.offers import Api
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.reports.reading import ReportPart, plain_report
from metagpu.core.state.events import Event
from metagpu.core.usage.timing import UsageTiming
from metagpu.host.daemons import HostDaemons
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ClusterSettings
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.plugins.metrics.sources import MetricsTiming
from metagpu.sim.kubelet.kubelet import SimKubelet
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.programs import SimPrograms, sim_daemons
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE

TIMING = KubeletTiming(settle=0.02, contended_period=0.05)
"""Of the kubelet's side, unless a test gives its own."""
METAGPU = "cnvrg.io/metagpu"
QUICK = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: all
    backends: [{backend: fraction, sharesPerGpu: 10}]
"""

FRESH = HttpTiming(page_age=0.0)
"""A new page for each request."""
PATIENT = AgentTiming(first_leases=math.inf)
"""No machine is too slow to read the kubelet's checkpoint before the first list."""
UNHURRIED = MetricsTiming(late_loop=math.inf)
"""No machine is too slow to be healthy."""


@dataclass
class Scene:
    """A running agent, and the hardware and kubelet around it."""

    node: SimNode
    kubelet: SimKubelet
    agent: Agent
    config_file: Path

    def state(self, index: int) -> GpuState:
        """Return the agent's state of a GPU."""
        return list(self.agent.registry.snapshot.gpus.values())[index]

    async def until(self, capacity: int, allocatable: int, resource: str = METAGPU) -> None:
        """Wait until the kubelet has this capacity and allocatable of a resource, and all others.

        Resources are registered one after the other, and the next pod may ask for another one.
        """

        def registered() -> bool:
            counted, usable = self.kubelet.capacity(), self.kubelet.allocatable()
            offers = self.agent.registry.snapshot.offers_of(Api.DEVICE_PLUGIN)
            amounts = counted.get(resource, 0), usable.get(resource, 0)
            return amounts == (capacity, allocatable) and offers.keys() <= counted.keys()

        await self.kubelet.wait_for(registered, within=30)

    async def wait_snapshot(self, predicate: Callable[[Snapshot], bool]) -> None:
        """Wait until the agent's snapshot fulfils a predicate."""
        with anyio.fail_after(30):
            async for snapshot in self.agent.registry.watch(lambda now: now):
                if predicate(snapshot):
                    return

    async def status(self) -> dict[str, Any]:
        """Return the status as JSON has it."""
        return plain_report(cast("ReportPart", await self.agent.commands["status"]({})))

    async def usage(self) -> dict[str, Any]:
        """Return the usage as JSON has it."""
        return plain_report(cast("ReportPart", await self.agent.commands["usage"]({})))

    async def wait_holders(self) -> None:
        """Wait until the holder of every lease is known."""
        await self.wait_snapshot(
            lambda now: all(i.holder for gpu in now.gpus.values() for i in gpu.leases.values())
        )

    async def next_event(self, *kinds: type[Event]) -> Event:
        """Wait for the next event of one of these kinds."""
        with self.agent.registry.events.subscribe(*kinds) as events, anyio.fail_after(30):
            async for event in events:
                return event
        raise AssertionError


QUICK_USAGE = UsageTiming(idle_period=0.02, recent=0)
"""Timing of the usage service without rests that only spare the processor."""


@asynccontextmanager
async def agent_at_work(
    tmp_path: Path,
    gpu_models: str | SimNode = "a100-40gb:2",
    config: str = QUICK,
    *,
    drivers: bool = True,
    kubelet: SimKubelet | None = None,
    programs: Programs | None = None,
    source: ConfigSource | None = None,
    cluster_settings: ClusterSettings | None = None,
    host: Host | None = None,
    daemons: HostDaemons | None = None,
    driver: NvmlDriver | None = None,
    pod_dir: Path | None = None,
    cdi_dir: Path | None = None,
    metrics: ListenAddress | None = None,
    status_address: ListenAddress | None = None,
    web_address: ListenAddress | None = None,
    timing: AgentTiming | None = None,
    kubelet_timing: KubeletTiming | None = None,
    usage_timing: UsageTiming = QUICK_USAGE,
    health_timing: HealthTiming = DEFAULT_TIMING,
    http_timing: HttpTiming = FRESH,
    metrics_timing: MetricsTiming = UNHURRIED,
) -> AsyncIterator[Scene]:
    """Run an agent while the block lasts, and a kubelet with it unless one is given.

    Args:
        tmp_path: the root of all paths of the agent and the kubelet.
        gpu_models: a node, or a value of `--simulate`.
        config: the text of the configuration file.
        drivers: whether NVML can be used at the start.
        kubelet: a running kubelet; by default one of this agent's own.
        programs: programs of the host.
        source: where the configuration is, if not in a file.
        cluster_settings: the features of the API server.
        host: processes of the host.
        daemons: MPS control daemons, if not stand-ins.
        driver: NVML, if not the simulated one of the node.
        pod_dir: the folder mounted into containers.
        cdi_dir: the folder of the CDI specification.
        metrics: the address of metrics and probes.
        status_address: the address of the status API.
        web_address: the address of the page.
        timing: the agent's timing.
        kubelet_timing: timing towards the kubelet, in place of `timing`'s.
        usage_timing: timing of the usage service.
        health_timing: timing of health checks.
        http_timing: timing of the HTTP servers.
        metrics_timing: timing of monitoring.
    """
    config_file = tmp_path / "metagpu.yaml"
    await anyio.Path(config_file).write_text(config)
    paths = AgentPaths(
        kubelet_root=tmp_path,
        kubelet_dir=tmp_path / "device-plugins",
        pod_resources=tmp_path / "pod-resources.sock",
        run_dir=tmp_path,
        roots=RootOptions(dev=str(tmp_path)),
        pod_dir=pod_dir,
        cdi_dir=cdi_dir,
    )
    node = build_node(gpu_models) if isinstance(gpu_models, str) else gpu_models
    if not drivers:
        node.unload_driver()
    agent = Agent(
        source or ConfigSource((config_file,)),
        driver or NvmlDriver(SimLibrary(node), DEADLINE),
        paths,
        programs=programs or SimPrograms(),
        cluster_settings=cluster_settings,
        daemons=daemons or sim_daemons(),
        host=host,
        metrics=metrics,
        status_address=status_address,
        web_address=web_address,
        timing=replace(
            timing or PATIENT,
            kubelet=kubelet_timing or TIMING,
            usage=usage_timing,
            health=health_timing,
            http=http_timing,
            metrics=metrics_timing,
        ),
    )
    own = SimKubelet(paths.kubelet_dir, pod_resources=paths.pod_resources)

    async with (
        nullcontext(kubelet) if kubelet else own.running() as present,
        anyio.create_task_group() as group,
    ):
        group.start_soon(agent.serve_node)
        yield Scene(node, present, agent, config_file)
        group.cancel_scope.cancel()

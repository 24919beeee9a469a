"""`metagpu demo`: the main features in ten seconds, on simulated nodes.

Fractions: pods start, and one GPU fails. A mixed pool: an idle GPU belongs to the backend of the
first request. MIG: pods' requests create instances, which stay for a while after the pods. Offers:
a pod waits where no GPU has its shares, and is refused where all free shares are on offer. Growth:
a process above its pod's share ends. Claims: the scheduler chooses the device.

Only the hardware and the cluster are simulated: metagpu's agent, pynvml over the simulated NVML,
and gRPC over unix sockets are real.
"""

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
from msgspec import to_builtins
from msgspec.structs import replace

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.agent.paths import AgentPaths
from metagpu.agent.timing import AgentTiming
from metagpu.core.availability.conflict import conflicting_shares, unavailable_shares
from metagpu.core.grants.injection import VISIBLE_DEVICES
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.snapshot import GpuState
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.status import explain_report, lease_reports
from metagpu.core.state.events import PodEnded
from metagpu.display.options import encode
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.demo.cluster import run_claims, run_growth
from metagpu.sim.demo.script import (
    FAULTY_GPU,
    MIG,
    NODE,
    OFFER_POLICIES,
    OFFERS_CONFIG,
    OFFERS_HELD,
    OFFERS_NODE,
    OFFERS_WAITING,
    PODS,
    POOL,
    RESOURCE,
    XID,
    DemoScenario,
)
from metagpu.sim.kubelet.kubelet import AdmissionError, SimKubelet, SimPod
from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.programs import SimPrograms, sim_daemons
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary

SETTLE: Final = 0.05
"""Seconds from a grant to the poll that finds its pod: this kubelet has no rate limit to spare."""


@dataclass(frozen=True)
class DemoNode:
    """A simulated node with its kubelet and metagpu's agent."""

    node: SimNode
    kubelet: SimKubelet
    agent: Agent

    async def status(self) -> dict[str, Any]:
        """Return the agent's status, once the agent knows all holders."""
        await self._wait_for_gpus(lambda _: True)
        snapshot = self.agent.registry.snapshot
        leases: list[dict[str, Any]] = to_builtins(lease_reports(snapshot))
        return {**plain_report(explain_report(snapshot, self.agent.layout)), "leases": leases}

    async def end_pod(self, pod: SimPod) -> None:
        """End a pod, and report its end to the agent as the API server does.

        Only the agent reads PodResources: of two readers, one could come late with an answer in
        which the pod still runs.
        """
        await self.kubelet.delete(pod)
        self.agent.registry.events.publish(PodEnded(KnownPod(pod.uid, pod.namespace, pod.name)))

    async def wait_allocatable(self, count: int) -> None:
        """Wait until the kubelet has this number of healthy shares."""
        await self.kubelet.wait_for(
            lambda: self.kubelet.allocatable().get(RESOURCE) == count, within=30
        )

    async def wait_for_fault(self) -> None:
        """Wait until a GPU is out of service, and the kubelet knows it."""
        async for gpus in self.agent.registry.watch(lambda snapshot: snapshot.gpus):
            if not all(state.verdict.healthy for state in gpus.values()):
                break
        await self._wait_listed()

    async def schedule(self, name: str, shares: int) -> dict[str, Any]:
        """Create a pod, which waits while the node has too few free shares for it."""
        request = {"pod": name, "resource": RESOURCE, "shares": shares}
        free = await self.count_free()
        if shares > free:
            message = f"it asks for {shares} shares, and {free} count as free"
            return {**request, "admitted": False, "reason": "Unschedulable", "message": message}

        options = await self.kubelet.admit(SimPod.single(name, {RESOURCE: shares}))
        envs = options["main"].envs
        return {
            **request,
            "admitted": True,
            "gpus": envs[VISIBLE_DEVICES].split(","),
            "memoryMiB": int(envs["METAGPU_MAX_MEM"]),
        }

    async def try_pod(self, name: str, shares: int) -> dict[str, Any]:
        """Create a pod; return the shares that count as free, and what becomes of it."""
        free = await self.count_free()
        try:
            runs = (await self.schedule(name, shares))["admitted"]
        except AdmissionError:
            return {"free": free, "outcome": "is refused"}
        return {"free": free, "outcome": "runs" if runs else "waits"}

    async def count_free(self) -> int:
        """Return the shares that count as free for the scheduler."""
        await self._wait_listed()
        return self.kubelet.allocatable()[RESOURCE] - len(self._holders())

    async def wait_settled(self) -> None:
        """Wait until no GPU is cleaned up and no share is delayed."""
        await self._wait_for_gpus(_is_settled)

    async def wait_idle(self) -> None:
        """Wait until no GPU has an owner."""
        await self._wait_for_gpus(lambda state: state.owner is None)

    async def _wait_for_gpus(self, holds: Callable[[GpuState], bool]) -> None:
        async for gpus in self.agent.registry.watch(lambda snapshot: snapshot.gpus):
            if _holders(gpus) == self._holders() and all(map(holds, gpus.values())):
                return

    async def record_step(self, event: str) -> dict[str, Any]:
        """Return the GPUs and the allocatable shares, once the kubelet has the latest."""
        await self.wait_settled()
        await self._wait_listed()
        explained = explain_report(self.agent.registry.snapshot, self.agent.layout)
        return {
            "event": event,
            "allocatable": self._allocatable(),
            "gpus": to_builtins(explained.gpus),
            "slices": self._slices(),
        }

    async def _wait_listed(self) -> None:
        """Wait until the kubelet has the agent's latest lists."""
        await self.kubelet.wait_for(
            lambda: self.kubelet.allocatable() == self._allocatable(), within=30
        )

    def _holders(self) -> dict[str, str]:
        """Return the pod of each held share, as the kubelet knows it."""
        return {
            share: pod.name
            for pod in self.kubelet.pods
            for resources in self.kubelet.devices(pod).values()
            for shares in resources.values()
            for share in shares
        }

    def _allocatable(self) -> dict[str, int]:
        """Return the allocatable shares per resource, as the agent offers them."""
        explained = explain_report(self.agent.registry.snapshot, self.agent.layout)
        return {name: report.allocatable for name, report in explained.resources.items()}

    def _slices(self) -> list[list[int]]:
        """Return per GPU and memory slice the compute slices of its MIG instance, or 0."""
        with self.node.changed:
            return [_sizes(gpu) for gpu in self.node.gpus]


def run(form: str) -> int:
    """Run the demo and print it; return the exit status."""
    # The folder holds unix sockets, whose paths are short; a path in TMPDIR may be too long.
    with tempfile.TemporaryDirectory(prefix="metagpu-demo-", dir="/tmp") as folder:
        story = {
            **anyio.run(_run_fractions, Path(folder)),
            "pool": anyio.run(_run_scenario, Path(folder) / "pool", POOL),
            "mig": anyio.run(_run_scenario, Path(folder) / "mig", MIG),
            "growth": anyio.run(run_growth, Path(folder) / "growth"),
            "claims": anyio.run(run_claims, Path(folder) / "claims"),
            "offers": [anyio.run(_run_offer, Path(folder), policy) for policy in OFFER_POLICIES],
        }

    if form != "table":
        print(encode(story, form), end="")  # noqa: T201 - the output of a command
    else:
        from metagpu.sim.demo.script import show_demo  # noqa: PLC0415 - JSON needs no tables

        show_demo(story)
    return 0


async def _run_fractions(folder: Path) -> dict[str, Any]:
    async with _running_node(folder, NODE) as demo:
        total = 100 * len(demo.node.gpus)
        await demo.wait_allocatable(total)
        pods = [await demo.schedule(*pod) for pod in PODS]
        before = await demo.status()

        demo.node.raise_xid(demo.node.gpu(FAULTY_GPU), XID)
        await demo.wait_for_fault()
        after = await demo.status()

        return {
            "node": {"gpus": NODE, "capacity": demo.kubelet.capacity()[RESOURCE]},
            "pods": pods,
            "before": before,
            "fault": {
                "gpu": int(FAULTY_GPU),
                "xid": XID,
                "allocatableBefore": before["resources"][RESOURCE]["allocatable"],
                "allocatable": demo.kubelet.allocatable()[RESOURCE],
                "affected": _affected(before, after),
                "running": [pod.name for pod in demo.kubelet.pods],
            },
            "after": after,
        }


async def _run_scenario(folder: Path, scenario: DemoScenario) -> dict[str, Any]:
    """Run a scenario in its own folder: a kubelet remembers its resources."""
    async with _running_node(folder, scenario.gpus, scenario.config) as demo:
        await demo.kubelet.wait_for(lambda: demo.kubelet.allocatable() == scenario.idle, within=30)
        steps = [await demo.record_step("no pod yet")]
        running: dict[str, SimPod] = {}

        for name, resource, count in scenario.steps:
            if resource:
                running[name] = SimPod.single(name, {resource: count})
                await demo.kubelet.admit(running[name])
                event = f"{name} requests {count} {resource.rpartition('/')[2]}"
            else:
                await demo.end_pod(running.pop(name))
                event = f"{name} ends"
            steps.append(await demo.record_step(event))

        for pod in running.values():
            await demo.end_pod(pod)
        await demo.wait_idle()  # otherwise MPS control daemons outlive the demo, for their clients
        return {"gpus": scenario.gpus, "steps": steps}


async def _run_offer(folder: Path, offer: str) -> dict[str, Any]:
    """Create a pod for which each of two GPUs has too little."""
    config = OFFERS_CONFIG.format(offer=offer)
    async with _running_node(folder / offer, OFFERS_NODE, config) as demo:
        every = 100 * len(demo.node.gpus)
        await demo.wait_allocatable(every)
        held = [SimPod.single(name, {RESOURCE: shares}) for name, shares in OFFERS_HELD]
        for pod in held:
            await demo.kubelet.admit(pod)
        await demo.wait_settled()
        outcomes = [await demo.try_pod(*OFFERS_WAITING)]
        if outcomes[0]["outcome"] == "waits":
            await demo.end_pod(held[0])
            await demo.wait_allocatable(every)  # with an idle GPU nothing is held back
            outcomes.append(await demo.try_pod(*OFFERS_WAITING))
        return {"offer": offer, "outcomes": outcomes}


@asynccontextmanager
async def _running_node(
    folder: Path, gpus: str, config: str | None = None
) -> AsyncIterator[DemoNode]:
    paths = AgentPaths(
        kubelet_root=folder,
        kubelet_dir=folder / "device-plugins",
        pod_resources=folder / "pod-resources.sock",
        run_dir=folder,
    )
    files: tuple[Path, ...] = ()
    if config is not None:
        await anyio.Path(folder).mkdir()
        files = (folder / "metagpu.yaml",)
        await anyio.Path(files[0]).write_text(config)
    node = build_node(gpus)
    agent = Agent(
        ConfigSource(files),
        NvmlDriver(SimLibrary(node)),
        paths,
        programs=SimPrograms(),
        daemons=sim_daemons(),
        timing=AgentTiming(kubelet=KubeletTiming(settle=SETTLE)),
    )
    kubelet = SimKubelet(paths.kubelet_dir, pod_resources=paths.pod_resources, numa_nodes=(0, 1))

    async with kubelet.running(), anyio.create_task_group() as group:
        group.start_soon(agent.serve_node)
        yield DemoNode(node, kubelet, agent)
        group.cancel_scope.cancel()


def _holders(gpus: Mapping[GpuId, GpuState]) -> dict[str, str]:
    """Return the pod of each leased share, as the agent knows it."""
    leases = (lease for gpu in gpus.values() for lease in gpu.leases.values())
    return {lease.share.id: lease.holder.pod if lease.holder else "" for lease in leases}


def _is_settled(state: GpuState) -> bool:
    """Return whether no cleanup and no delayed share is left on a GPU."""
    devices = (
        device
        for provisioned in state.provisioned.values()
        for device in provisioned.devices.items()
    )
    idle = not state.cleanup.since and all(
        device.idle or share in state.leases for share, device in devices
    )
    undelayed = {
        name: replace(provisioned, delayed=frozenset())
        for name, provisioned in state.provisioned.items()
    }
    unavailable = unavailable_shares(state.shares, state.leases, state.cleanup.since, undelayed)
    return idle and unavailable == conflicting_shares(state)


def _sizes(gpu: SimGpu) -> list[int]:
    sizes = [0] * max((profile.memory_slices for profile in gpu.mig.profiles), default=0)

    for instance in gpu.mig.instances.values():
        for n in instance.slices:
            sizes[n] = instance.profile.compute_slices
    return sizes


def _affected(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[int]:
    """Return the indices of the GPUs whose health the fault changed."""
    return [
        new["index"]
        for old, new in zip(before["gpus"], after["gpus"], strict=True)
        if old["healthy"] != new["healthy"]
    ]

"""The main jobs in half a minute, each on a simulated node with a kubelet in it.

Fractions: pods come, and a GPU breaks. A mixed pool: idle GPUs go to whoever asks first. MIG:
instances are made as pods ask, and go as pods end.

Everything but the hardware and the cluster is the real thing: our daemon's own agent, pynvml over
the simulated NVML, gRPC over unix sockets.
"""

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
from msgspec.structs import replace

from metagpu.app import Agent
from metagpu.core import report
from metagpu.core.gpu import GpuId
from metagpu.core.injection import VISIBLE_DEVICES
from metagpu.core.news import PodEnded
from metagpu.core.pods import KnownPod
from metagpu.core.sharing import withheld
from metagpu.core.snapshot import GpuState
from metagpu.nvml import Nvml
from metagpu.places import Places
from metagpu.sim.gpu import SimGpu
from metagpu.sim.kubelet import AdmissionError, Container, Pod, SimKubelet
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.script import BOARDS, BROKEN, MIG, PODS, POOL, RESOURCE, XID, Act
from metagpu.sim.spec import simulated
from metagpu.sim.tools import SimulatedTools, simulated_companions
from metagpu.sources import Source

SETTLE: Final = 0.05
"""Seconds from a grant to the look that finds its pod: this kubelet has no limit of questions."""


@dataclass(frozen=True)
class Scene:
    """The node with its parts while the demo runs."""

    node: SimNode
    kubelet: SimKubelet
    agent: Agent

    async def status(self) -> dict[str, Any]:
        """Say what the agent knows, once it has heard from the kubelet who holds what."""
        await self._until(lambda _: True)
        return report.status(self.agent.registry.snapshot, self.agent.layout)

    async def end(self, pod: Pod) -> None:
        """End a pod, and tell the agent so as the API server does.

        The agent alone asks the kubelet who holds what: of two that ask, one might come late with
        an answer in which the pod is still there.
        """
        await self.kubelet.delete(pod)
        self.agent.registry.news.publish(PodEnded(KnownPod(pod.uid, pod.namespace, pod.name)))

    async def allocatable(self, count: int) -> None:
        """Wait until the kubelet has so many healthy shares."""
        await self.kubelet.wait_for(
            lambda: self.kubelet.allocatable().get(RESOURCE) == count, within=30
        )

    async def rest(self) -> None:
        """Wait until nothing is being cleaned, or waits for its turn."""
        await self._until(_rests)

    async def idle(self) -> None:
        """Wait until no GPU has an owner any more; what is on offer then matters to nobody."""
        await self._until(lambda state: state.owner is None)

    async def _until(self, holds: Callable[[GpuState], bool]) -> None:
        async for gpus in self.agent.registry.watch(lambda snapshot: snapshot.gpus):
            if _holders(gpus) == self._holders() and all(map(holds, gpus.values())):
                return

    async def step(self, what: str) -> dict[str, Any]:
        """Say who has which GPU, once the kubelet has heard what is on offer now."""
        await self.rest()
        await self.kubelet.wait_for(lambda: self.kubelet.allocatable() == self._told(), within=30)

        status = report.status(self.agent.registry.snapshot, self.agent.layout)
        return {
            "what": what,
            "allocatable": self._told(),
            "gpus": status["gpus"],
            "slices": self._slices(),
        }

    def _holders(self) -> dict[str, str]:
        """Say which pod has which share, as the kubelet knows it."""
        return {
            share: pod.name
            for pod in self.kubelet.pods
            for resources in self.kubelet.devices(pod).values()
            for shares in resources.values()
            for share in shares
        }

    def _told(self) -> dict[str, int]:
        """Say how much of each resource the kubelet is to know as allocatable."""
        status = report.status(self.agent.registry.snapshot, self.agent.layout)
        return {name: numbers["allocatable"] for name, numbers in status["resources"].items()}

    def _slices(self) -> list[list[int]]:
        """Give of each GPU's memory slices the compute slices of the MIG instance on it, or 0."""
        with self.node.changed:
            return [_sizes(gpu) for gpu in self.node.gpus]


def run(*, as_json: bool) -> int:
    """Run the demo and print it; give the exit status."""
    # Sockets stand in it, whose paths may not be long: a TMPDIR's may.
    with tempfile.TemporaryDirectory(prefix="metagpu-demo-", dir="/tmp") as folder:
        story = {
            **anyio.run(_play, Path(folder)),
            "pool": anyio.run(_perform, Path(folder) / "pool", POOL),
            "mig": anyio.run(_perform, Path(folder) / "mig", MIG),
        }

    if as_json:
        print(json.dumps(story, indent=2))  # noqa: T201 - a command line speaks so
    else:
        from metagpu.sim import pictures  # noqa: PLC0415 - programs need no tables

        pictures.show(story)
    return 0


async def _play(folder: Path) -> dict[str, Any]:
    async with _scene(folder, BOARDS) as scene:
        total = 100 * len(scene.node.gpus)
        await scene.allocatable(total)
        pods = [await _admit(scene.kubelet, *pod) for pod in PODS]
        before = await scene.status()

        scene.node.raise_xid(scene.node.gpu(BROKEN), XID)
        await scene.allocatable(total - 100)
        after = await scene.status()

        return {
            "node": {"gpus": BOARDS, "capacity": scene.kubelet.capacity()[RESOURCE]},
            "pods": pods,
            "before": before,
            "fault": {
                "gpu": int(BROKEN),
                "xid": XID,
                "allocatable": scene.kubelet.allocatable()[RESOURCE],
                "touched": _touched(before, after),
                "running": [pod.name for pod in scene.kubelet.pods],
            },
            "after": after,
        }


async def _perform(folder: Path, act: Act) -> dict[str, Any]:
    """Let pods come and go in a folder of their own: a kubelet remembers its resources."""
    async with _scene(folder, act.boards, act.config) as scene:
        await scene.kubelet.wait_for(lambda: scene.kubelet.allocatable() == act.idle, within=30)
        steps = [await scene.step("nobody has asked yet")]
        running: dict[str, Pod] = {}

        for name, resource, count in act.steps:
            if resource:
                running[name] = Pod.single(name, {resource: count})
                await scene.kubelet.admit(running[name])
                what = f"{name} asks for {count} {resource.rpartition('/')[2]}"
            else:
                await scene.end(running.pop(name))
                what = f"{name} ends"
            steps.append(await scene.step(what))

        for pod in running.values():
            await scene.end(pod)
        await scene.idle()  # else MPS's control daemons would outlive the demo, for their clients
        return {"gpus": act.boards, "steps": steps}


@asynccontextmanager
async def _scene(folder: Path, boards: str, config: str | None = None) -> AsyncIterator[Scene]:
    places = Places(folder / "device-plugins", folder / "pod-resources.sock", folder)
    paths: tuple[Path, ...] = ()
    if config is not None:
        await anyio.Path(folder).mkdir()
        paths = (folder / "metagpu.yaml",)
        await anyio.Path(paths[0]).write_text(config)
    node = simulated(boards)
    agent = Agent(
        Source(paths),
        Nvml(Library(node)),
        places,
        tools=SimulatedTools(),
        companions=simulated_companions(),
        settle=SETTLE,
    )
    kubelet = SimKubelet(places.kubelet, pod_resources=places.pod_resources, numa_nodes=(0, 1))

    async with kubelet.running(), anyio.create_task_group() as group:
        for task in agent.tasks:
            group.start_soon(task)
        yield Scene(node, kubelet, agent)
        group.cancel_scope.cancel()


def _holders(gpus: Mapping[GpuId, GpuState]) -> dict[str, str]:
    """Say which pod has which share, as far as the agent was told."""
    leases = (lease for gpu in gpus.values() for lease in gpu.leases.values())
    return {lease.share.id: lease.holder.pod if lease.holder else "" for lease in leases}


def _rests(state: GpuState) -> bool:
    """Tell whether nothing of a GPU is on its way back from who held it, or waits for its turn."""
    made = (made for stock in state.stocks.values() for made in stock.made.items())
    idle = not state.cleaning and all(it.idle or share in state.leases for share, it in made)
    stocks = {name: replace(stock, late=frozenset()) for name, stock in state.stocks.items()}
    in_the_way = withheld(state.shares, state.leases, state.cleaning, stocks)
    return idle and in_the_way == state.withheld


def _sizes(gpu: SimGpu) -> list[int]:
    sizes = [0] * max((profile.size for profile in gpu.mig.profiles), default=0)

    for instance in gpu.mig.present.values():
        for n in instance.slices:
            sizes[n] = instance.profile.slices
    return sizes


async def _admit(kubelet: SimKubelet, name: str, shares: int) -> dict[str, Any]:
    pod = Pod(name, containers=(Container("main", {RESOURCE: shares}),))
    told = {"pod": name, "resource": RESOURCE, "shares": shares}

    try:
        options = await kubelet.admit(pod)
    except AdmissionError as error:
        return {**told, "admitted": False, "reason": error.reason, "message": error.message}

    envs = options["main"].envs
    return {
        **told,
        "admitted": True,
        "gpus": envs[VISIBLE_DEVICES].split(","),
        "memoryMiB": int(envs["METAGPU_MAX_MEM"]),
    }


def _touched(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[int]:
    """List the GPUs whose health the fault changed: it should be one."""
    return [
        new["index"]
        for old, new in zip(before["gpus"], after["gpus"], strict=True)
        if old["healthy"] != new["healthy"]
    ]

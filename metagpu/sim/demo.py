"""The main jobs in half a minute, each on a simulated node with a kubelet in it.

Fractions: pods come, and a GPU breaks. A mixed pool: idle GPUs go to whoever asks first.

Everything but the hardware and the cluster is the real thing: our daemon's own agent, pynvml over
the simulated NVML, gRPC over unix sockets.
"""

import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from metagpu.app import Agent, Places
from metagpu.core import report
from metagpu.core.injection import VISIBLE_DEVICES
from metagpu.nvml import Nvml
from metagpu.plugins.podresources import observed
from metagpu.sim.kubelet import AdmissionError, Container, Pod, SimKubelet
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from metagpu.sim.tools import SimulatedTools, simulated_companions
from metagpu.sources import Source

BOARDS: Final = "a100-40gb:8"
RESOURCE: Final = "cnvrg.io/metagpu"
BROKEN: Final = "0"
XID: Final = 79

PODS: Final = (
    ("metagpu-test", 30),  # the example pod of MetaGPU's own manual
    ("notebook", 50),
    ("train-large", 150),
    ("serve-a", 20),
    ("serve-b", 20),
    ("batch", 75),
    ("finetune", 400),
    ("experiment", 40),  # more than that is free, but not on one GPU
)


MIXED_BOARDS: Final = "a100-40gb:2"
MIXED: Final = """\
version: metagpu/v1
pools:
  - name: mixed
    backends:
      - {backend: timeslice, replicas: 4}
      - {backend: mps, unitsPerGpu: 100}
      - {backend: whole}
"""
SHARED: Final = "nvidia.com/gpu.shared"
MPS: Final = "nvidia.com/gpu.mps"
WHOLE: Final = "nvidia.com/gpu"
IDLE: Final = {SHARED: 8, MPS: 200, WHOLE: 2}
"""What the mixed pool offers while nobody has asked."""
STEPS: Final[tuple[tuple[str, str, int], ...]] = (
    ("lab", SHARED, 1),
    ("train", WHOLE, 1),
    ("lab", "", 0),  # it ends
    ("serve", MPS, 50),
)


@dataclass(frozen=True)
class Scene:
    """The node with its parts while the demo runs."""

    node: SimNode
    kubelet: SimKubelet
    agent: Agent
    places: Places

    async def status(self) -> dict[str, Any]:
        """Say what the agent knows, having asked the kubelet who holds what."""
        registry = self.agent.registry
        registry.apply(await observed(self.places.pod_resources))
        return report.status(registry.snapshot, self.agent.layout)

    async def allocatable(self, count: int) -> None:
        """Wait until the kubelet has so many healthy shares."""
        await self.kubelet.wait_for(
            lambda: self.kubelet.allocatable().get(RESOURCE) == count, within=30
        )

    async def idle(self) -> None:
        """Wait until no GPU has an owner any more."""
        await self.status()
        async for now in self.agent.registry.watch(lambda snapshot: snapshot):
            if not any(state.owner for state in now.gpus.values()):
                return

    async def step(self, what: str) -> dict[str, Any]:
        """Say who has which GPU, once the kubelet has heard what is on offer now."""
        status = await self.status()
        told = {name: numbers["allocatable"] for name, numbers in status["resources"].items()}
        await self.kubelet.wait_for(lambda: dict(self.kubelet.allocatable()) == told, within=30)

        return {"what": what, "allocatable": told, "gpus": status["gpus"]}


def run(*, as_json: bool) -> int:
    """Run the demo and print it; give the exit status."""
    # Sockets stand in it, whose paths may not be long: a TMPDIR's may.
    with tempfile.TemporaryDirectory(prefix="metagpu-demo-", dir="/tmp") as folder:
        second = Path(folder) / "2"  # a kubelet remembers the resources of its folder
        second.mkdir()
        story = {**anyio.run(_play, Path(folder)), "pool": anyio.run(_share, second)}

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


async def _share(folder: Path) -> dict[str, Any]:
    """Let pods ask a mixed pool for its GPUs, each in its own way."""
    async with _scene(folder, MIXED_BOARDS, MIXED) as scene:
        await scene.kubelet.wait_for(lambda: scene.kubelet.allocatable() == IDLE, within=30)
        steps = [await scene.step("nobody has asked yet")]
        running: dict[str, Pod] = {}

        for name, resource, count in STEPS:
            if resource:
                running[name] = Pod.single(name, {resource: count})
                await scene.kubelet.admit(running[name])
                what = f"{name} asks for {count} {resource.rpartition('/')[2]}"
            else:
                await scene.kubelet.delete(running.pop(name))
                what = f"{name} ends"
            steps.append(await scene.step(what))

        for pod in running.values():
            await scene.kubelet.delete(pod)
        await scene.idle()  # else MPS's control daemons would outlive the demo, for their clients
        return {"gpus": MIXED_BOARDS, "steps": steps}


@asynccontextmanager
async def _scene(folder: Path, boards: str, config: str | None = None) -> AsyncIterator[Scene]:
    places = Places(folder / "device-plugins", folder / "pod-resources.sock", folder)
    paths: tuple[Path, ...] = ()
    if config is not None:
        paths = (folder / "metagpu.yaml",)
        await anyio.Path(paths[0]).write_text(config)
    node = simulated(boards)
    agent = Agent(
        Source(paths),
        Nvml(Library(node)),
        places,
        tools=SimulatedTools(),
        companions=simulated_companions(),
    )
    kubelet = SimKubelet(places.kubelet, pod_resources=places.pod_resources, numa_nodes=(0, 1))

    async with kubelet.running(), anyio.create_task_group() as group:
        for task in agent.tasks:
            group.start_soon(task)
        yield Scene(node, kubelet, agent, places)
        group.cancel_scope.cancel()


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

"""The whole agent on a real GPU, with a simulated kubelet."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import pytest

from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder
from metagpu.core.state.events import MemoryExceeded, XidReported
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.kubelet.kubelet import SimContainer, SimPod
from metagpu.sim.machine.containers import SimHost, container_of
from tests.gpu.conftest import Card
from tests.gpu.test_events import FAULTS
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.cuda import CudaProgram, cuda_program

pytestmark = pytest.mark.gpu

FRACTIONS: Final = """
version: metagpu/v1
pools:
  - name: all
    memoryEnforcement: {policy: kill, headroom: 1Gi}
    backends: [{backend: fraction, sharesPerGpu: 100}]
"""
SHARES: Final = 10
"""Of each container here."""


class Node:
    """The agent on the card, and containers with shares."""

    def __init__(self, card: Card, scene: Scene, machine: SimHost) -> None:
        self.card = card
        self.scene = scene
        self._machine = machine

    @property
    def limit_mib(self) -> int:
        """The memory of a container, its headroom included."""
        gpu = self.card.gpu
        assert gpu.memory is not None
        return (gpu.memory - (gpu.reserved or 0)) * SHARES // 100 // MIB + 1024

    @asynccontextmanager
    async def container(self, name: str) -> AsyncIterator[CudaProgram]:
        """Run a program in a container with its shares."""
        holder = Holder("team", name, "main")
        main = SimContainer("main", {METAGPU: SHARES})
        pod = SimPod(name, "team", uid=container_of(holder).pod_uid, containers=(main,))
        env = (await self.scene.kubelet.admit(pod))["main"].envs
        await self.scene.wait_holders()
        async with cuda_program(env["NVIDIA_VISIBLE_DEVICES"]) as program:
            self._machine.add_container_process(program.process.pid, holder)
            yield program


@asynccontextmanager
async def node_at_work(card: Card, tmp_path: Path) -> AsyncIterator[Node]:
    """Run the agent on the machine's GPUs while the block lasts."""
    machine = SimHost(tmp_path)
    async with agent_at_work(
        tmp_path, config=FRACTIONS, driver=NvmlDriver(), host=machine.host
    ) as scene:
        await scene.wait_snapshot(lambda now: len(now.gpus) > 0)
        shares = 100 * len(scene.agent.registry.snapshot.gpus)
        await scene.until(shares, shares)
        yield Node(card, scene, machine)


async def test_a_program_above_its_limit_ends_and_its_neighbour_goes_on(
    card: Card, tmp_path: Path
) -> None:
    """Memory above the limit ends the program that has it; its neighbour on the GPU goes on."""
    async with (
        node_at_work(card, tmp_path) as node,
        node.container("bob") as bob,
        node.container("alice") as alice,
    ):
        assert await bob.ask(f"take {node.limit_mib * 3 // 4}") == "ok"
        with node.scene.agent.registry.events.subscribe(MemoryExceeded) as exceeded:
            assert await alice.ask(f"take {node.limit_mib}") == "ok"
            with anyio.fail_after(30):
                assert await alice.process.wait() == -signal.SIGTERM
            event = await anext(aiter(exceeded))

        assert await bob.ask("take 64") == "ok"

    assert isinstance(event, MemoryExceeded)
    assert event.used >= node.limit_mib * MIB


async def test_a_fault_of_a_program_is_reported_and_takes_no_gpu(
    card: Card, tmp_path: Path
) -> None:
    """An XID of a program is an event, and its GPU stays in service."""
    async with node_at_work(card, tmp_path) as node:
        with node.scene.agent.registry.events.subscribe(XidReported) as reported:
            async with node.container("alice") as alice:
                assert await alice.ask("fault") == "CUDA_ERROR_ILLEGAL_ADDRESS"
            with anyio.fail_after(60):
                event = await anext(aiter(reported))
        assert node.scene.state(card.gpu.index).verdict.healthy

    assert isinstance(event, XidReported)
    assert (event.gpu, event.code in FAULTS) == (card.gpu.id, True)


async def test_the_use_of_a_container_is_that_of_its_program(card: Card, tmp_path: Path) -> None:
    """`mgctl` shows the memory that the driver counts for the container's program."""
    async with node_at_work(card, tmp_path) as node, node.container("alice") as alice:
        assert await alice.ask("take 2048") == "ok"
        report = await node.scene.usage()

    assert isinstance(report, dict)
    [container] = report["containers"]
    [part] = container["gpus"]
    assert 2048 <= part["usedMiB"] < 2048 + 1024
    assert part["limitMiB"] == node.limit_mib

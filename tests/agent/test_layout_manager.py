"""The configuration in force, applied to the GPUs of this host."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import anyio
import pytest

from metagpu.agent import layout_manager
from metagpu.agent.layout_manager import Existing
from metagpu.core.config.config import Config
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import MigInstance
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.mig import NvmlMigDriver
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import inside
from tests.rigs.agent import agent_at_work
from tests.rigs.mig import a_node, mig_pool
from tests.rigs.waiting import becomes, skip


async def test_a_layout_is_computed_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares of a configuration are made in a thread: the kubelet is answered meanwhile."""
    threads: list[threading.Thread] = []

    def recorded(
        config: Config, gpus: Iterable[Gpu], injection: Injection, existing: Existing
    ) -> Layout:
        threads.append(threading.current_thread())
        return build_layout(config, gpus, injection, existing)

    monkeypatch.setattr(layout_manager, "build_layout", recorded)
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)

    assert threads
    assert threading.main_thread() not in threads


async def test_gpus_that_hang_cost_one_deadline_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing instances of a GPU are read while others hang, whose last instances count on."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true, count: 3, instances: [1g.5gb@0]}")
    driver = NvmlDriver(SimLibrary(node), 600.0)
    asked, answered = list[GpuId](), list[GpuId]()
    read_one = NvmlMigDriver.instances

    async def recorded(self: NvmlMigDriver, gpu: GpuId) -> Sequence[MigInstance]:
        asked.append(gpu)
        found = await read_one(self, gpu)
        answered.append(gpu)
        return found

    async with agent_at_work(tmp_path, node, mig_pool("existing: true"), driver=driver) as scene:
        await scene.until(3, 3, "nvidia.com/mig-1g.5gb")
        manager, results = scene.agent.layout_manager, list[Existing]()
        monkeypatch.setattr(NvmlMigDriver, "instances", recorded)

        async def read() -> None:
            results.append(await manager.read_existing(scene.agent.config))

        async def read_while_two_hang() -> None:
            async with anyio.create_task_group() as group:
                asked.clear()
                answered.clear()
                for index in (0, 1):
                    node.hang_gpu(node.gpu(index), 600)
                group.start_soon(read)
                await becomes(lambda: scene.state(2).gpu.id in answered)
                await becomes(lambda: {scene.state(0).gpu.id, scene.state(1).gpu.id} <= {*asked})
                await becomes(lambda: inside(driver) >= {"GPU 0", "GPU 1"})
                group.cancel_scope.cancel()  # as SIGTERM does: nothing waits for the two

        try:
            await read_while_two_hang()
            assert not results
            skip(600)
            await read()
        finally:
            for index in (0, 1):
                node.reset_gpu(node.gpu(index))  # their threads end

    [found] = results
    assert [len(instances) for instances in found.values()] == [1, 1, 1]

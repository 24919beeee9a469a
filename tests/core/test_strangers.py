"""Pods that use GPUs nobody gave them are told of, once, and nobody else is."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from metagpu.core import strangers
from metagpu.core.census import Census
from metagpu.core.facts import GpusFound, LeasesObserved
from metagpu.core.gpu import MIB
from metagpu.core.model import Holder
from metagpu.core.news import StrangerFound
from metagpu.core.registry import Registry
from metagpu.core.strangers import StrangerWatch
from metagpu.sim.gpu import SimProcess
from metagpu.sim.host import SimHost, container_of
from metagpu.sim.node import SimNode
from tests.build import laid_out
from tests.heard import heard
from tests.host_rig import running
from tests.nvml.rig import opened

ALICE, MALLORY = Holder("team", "alice", "main"), Holder("team", "mallory", "main")


class Ground:
    """A watch over one GPU, of which alice holds a share."""

    def __init__(self, node: SimNode, registry: Registry, machine: SimHost) -> None:
        self.node, self.registry, self.machine = node, registry, machine
        self.looks = self.rounds = 0
        self.leases = LeasesObserved({}, at=0)

    def put(self, process: Process, holder: Holder | None) -> None:
        """Let a process use the GPU, in a container or on the host."""
        if holder is None:
            self.machine.show(process.pid, "0::/system.slice/x.service\n")
        else:
            self.machine.house(process.pid, holder)
        self.node.add_process(self.node.gpu(0), SimProcess(process.pid, 100 * MIB))


@asynccontextmanager
async def watched(
    tmp_path: Path, patience: float = 0.02, us: Holder | None = None, *, told: bool = True
) -> AsyncIterator[Ground]:
    """Run a watch that looks all the time; `us` is the container that it runs in itself."""
    async with opened("a100-40gb:1") as (node, nvml, survey), anyio.create_task_group() as group:
        machine, registry = SimHost(tmp_path), Registry()
        it = Ground(node, registry, machine)
        if us is not None:
            machine.house(os.getpid(), us)
        layout = laid_out(*survey.gpus)
        registry.apply(GpusFound(survey.gpus, at=0))
        registry.apply(layout.offered)
        it.leases = LeasesObserved({layout.shares[0].id: ALICE}, at=1)
        if told:
            registry.apply(it.leases)

        class Counted(Census):
            """A census that counts how often it is asked."""

            async def account(self, gpu: Any) -> Any:  # noqa: ANN401 - as the class's own
                """Count, then ask."""
                it.looks += 1
                return await super().account(gpu)

        quick = {"period": 0.01, "patience": patience}
        census = Counted(nvml, machine.host, registry)

        class Watch(StrangerWatch):
            """A watch that counts its rounds."""

            async def _look(self) -> Any:  # noqa: ANN401 - as the class's own
                it.rounds += 1
                return await super()._look()

        group.start_soon(Watch(census, machine.host, registry, **quick).run)
        yield it
        group.cancel_scope.cancel()


async def looked(it: Ground, times: int = 5) -> None:
    """Wait until the watch has looked so often from now on."""
    wanted = it.looks + times
    with anyio.fail_after(30):
        while it.looks < wanted:  # noqa: ASYNC110 - a look has no event of its own
            await anyio.sleep(0.005)


async def went_round(it: Ground, times: int = 5) -> None:
    """Wait until the watch went round so often from now on, be there anybody to look at or not."""
    wanted = it.rounds + times
    with anyio.fail_after(30):
        while it.rounds < wanted:  # noqa: ASYNC110 - as above
            await anyio.sleep(0.005)


async def test_a_bypass_is_told_once(tmp_path: Path) -> None:
    """A pod that uses a GPU without a share is named in the log and on the bus, and only once."""
    with heard(strangers) as entries:
        async with watched(tmp_path) as it, running() as process, running() as second:
            with it.registry.news.subscribe(StrangerFound) as news, anyio.fail_after(30):
                it.put(process, MALLORY)
                found = await anext(aiter(news))
            it.put(second, MALLORY)
            await looked(it)

    container = container_of(MALLORY)
    assert isinstance(found, StrangerFound)
    assert (found.holder, found.pid, found.memory) == (MALLORY, process.pid, 100 * MIB)
    assert (found.container_id, found.pod_uid) == (container.id, container.pod_uid)
    [entry] = entries
    assert entry["event"] == "a pod uses a GPU of which it holds no share"
    assert entry["why"] == "team/mallory (main) holds no share of this GPU"
    assert entry["container"] == container.id[:12]


async def test_nobody_is_a_stranger_before_the_kubelet_has_told(tmp_path: Path) -> None:
    """A daemon that comes before the kubelet does not know who holds what, and says nothing."""
    with heard(strangers) as entries:
        async with watched(tmp_path, told=False) as it, running() as alice, running() as mallory:
            it.put(alice, ALICE)
            it.put(mallory, MALLORY)
            await went_round(it, 20)
            assert it.looks == 0
            assert not entries

            it.registry.apply(it.leases)
            with anyio.fail_after(30):
                while not entries:  # noqa: ASYNC110 - as above
                    await anyio.sleep(0.005)
            await looked(it)

    assert [entry["container"] for entry in entries] == [container_of(MALLORY).id[:12]]


async def test_who_comes_again_is_news_again(tmp_path: Path) -> None:
    """After its processes have gone, a stranger that returns is told of once more."""
    with heard(strangers) as entries:
        async with watched(tmp_path) as it, running() as process:
            for times in (1, 2):
                it.put(process, MALLORY)
                with anyio.fail_after(30):
                    while len(entries) < times:  # noqa: ASYNC110 - as above
                        await anyio.sleep(0.005)
                it.node.end_process(it.node.gpu(0), process.pid)
                await looked(it)

    assert len(entries) == 2


async def test_a_gpu_that_fails_for_a_while_makes_no_news(tmp_path: Path) -> None:
    """Who was there before NVML stopped to answer, and is there after, is told of once."""
    with heard(strangers) as entries:
        async with watched(tmp_path) as it, running() as process:
            it.put(process, MALLORY)
            with anyio.fail_after(30):
                while not entries:  # noqa: ASYNC110 - as above
                    await anyio.sleep(0.005)
            it.node.lose(it.node.gpu(0))
            await looked(it)
            it.node.recover(it.node.gpu(0))
            await looked(it)

    assert len(entries) == 1


async def test_holders_and_the_host_are_no_news(tmp_path: Path) -> None:
    """Who holds a share may use the GPU, and what the host runs is its own matter."""
    with heard(strangers) as entries:
        async with watched(tmp_path) as it, running() as held, running() as of_the_host:
            it.put(held, ALICE)
            it.put(of_the_host, None)
            await looked(it)

    assert entries == []


async def test_we_are_no_strangers(tmp_path: Path) -> None:
    """What runs in our own container, as MPS servers do, uses GPUs on our behalf."""
    us = Holder("kube-system", "metagpu-x2x", "metagpu")
    with heard(strangers) as entries:
        async with watched(tmp_path, us=us) as it, running() as server:
            it.put(server, us)
            await looked(it)

    assert entries == []


async def test_who_was_just_admitted_has_time(tmp_path: Path) -> None:
    """Until the kubelet must have told of a pod, it is no stranger yet."""
    with heard(strangers) as entries:
        async with watched(tmp_path, patience=3600) as it, running() as process:
            it.put(process, MALLORY)
            await looked(it)

    assert entries == []

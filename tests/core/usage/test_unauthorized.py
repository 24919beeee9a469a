"""Pods that use GPUs without a share are reported once, and no others."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process

from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder
from metagpu.core.state.events import UnauthorizedUseFound
from metagpu.core.state.facts import GpusFound, LeasesObserved
from metagpu.core.state.registry import Registry
from metagpu.core.usage import lease_differences as unauthorized_module
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.lease_differences import UnauthorizedUseWatch, difference_of
from metagpu.core.usage.timing import UsageTiming
from metagpu.sim.machine.containers import SimHost, container_of
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from tests.nvml.rig import opened
from tests.rigs.build import after, gpu, layout_of
from tests.rigs.host import running
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes

ALICE, MALLORY = Holder("team", "alice", "main"), Holder("team", "mallory", "main")


class Ground:
    """A watch of one GPU, of which alice holds a share."""

    def __init__(self, node: SimNode, registry: Registry, machine: SimHost) -> None:
        self.node, self.registry, self.machine = node, registry, machine
        self.looks = self.rounds = 0
        self.leases = LeasesObserved({}, at=0)

    def put(self, process: Process, holder: Holder | None) -> None:
        """Start a process on the GPU, in a container or on the host."""
        if holder is None:
            self.machine.add_process(process.pid, "0::/system.slice/x.service\n")
        else:
            self.machine.add_container_process(process.pid, holder)
        self.node.start_process(self.node.gpu(0), SimProcess(process.pid, 100 * MIB))


@asynccontextmanager
async def watched(
    tmp_path: Path, patience: float = 0.02, us: Holder | None = None, *, pods_listed: bool = True
) -> AsyncIterator[Ground]:
    """Run a watch without pauses; `us` is the container of the watch itself."""
    async with opened("a100-40gb:1") as (node, nvml, survey), anyio.create_task_group() as group:
        machine, registry = SimHost(tmp_path), Registry()
        ground = Ground(node, registry, machine)
        if us is not None:
            machine.add_container_process(os.getpid(), us)
        layout = layout_of(*survey.gpus)
        registry.apply(GpusFound(survey.gpus, at=0))
        registry.apply(layout.offer_fact)
        ground.leases = LeasesObserved({layout.shares[0].id: ALICE}, at=1)
        if pods_listed:
            registry.apply(ground.leases)

        class Counted(UsageCollector):
            """A collector that counts its calls."""

            async def collect_gpu(self, gpu: Any) -> Any:  # noqa: ANN401 - as the class's own
                """Count the call, and collect."""
                ground.looks += 1
                return await super().collect_gpu(gpu)

        quick = UsageTiming(unauthorized_period=0.01, admission_window=patience)
        census = Counted(nvml, machine.host, registry)

        class Watch(UnauthorizedUseWatch):
            """A watch that counts its rounds."""

            async def _check(self) -> Any:  # noqa: ANN401 - as the class's own
                ground.rounds += 1
                return await super()._check()

        group.start_soon(Watch(census, machine.host, registry, quick).run)
        yield ground
        group.cancel_scope.cancel()


async def wait_checks(ground: Ground, times: int = 5) -> None:
    """Wait until the watch has checked this many times from now on."""
    wanted = ground.looks + times
    await becomes(lambda: ground.looks >= wanted)


async def wait_rounds(ground: Ground, times: int = 5) -> None:
    """Wait until the watch went round this many times from now on, also without a check."""
    wanted = ground.rounds + times
    await becomes(lambda: ground.rounds >= wanted)


async def test_unauthorized_use_is_reported_once(tmp_path: Path) -> None:
    """A pod that uses a GPU without a share is logged and published, once."""
    with capture_module_logs(unauthorized_module) as entries:
        async with watched(tmp_path) as ground, running() as process, running() as second:
            with (
                ground.registry.events.subscribe(UnauthorizedUseFound) as news,
                anyio.fail_after(30),
            ):
                ground.put(process, MALLORY)
                found = await anext(aiter(news))
            ground.put(second, MALLORY)
            await wait_checks(ground)

    container = container_of(MALLORY)
    assert isinstance(found, UnauthorizedUseFound)
    assert (found.holder, found.pid, found.memory) == (MALLORY, process.pid, 100 * MIB)
    assert (found.container_id, found.pod_uid) == (container.id, container.pod_uid)
    [entry] = entries
    assert entry["event"] == "unauthorized gpu use"
    assert entry["reason"] == "team/mallory (main) holds no share of this GPU"
    assert entry["container"] == container.id[:12]


async def test_no_process_is_unauthorized_before_the_kubelet_has_reported(tmp_path: Path) -> None:
    """A daemon without the kubelet's list does not know holders, and reports nothing."""
    with capture_module_logs(unauthorized_module) as entries:
        async with (
            watched(tmp_path, pods_listed=False) as ground,
            running() as alice,
            running() as mallory,
        ):
            ground.put(alice, ALICE)
            ground.put(mallory, MALLORY)
            await wait_rounds(ground, 20)
            assert ground.looks == 0
            assert not entries

            ground.registry.apply(ground.leases)
            await becomes(lambda: entries)
            await wait_checks(ground)

    assert [entry["container"] for entry in entries] == [container_of(MALLORY).id[:12]]


async def test_a_returning_process_is_reported_again(tmp_path: Path) -> None:
    """A container whose processes had gone is reported again when it returns."""
    with capture_module_logs(unauthorized_module) as entries:
        async with watched(tmp_path) as ground, running() as process:
            for times in (1, 2):
                ground.put(process, MALLORY)
                await becomes(lambda: len(entries) >= times)  # noqa: B023 - awaited here
                ground.node.end_process(ground.node.gpu(0), process.pid)
                await wait_checks(ground)

    assert len(entries) == 2


async def test_a_failed_gpu_repeats_no_report(tmp_path: Path) -> None:
    """A container that was there before and after NVML's silence is reported once."""
    with capture_module_logs(unauthorized_module) as entries:
        async with watched(tmp_path) as ground, running() as process:
            ground.put(process, MALLORY)
            await becomes(lambda: entries)
            ground.node.lose_gpu(ground.node.gpu(0))
            await wait_checks(ground)
            ground.node.reset_gpu(ground.node.gpu(0))
            await wait_checks(ground)

    assert len(entries) == 1


async def test_holders_and_the_host_are_not_reported(tmp_path: Path) -> None:
    """Holders of shares and processes of the host may use the GPU."""
    with capture_module_logs(unauthorized_module) as entries:
        async with watched(tmp_path) as ground, running() as held, running() as of_the_host:
            ground.put(held, ALICE)
            ground.put(of_the_host, None)
            await wait_checks(ground)

    assert entries == []


async def test_our_own_container_is_not_reported(tmp_path: Path) -> None:
    """Processes of our own container, such as MPS servers, may use GPUs."""
    us = Holder("kube-system", "metagpu-x2x", "metagpu")
    with capture_module_logs(unauthorized_module) as entries:
        async with watched(tmp_path, us=us) as ground, running() as server:
            ground.put(server, us)
            await wait_checks(ground)

    assert entries == []


async def test_a_pod_that_was_just_admitted_has_time(tmp_path: Path) -> None:
    """A pod is not reported before the kubelet must have named it."""
    with capture_module_logs(unauthorized_module) as entries:
        async with watched(tmp_path, patience=3600) as ground, running() as process:
            ground.put(process, MALLORY)
            await wait_checks(ground)

    assert entries == []


@pytest.mark.parametrize(
    ("event", "container", "reason"),
    [
        (
            UnauthorizedUseFound(
                gpu(0).id, Holder("team", "bob", "main"), "c" * 64, "u", 7, MIB, at=1
            ),
            "team/bob (main)",
            "container main uses 1 MiB of GPU 0",
        ),
        (
            UnauthorizedUseFound(gpu(9).id, None, "c" * 64, "u", 7, None, at=1),
            "pod u",
            f"container {'c' * 12} uses some memory of GPU {gpu(9).id}",
        ),
    ],
)
def test_what_is_unknown_of_a_use_is_said_so(
    event: UnauthorizedUseFound, container: str, reason: str
) -> None:
    """The status names container, GPU and memory, and their ids where they are unknown."""
    found = difference_of(event, after(GpusFound((gpu(0),), at=0)))

    assert (found.container, found.pod_uid) == (container, "u")
    assert found.reason.startswith(reason)

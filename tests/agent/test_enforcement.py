"""The whole agent with an API server and enforcement: pods' annotations and their Events."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from metagpu.agent.agent import Agent
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.reports.reading import ReportPart, plain_report
from metagpu.core.usage.accounting import GpuUsage
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.timing import UsageTiming
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimContainer, SimPod
from metagpu.sim.machine.containers import SimHost, container_of
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import find_model
from tests.rigs.agent import METAGPU, agent_at_work
from tests.rigs.host import running
from tests.rigs.waiting import becomes

NODE: Final = "gpu-1"
ALICE: Final = Holder("team", "alice", "main")
UID: Final = container_of(ALICE).pod_uid
POD: Final = SimPod("alice", "team", uid=UID, containers=(SimContainer("main", {METAGPU: 25}),))
PERCENT: Final = 40960 * MIB // 100
WISH: Final = {"gpu-mem-limit.cnvrg.io/metagpu": "50"}
STRICT: Final = """
version: metagpu/v1
pools:
  - name: all
    memoryEnforcement:
      {policy: kill, headroom: 1Gi, period: 20ms, grace: 20ms, allowAnnotations: [limit]}
    backends: [{backend: fraction, sharesPerGpu: 100}]
"""


def joined(server: SimApiServer, tmp_path: Path) -> ClusterSettings:
    """Return cluster settings that use the running server for pods alone."""
    uses = frozenset({Feature.PODS, Feature.POD_EVENTS})
    return ClusterSettings(NODE, server.kubeconfig(tmp_path), features=uses)


async def asked(agent: Agent, command: str) -> Mapping[str, Any]:
    """Return the agent's answer on its control socket."""
    answer = await agent.commands[command]({})
    assert isinstance(answer, ReportPart)
    return plain_report(answer)


async def test_a_pod_has_the_limit_of_its_annotation_until_its_end(tmp_path: Path) -> None:
    """With 25 shares requested and 50 allowed, use above 25 is accepted and above 50 ends."""
    server, machine = SimApiServer(), SimHost(tmp_path)
    server.add_node(NODE)
    server.add_pod("team", "alice", NODE, WISH, uid=UID, owner=("Job", "train"))

    async with (
        server.running(),
        agent_at_work(
            tmp_path,
            "a100-40gb:1",
            STRICT,
            cluster_settings=joined(server, tmp_path),
            host=machine.host,
        ) as scene,
        running() as greedy,
    ):
        await scene.until(100, 100)
        await scene.wait_snapshot(lambda now: UID in now.pods.by_uid)
        await scene.kubelet.admit(POD)
        await scene.wait_holders()
        machine.add_container_process(greedy.pid, ALICE)
        gpu = scene.node.gpu(0)
        scene.node.start_process(gpu, SimProcess(greedy.pid, 45 * PERCENT))

        [container] = (await asked(scene.agent, "usage"))["containers"]
        [part] = container["gpus"]
        assert (container["podUid"], container["podOwner"]) == (UID, "Job/train")
        assert (container["podPhase"], part["limitMiB"]) == ("Running", 20170 + 1024)
        assert not part["overLimit"]
        assert (await asked(scene.agent, "status"))["enforcement"]["warnings"] == 0
        assert greedy.returncode is None

        scene.node.start_process(gpu, SimProcess(greedy.pid, 60 * PERCENT))
        assert await greedy.wait() == -signal.SIGTERM
        await server.until(lambda: len(server.events()) == 2)
        done = (await asked(scene.agent, "status"))["enforcement"]

    assert (done["warnings"], done["signals"]) == (1, {"SIGTERM": 1, "SIGKILL": 0})
    exceeded, ended = server.events()
    assert (exceeded["reason"], ended["reason"]) == ("GPUMemoryExceeded", "GPUProcessSignaled")
    assert ended["regarding"]["name"] == "alice"
    assert "its share is 10240 MiB, its limit 21194 MiB" in ended["note"]


async def test_a_pod_whose_annotations_are_unknown_ends_for_none_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that starts while the API server is away ends nothing that a pod may be allowed.

    Its pool allows annotations. The pod has its limit once the server has answered.
    """
    server, machine = SimApiServer(), SimHost(tmp_path)
    server.add_node(NODE)
    server.add_pod("team", "alice", NODE, WISH, uid=UID, owner=("Job", "train"))
    async with server.running():
        settings = joined(server, tmp_path)
    checks, collect = list[GpuId](), UsageCollector.collect_gpu

    async def collect_gpu(collector: UsageCollector, gpu: GpuId) -> GpuUsage:
        checks.append(gpu)
        return await collect(collector, gpu)

    monkeypatch.setattr(UsageCollector, "collect_gpu", collect_gpu)
    async with (
        agent_at_work(
            tmp_path, "a100-40gb:1", STRICT, cluster_settings=settings, host=machine.host
        ) as scene,
        running() as greedy,
    ):
        await scene.until(100, 100)
        await scene.kubelet.admit(POD)
        await scene.wait_holders()
        machine.add_container_process(greedy.pid, ALICE)
        gpu = scene.node.gpu(0)
        scene.node.start_process(gpu, SimProcess(greedy.pid, 45 * PERCENT))
        begun = len(checks)
        await becomes(lambda: len(checks) > begun + 10)
        assert greedy.returncode is None

        async with server.running():
            await scene.wait_snapshot(lambda now: UID in now.pods.by_uid)
            scene.node.start_process(gpu, SimProcess(greedy.pid, 60 * PERCENT))
            assert await greedy.wait() == -signal.SIGTERM


async def test_a_borrower_gives_back_what_its_neighbour_needs(tmp_path: Path) -> None:
    """Up to its annotation a pod borrows, until a neighbour within its request needs the memory."""
    server, machine = SimApiServer(), SimHost(tmp_path)
    server.add_node(NODE)
    server.add_pod("team", "alice", NODE, {"gpu-mem-limit.cnvrg.io/metagpu": "90"}, uid=UID)
    lending = STRICT.replace("allow", "burst: {limit: 0, reserve: 2Gi}, allow")
    bob = Holder("team", "bob", "main")
    uid = container_of(bob).pod_uid

    async with (
        server.running(),
        agent_at_work(
            tmp_path,
            "a100-40gb:1",
            lending,
            cluster_settings=joined(server, tmp_path),
            host=machine.host,
        ) as scene,
        running() as greedy,
        running() as modest,
    ):
        await scene.until(100, 100)
        await scene.wait_snapshot(lambda now: UID in now.pods.by_uid)
        await scene.kubelet.admit(POD)
        await scene.kubelet.admit(
            SimPod("bob", "team", uid=uid, containers=(SimContainer("main", {METAGPU: 50}),))
        )
        await scene.wait_holders()
        machine.add_container_process(greedy.pid, ALICE)
        machine.add_container_process(modest.pid, bob)
        gpu = scene.node.gpu(0)
        scene.node.start_process(gpu, SimProcess(greedy.pid, 85 * PERCENT))
        [part] = (await asked(scene.agent, "usage"))["containers"][0]["gpus"]
        assert (part["borrowedMiB"], part["overLimit"]) == (34815 - 10085 - 1024, False)
        assert part["limitMiB"] == 36306 + 1024
        assert greedy.returncode is None

        scene.node.start_process(gpu, SimProcess(modest.pid, 13 * PERCENT))
        assert await greedy.wait() == -signal.SIGTERM
        await server.until(lambda: len(server.events()) == 2)
        assert modest.returncode is None

    needed, ended = server.events()
    assert (needed["reason"], ended["reason"]) == ("GPUMemoryNeeded", "GPUProcessSignaled")
    assert {event["regarding"]["name"] for event in (needed, ended)} == {"alice"}


async def test_a_wrong_annotation_is_an_event_and_changes_nothing(
    tmp_path: Path,
) -> None:
    """The pod's Event names the error; its limit stays that of its shares."""
    server, machine = SimApiServer(), SimHost(tmp_path)
    server.add_node(NODE)
    server.add_pod("team", "alice", NODE, {"gpu-mem-limit.cnvrg.io/metagpu": "lots"}, uid=UID)

    async with (
        server.running(),
        agent_at_work(
            tmp_path,
            "a100-40gb:1",
            STRICT,
            cluster_settings=joined(server, tmp_path),
            host=machine.host,
        ) as scene,
    ):
        await scene.until(100, 100)
        await scene.kubelet.admit(POD)
        await server.until(server.events)
        await scene.wait_holders()
        [container] = (await asked(scene.agent, "usage"))["containers"]

    assert container["gpus"][0]["limitMiB"] == 10085 + 1024
    [event] = server.events()
    assert event["reason"] == "GPUMemoryAnnotationRejected"
    assert event["note"].startswith("gpu-mem-limit.cnvrg.io/metagpu: 'lots' is neither a number")


async def test_a_new_drivers_own_limit_guards_a_container(tmp_path: Path) -> None:
    """With a driver that knows limits, `mgctl` names the driver as the guard, at the same limit."""
    node, machine = SimNode("615.71.09"), SimHost(tmp_path)
    node.add_gpu(find_model("a100-40gb"))
    machine.start(ALICE)

    async with agent_at_work(tmp_path, node, STRICT, host=machine.host) as scene:
        await scene.until(100, 100)
        await scene.kubelet.admit(POD)
        await becomes(lambda: list(node.gpu(0).memory_limits.values()) == [(10085 + 1024) * MIB])
        await becomes(lambda: scene.agent.usage_service.enforcement_report.driver_limits == 1)
        [container] = (await asked(scene.agent, "usage"))["containers"]

    [part] = container["gpus"]
    assert (part["guard"], part["policy"], part["limitMiB"]) == ("driver", "kill", 10085 + 1024)


@pytest.mark.parametrize("of_main", [{METAGPU: 1}, {}], ids=["also main", "init alone"])
async def test_an_init_container_is_held_to_its_shares(
    tmp_path: Path, of_main: Mapping[str, int]
) -> None:
    """The kubelet lists no init container; what its checkpoint names for one is its limit."""
    machine, prepare = SimHost(tmp_path), Holder("team", "alice", "prepare")
    pod = SimPod(
        "alice",
        "team",
        uid=container_of(prepare).pod_uid,
        init_containers=(SimContainer("prepare", {METAGPU: 1}),),
        containers=(SimContainer("main", of_main),),
    )
    async with (
        agent_at_work(tmp_path, "a100-40gb:1", STRICT, host=machine.host) as scene,
        running() as modest,
        running() as greedy,
    ):
        await scene.until(100, 100)
        await scene.kubelet.admit(pod)
        for process, memory in ((modest, 300 * MIB), (greedy, 20000 * MIB)):
            machine.add_container_process(process.pid, prepare)
            scene.node.start_process(scene.node.gpu(0), SimProcess(process.pid, memory))

        assert await greedy.wait() == -signal.SIGTERM
        assert modest.returncode is None


async def test_more_of_the_time_than_the_shares_give_is_reported(tmp_path: Path) -> None:
    """Alice and Bob have half of the time each, and Alice a quarter of the GPU."""
    server, machine, bob = SimApiServer(), SimHost(tmp_path), Holder("team", "bob", "main")
    uid = container_of(bob).pod_uid
    pods = (POD, SimPod("bob", "team", uid=uid, containers=(SimContainer("main", {METAGPU: 75}),)))
    server.add_node(NODE)
    for pod in pods:
        server.add_pod("team", pod.name, NODE, uid=pod.uid)
    report = "    computeEnforcement: {policy: report, window: 300ms}\n"
    text = STRICT.replace("    memory", f"{report}    memory")

    async with (
        server.running(),
        agent_at_work(
            tmp_path,
            "a100-40gb:1",
            text,
            cluster_settings=joined(server, tmp_path),
            host=machine.host,
            usage_timing=UsageTiming(compute_period=0.1),
        ) as scene,
    ):
        await scene.until(100, 100)
        await scene.wait_snapshot(lambda now: {UID, uid} <= now.pods.by_uid.keys())
        for number, (pod, holder) in enumerate(zip(pods, (ALICE, bob), strict=True)):
            await scene.kubelet.admit(pod)
            machine.add_container_process(7000 + number, holder, real=os.getpid())
            scene.node.start_process(scene.node.gpu(0), SimProcess(7000 + number, MIB, sm=100))
        await scene.wait_holders()

        await server.until(server.events)
        parts = [each["gpus"][0] for each in (await asked(scene.agent, "usage"))["containers"]]

    assert [part["overShareSeconds"] is not None for part in parts] == [True, False]
    [event] = server.events()
    assert (event["reason"], event["regarding"]["name"]) == ("GPUTimeExceeded", "alice")
    assert "its shares give 25 % while other containers want more" in event["note"]

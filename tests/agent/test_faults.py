"""GPUs that fail and recover: the whole agent, a node and a kubelet."""

from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.contracts.driver import RecoveryAction, Survey, UnreadableGpu
from metagpu.core.errors import MetagpuError
from metagpu.core.health.verdicts import GpuVerdicts
from metagpu.core.health.watch import HealthTiming
from metagpu.core.state.facts import GpuFaulted, GpuRecovered
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.nvml.library import SimLibrary
from tests.rigs.agent import METAGPU, QUICK, agent_at_work

pytestmark = pytest.mark.long

SOON = HealthTiming(retry=0.01)


async def test_fatal_xid_reaches_the_kubelet_and_recovers(tmp_path: Path) -> None:
    """A fatal XID takes one GPU out; recovered and quiet, the GPU returns by itself."""
    # No device check beside the events: a check at that moment finds the GPU lost before its XID.
    seldom = QUICK.replace("rescanPeriod: 100ms", "rescanPeriod: 1h")

    async with agent_at_work(tmp_path, config=seldom) as scene:
        await scene.until(20, 20)
        scene.node.raise_xid(scene.node.gpu("0"), 79)
        await scene.until(20, 10)

        assert scene.state(0).verdict.reason == "XID 79: GPU has fallen off the bus"
        assert scene.state(1).verdict.healthy

        scene.node.reset_gpu(scene.node.gpu("0"))
        await scene.until(20, 20)

        assert scene.state(0).verdict.healthy


async def test_a_lost_gpu_is_named_once(tmp_path: Path) -> None:
    """NVML's message about a GPU does not repeat the name that its reader shows already."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        scene.node.lose_gpu(scene.node.gpu("0"))
        await scene.until(20, 10)

        assert scene.state(0).verdict.reason == (
            "the GPU is lost: it has fallen off the bus or does not answer"
        )


async def test_a_gpu_that_a_survey_misses_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is where a survey finds the lost GPU before any check of it."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        health, gpu = scene.agent.health, scene.state(0).gpu
        found = await health.driver.survey()
        lost = UnreadableGpu(0, f"{gpu}: the GPU is lost", gpu.id)

        async def survey() -> Survey:
            return replace(found, gpus=found.gpus[1:], unreadable=(lost,))

        monkeypatch.setattr(health.driver, "survey", survey)
        await health.survey()

        assert scene.state(0).verdict.reason == "the GPU is lost"


async def test_application_xid_changes_nothing(tmp_path: Path) -> None:
    """An XID of an application makes no share Unhealthy."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        lists = scene.kubelet.lists[METAGPU]
        scene.node.raise_xid(scene.node.gpu("0"), 13)
        scene.node.raise_xid(scene.node.gpu("1"), 79)
        await scene.until(20, 10)

        assert scene.state(0).verdict.healthy
        assert scene.kubelet.lists[METAGPU] == lists + 1


async def test_policy_is_configurable(tmp_path: Path) -> None:
    """The configuration may make an application's XID fatal."""
    config = QUICK.replace("rescanPeriod: 100ms", "xids: {13: fatal}")

    async with agent_at_work(tmp_path, config=config) as scene:
        await scene.until(20, 20)
        scene.node.raise_xid(scene.node.gpu("0"), 13)
        await scene.until(20, 10)


async def test_recovery_action_alone_takes_a_gpu_out(tmp_path: Path) -> None:
    """A GPU that needs a reset gives no shares until NVML requests no action any more."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        scene.node.set_recovery_action(scene.node.gpu("1"), RecoveryAction.GPU_RESET)
        await scene.until(20, 10)

        assert scene.state(1).verdict.reason == "NVML asks for a recovery action: GPU reset"

        scene.node.set_recovery_action(scene.node.gpu("1"), RecoveryAction.NONE)
        await scene.until(20, 20)


async def test_faulted_gpu_is_out_after_a_restart(tmp_path: Path) -> None:
    """A daemon that finds a GPU in need of a reset at its start does not offer the GPU."""
    async with agent_at_work(tmp_path, gpu_models="a100-40gb:2") as agent:
        await agent.until(20, 20)
        agent.node.set_recovery_action(agent.node.gpu("0"), RecoveryAction.NODE_REBOOT)
        await agent.until(20, 10)

    node_file = tmp_path / "node.yaml"
    await anyio.Path(node_file).write_text(
        "gpus: [{model: a100-40gb, recoveryAction: node-reboot}, {model: a100-40gb}]"
    )
    async with agent_at_work(tmp_path, gpu_models=str(node_file)) as scene:
        await scene.until(20, 10)

        assert not scene.state(0).verdict.healthy


async def test_operator_acknowledges(tmp_path: Path) -> None:
    """An acknowledged GPU returns at once, unless NVML still requests an action."""
    # No device check here either: a check begun before the recovery finds the GPU lost after it.
    config = QUICK.replace("100ms", "1h")

    async with agent_at_work(tmp_path, config=config) as scene:
        await scene.until(20, 20)
        gpu = scene.node.gpu("0")
        scene.node.raise_xid(gpu, 79)
        await scene.until(20, 10)

        with pytest.raises(MetagpuError, match="lost"):
            await scene.agent.health.acknowledge(scene.state(0).gpu.id)

        scene.node.reset_gpu(gpu)
        await scene.agent.health.acknowledge(scene.state(0).gpu.id)
        await scene.until(20, 20)

        with pytest.raises(MetagpuError, match="nothing to acknowledge"):
            await scene.agent.health.acknowledge(scene.state(0).gpu.id)


async def test_old_driver_waits_for_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fatal XID outlasts passing checks when the driver reports no recovery action."""
    notified = anyio.Event()
    monkeypatch.setattr(GpuVerdicts, "notify_operator", lambda *_: notified.set())
    node_file = tmp_path / "node.yaml"
    await anyio.Path(node_file).write_text('driver: "470.82"\ngpus: [{model: a100-40gb, count: 2}]')

    async with agent_at_work(tmp_path, gpu_models=str(node_file)) as scene:
        await scene.until(20, 20)
        scene.node.raise_xid(scene.node.gpu("0"), 95)
        await scene.until(20, 10)
        scene.node.reset_gpu(scene.node.gpu("0"))
        await notified.wait()

        assert not scene.state(0).verdict.healthy

        await scene.agent.health.acknowledge(scene.state(0).gpu.id)
        await scene.until(20, 20)


SELDOM = QUICK.replace("rescanPeriod: 100ms", "rescanPeriod: 1h")
"""Without a survey of all GPUs after the first one."""


@pytest.mark.parametrize("code", [38, 61, 79, 95, 110, 136, 143, 157, 158])
async def test_the_next_xid_is_heard_after_a_return(tmp_path: Path, code: int) -> None:
    """A reset ends NVML's registration; a GPU that returns to service is heard again."""
    async with agent_at_work(tmp_path, config=SELDOM) as scene:
        await scene.until(20, 20)
        with scene.agent.registry.events.subscribe(GpuFaulted, GpuRecovered) as events:
            changes = aiter(events)
            for expected in (GpuFaulted, GpuRecovered) * 2:
                if expected is GpuFaulted:
                    scene.node.raise_xid(scene.node.gpu("0"), code)
                    scene.node.reset_gpu(scene.node.gpu("0"))
                with anyio.fail_after(30):
                    assert type(await anext(changes)) is expected


async def test_the_next_xid_is_heard_after_an_acknowledgement(tmp_path: Path) -> None:
    """On a driver without recovery actions an acknowledged GPU is heard again."""
    node_file = tmp_path / "node.yaml"
    await anyio.Path(node_file).write_text('driver: "550.54"\ngpus: [{model: a30, count: 2}]')

    async with agent_at_work(tmp_path, str(node_file), SELDOM.replace("100ms", "1h")) as scene:
        await scene.until(20, 20)
        for _ in range(2):
            scene.node.raise_xid(scene.node.gpu("0"), 95)
            await scene.until(20, 10)
            scene.node.reset_gpu(scene.node.gpu("0"))
            await scene.agent.health.acknowledge(scene.state(0).gpu.id)
            await scene.until(20, 20)


async def test_lost_gpu_leaves_the_others_alone(tmp_path: Path) -> None:
    """The rescan finds a GPU that is lost without an event, and the others stay healthy."""
    async with agent_at_work(tmp_path, gpu_models="a100-40gb:4") as scene:
        await scene.until(40, 40)
        scene.node.lose_gpu(scene.node.gpu("2"))
        await scene.until(40, 30)

        assert [scene.state(n).verdict.healthy for n in range(4)] == [True, True, False, True]

        await scene.kubelet.admit(SimPod.single("train", {METAGPU: 30}))
        scene.node.reset_gpu(scene.node.gpu("2"))
        await scene.until(40, 40)


async def test_missing_nvml_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver nothing is offered; once the driver is loaded, every GPU is."""
    tries: list[object] = []
    start = SimLibrary.nvmlInitWithFlags

    def counted(self: SimLibrary, flags: object) -> int:
        tries.append(flags)
        return start(self, flags)

    monkeypatch.setattr(SimLibrary, "nvmlInitWithFlags", counted)
    async with agent_at_work(tmp_path, drivers=False, health_timing=SOON) as scene:
        with anyio.fail_after(30):
            while len(tries) < 3:  # noqa: ASYNC110 - a missing driver has no event
                await anyio.sleep(0.01)

        assert scene.kubelet.registrations[METAGPU] == 0

        scene.node.load_driver()
        await scene.until(20, 20)


async def test_lost_driver_takes_all_and_gives_all_back(tmp_path: Path) -> None:
    """An unloaded driver takes every share; the shares return with the driver."""
    async with agent_at_work(tmp_path, health_timing=SOON) as scene:
        await scene.until(20, 20)
        scene.node.unload_driver()
        await scene.until(20, 0)
        scene.node.load_driver()
        await scene.until(20, 20)

        assert scene.kubelet.registrations[METAGPU] == 1


async def test_recovery_is_an_event(tmp_path: Path) -> None:
    """A recovery is an event on the bus, with the evidence for it."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        scene.node.raise_xid(scene.node.gpu("0"), 119)
        await scene.until(20, 10)

        async with anyio.create_task_group() as group:

            async def receive() -> None:
                fact = await scene.next_event(GpuRecovered)
                assert isinstance(fact, GpuRecovered)
                assert fact.reason == "passed its checks for 0.1 s"

            group.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            scene.node.reset_gpu(scene.node.gpu("0"))

"""GPUs that break and heal: the whole agent, a node and a kubelet."""

from pathlib import Path

import anyio
import pytest

from metagpu.core import health
from metagpu.core.driver import RecoveryAction
from metagpu.core.errors import MetagpuError
from metagpu.core.facts import GpuRecovered
from metagpu.sim.kubelet import Pod
from metagpu.sim.library import Library
from tests.agent_rig import METAGPU, QUICK, agent_at_work


async def test_fatal_xid_reaches_the_kubelet_and_heals(tmp_path: Path) -> None:
    """A fatal XID takes one GPU out; recovered and quiet, it comes back by itself."""
    # No look beside the events: one at that moment would find the GPU lost before its XID is heard.
    seldom = QUICK.replace("rescanPeriod: 100ms", "rescanPeriod: 1h")

    async with agent_at_work(tmp_path, config=seldom) as it:
        await it.until(20, 20)
        it.node.raise_xid(it.node.gpu("0"), 79)
        await it.until(20, 10)

        assert it.state(0).verdict.reason == "XID 79: GPU has fallen off the bus"
        assert it.state(1).verdict.healthy

        it.node.recover(it.node.gpu("0"))
        await it.until(20, 20)

        assert it.state(0).verdict.healthy


async def test_a_lost_gpu_is_named_once(tmp_path: Path) -> None:
    """What NVML says of a GPU is told without the GPU's name, which its reader has already."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.lose(it.node.gpu("0"))
        await it.until(20, 10)

        assert it.state(0).verdict.reason == (
            "the GPU is lost: it has fallen off the bus or does not answer"
        )


async def test_application_xid_changes_nothing(tmp_path: Path) -> None:
    """An application's XID costs no share."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        lists = it.kubelet.lists[METAGPU]
        it.node.raise_xid(it.node.gpu("0"), 13)
        it.node.raise_xid(it.node.gpu("1"), 79)
        await it.until(20, 10)

        assert it.state(0).verdict.healthy
        assert it.kubelet.lists[METAGPU] == lists + 1


async def test_policy_is_configurable(tmp_path: Path) -> None:
    """The configuration may make an application's XID fatal."""
    config = QUICK.replace("rescanPeriod: 100ms", "xids: {13: fatal}")

    async with agent_at_work(tmp_path, config=config) as it:
        await it.until(20, 20)
        it.node.raise_xid(it.node.gpu("0"), 13)
        await it.until(20, 10)


async def test_recovery_action_alone_takes_a_gpu_out(tmp_path: Path) -> None:
    """A GPU that needs a reset serves nobody until NVML asks for nothing any more."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.need(it.node.gpu("1"), RecoveryAction.GPU_RESET)
        await it.until(20, 10)

        assert it.state(1).verdict.reason == "NVML asks for a recovery action: GPU reset"

        it.node.need(it.node.gpu("1"), RecoveryAction.NONE)
        await it.until(20, 20)


async def test_faulted_gpu_is_out_after_a_restart(tmp_path: Path) -> None:
    """A daemon that starts finds a GPU in need of a reset and does not offer it."""
    async with agent_at_work(tmp_path, boards="a100-40gb:2") as it:
        await it.until(20, 20)
        it.node.need(it.node.gpu("0"), RecoveryAction.NODE_REBOOT)
        await it.until(20, 10)

    node_file = tmp_path / "node.yaml"
    await anyio.Path(node_file).write_text(
        "gpus: [{board: a100-40gb, recoveryAction: node-reboot}, {board: a100-40gb}]"
    )
    async with agent_at_work(tmp_path, boards=str(node_file)) as it:
        await it.until(20, 10)

        assert not it.state(0).verdict.healthy


async def test_operator_acknowledges(tmp_path: Path) -> None:
    """An acknowledged GPU is back at once, unless it still needs something."""
    # No look beside the events either: one begun before it was mended would find it lost after.
    config = QUICK.replace("100ms", "1h")

    async with agent_at_work(tmp_path, config=config) as it:
        await it.until(20, 20)
        gpu = it.node.gpu("0")
        it.node.raise_xid(gpu, 79)
        await it.until(20, 10)

        with pytest.raises(MetagpuError, match="lost"):
            await it.agent.health.acknowledge(it.state(0).gpu.id)

        it.node.recover(gpu)
        await it.agent.health.acknowledge(it.state(0).gpu.id)
        await it.until(20, 20)

        with pytest.raises(MetagpuError, match="nothing to acknowledge"):
            await it.agent.health.acknowledge(it.state(0).gpu.id)


async def test_old_driver_waits_for_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the driver reports no recovery action, passing checks do not heal a fatal XID."""
    told = anyio.Event()
    monkeypatch.setattr(health.HealthWatch, "_call_for_operator", lambda *_: told.set())
    node_file = tmp_path / "node.yaml"
    await anyio.Path(node_file).write_text('driver: "470.82"\ngpus: [{board: a100-40gb, count: 2}]')

    async with agent_at_work(tmp_path, boards=str(node_file)) as it:
        await it.until(20, 20)
        it.node.raise_xid(it.node.gpu("0"), 95)
        await it.until(20, 10)
        it.node.recover(it.node.gpu("0"))
        await told.wait()

        assert not it.state(0).verdict.healthy

        await it.agent.health.acknowledge(it.state(0).gpu.id)
        await it.until(20, 20)


async def test_lost_gpu_leaves_the_others_alone(tmp_path: Path) -> None:
    """A GPU that falls off the bus without a word is found by the rescan, and only it suffers."""
    async with agent_at_work(tmp_path, boards="a100-40gb:4") as it:
        await it.until(40, 40)
        it.node.lose(it.node.gpu("2"))
        await it.until(40, 30)

        assert [it.state(n).verdict.healthy for n in range(4)] == [True, True, False, True]

        await it.kubelet.admit(Pod.single("train", {METAGPU: 30}))
        it.node.recover(it.node.gpu("2"))
        await it.until(40, 40)


async def test_missing_nvml_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver nothing is offered; when it comes, everything is."""
    monkeypatch.setattr(health, "RETRY", 0.01)
    tries: list[object] = []
    start = Library.nvmlInitWithFlags

    def counted(self: Library, flags: object) -> int:
        tries.append(flags)
        return start(self, flags)

    monkeypatch.setattr(Library, "nvmlInitWithFlags", counted)
    async with agent_at_work(tmp_path, drivers=False) as it:
        with anyio.fail_after(30):
            while len(tries) < 3:  # noqa: ASYNC110 - a driver that is away tells nobody
                await anyio.sleep(0.01)

        assert it.kubelet.registrations[METAGPU] == 0

        it.node.restore_driver()
        await it.until(20, 20)


async def test_lost_driver_takes_all_and_gives_all_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that goes away takes every share, and brings them back when it returns."""
    monkeypatch.setattr(health, "RETRY", 0.01)

    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.fail_driver()
        await it.until(20, 0)
        it.node.restore_driver()
        await it.until(20, 20)

        assert it.kubelet.registrations[METAGPU] == 1


async def test_recovery_is_news(tmp_path: Path) -> None:
    """Others hear of a recovery, with what it rests on."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.raise_xid(it.node.gpu("0"), 119)
        await it.until(20, 10)

        async with anyio.create_task_group() as group:

            async def hear() -> None:
                fact = await it.news(GpuRecovered)
                assert isinstance(fact, GpuRecovered)
                assert fact.reason == "passed its checks for 0.1 s"

            group.start_soon(hear)
            await anyio.wait_all_tasks_blocked()
            it.node.recover(it.node.gpu("0"))

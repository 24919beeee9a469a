"""The agent as a whole, from NVML to the kubelet: what breaks, what comes back, what stays."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu import adoption, app, laying
from metagpu.app import Agent
from metagpu.backends.fraction import FractionBackend
from metagpu.core import health
from metagpu.core.driver import RecoveryAction
from metagpu.core.errors import ConfigError, MetagpuError
from metagpu.core.facts import GpuRecovered, SharesReleased
from metagpu.core.model import ResourceName
from metagpu.core.report import explanation, hindrance
from metagpu.nvml import Nvml
from metagpu.plugins import podresources
from metagpu.sim.boards import BOARDS
from metagpu.sim.kubelet import Pod, SimKubelet
from metagpu.sim.library import Library
from metagpu.sim.spec import simulated
from metagpu.sources import Source
from tests.agent_rig import METAGPU, QUICK, agent_at_work
from tests.heard import heard


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


async def test_operator_cordons_and_uncordons(tmp_path: Path) -> None:
    """A cordoned GPU gives nothing new, its pods stay, and a reload does not lift it."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await it.kubelet.admit(Pod.single("train", {METAGPU: 3}))
        used = it.state(0) if it.state(0).leases else it.state(1)
        name, gpu = {"gpu": used.gpu.pci_bus_id}, used.gpu

        assert await it.agent.orders.cordon({**name, "reason": " fan\n to be replaced"}) == (
            f"GPU {gpu} gives no new shares; held of it now: 3"
        )
        await it.until(20, 13)
        await it.agent.reload()
        cordon = it.agent.registry.snapshot.gpus[gpu.id].cordon
        assert cordon is not None
        assert cordon.reason == "fan to be replaced"
        assert [pod.name for pod in it.kubelet.pods] == ["train"]

        assert await it.agent.orders.uncordon(name) == f"GPU {gpu} gives new shares again"
        await it.until(20, 20)
        with pytest.raises(MetagpuError, match=rf"^GPU {gpu.index} \({gpu.id}\) is not cordoned$"):
            await it.agent.orders.uncordon(name)
        with pytest.raises(MetagpuError, match="there is no GPU '9' here"):
            await it.agent.orders.cordon({"gpu": "9"})


async def test_looking_makes_nothing_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be offered is told as it would be when everything is ready."""
    monkeypatch.setattr(FractionBackend, "readies", True)
    agent = Agent(Source(), Nvml(Library(simulated("t4:1"))))
    await agent.look()

    [state] = agent.registry.snapshot.gpus.values()
    assert state.suspended == {}
    assert state.free(ResourceName(METAGPU)) == 100


@pytest.mark.parametrize(
    ("board", "options", "free", "reason"),
    [
        ("a100-40gb:1", "", 0, "MIG mode is off; turn it on (`nvidia-smi -i 0 -mig 1`)"),
        ("a100-40gb:1", ", enableMig: true", 0, "it waits for a reset then"),
        ("h100-80gb:1", "", 0, "MIG mode is off; turn it on"),
        ("h100-80gb:1", ", enableMig: true", 7, ""),
    ],
)
async def test_looking_foresees_what_mig_mode_hinders(
    tmp_path: Path, board: str, options: str, free: int, reason: str
) -> None:
    """Nothing is told as free that the daemon would not give before MIG is on."""
    file = tmp_path / "mig.yaml"
    profile = "1g.5gb" if "a100" in board else "1g.10gb"
    cut = f"{{backend: mig, profiles: [{profile}]{options}}}"
    await anyio.Path(file).write_text(
        f"version: metagpu/v1\npools: [{{name: a, backends: [{cut}]}}]\n"
    )
    agent = Agent(Source((file,)), Nvml(Library(simulated(board))))
    await agent.look()

    [state] = agent.registry.snapshot.gpus.values()
    assert state.free(ResourceName(f"nvidia.com/mig-{profile}")) == free
    pause = state.suspended.get("mig")
    assert (reason in pause.reason) if pause else not reason
    told = explanation(agent.registry.snapshot, agent.layout)
    assert [it["allocatable"] for it in told["resources"].values()] == [free]


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


async def test_gpu_added_while_running(tmp_path: Path) -> None:
    """A GPU that NVML lists later is offered without another registration."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.add_gpu(it.node.gpus[0].board)
        await it.until(30, 30)

        assert it.kubelet.registrations[METAGPU] == 1


async def test_reload_changes_only_what_differs(tmp_path: Path) -> None:
    """A reload that adds a resource leaves the other's stream untouched."""
    two = QUICK.replace("name: all", "name: first\n    gpus: {index: 0}")
    added = two + "  - name: rest\n    backends: [{backend: fraction, resource: example.com/r}]\n"

    async with agent_at_work(tmp_path, config=two) as it:
        await it.until(10, 10)
        await anyio.Path(it.config_file).write_text(added)
        await it.agent.reload()
        await it.until(100, 100, "example.com/r")

        assert it.kubelet.lists[METAGPU] == 1
        assert it.kubelet.registrations[METAGPU] == 1


async def test_a_fault_of_our_own_in_a_reload_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails is told with where it came from, and the next reload is tried as ever."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await anyio.Path(it.config_file).write_text(QUICK.replace("10}", "5}"))

        def fail(*_: object) -> None:
            raise RuntimeError("nobody thought of that")

        with heard(adoption) as lines, monkeypatch.context() as patched:
            patched.setattr(FractionBackend, "shares", fail)
            await it.agent.reload()
        [line] = [each for each in lines if each["log_level"] == "error"]
        assert "by a fault of metagpu's own; the last good one stays" in line["event"]
        assert line["exc_info"]
        assert it.agent.adoption.report()["error"] == (
            "metagpu failed (RuntimeError: nobody thought of that); see its log"
        )
        await it.until(20, 20)

        await it.agent.reload()
        await it.until(10, 10)
        assert it.agent.adoption.report()["error"] is None


async def test_a_fault_of_our_own_with_a_new_gpu_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on offer stays so, and the daemon goes on."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)

        def fail(*_: object) -> None:
            raise RuntimeError("nobody thought of that")

        with heard(laying) as lines, monkeypatch.context() as patched:
            patched.setattr(FractionBackend, "shares", fail)
            it.node.add_gpu(BOARDS["t4"])
            with anyio.fail_after(30):
                while not lines:  # noqa: ASYNC110 - a log line has no event
                    await anyio.sleep(0.01)
        assert lines[0]["event"] == "new GPUs are not offered, by a fault of metagpu's own"
        await it.until(20, 20)


async def test_bad_reload_keeps_the_last_good_one(tmp_path: Path) -> None:
    """A file that is wrong is not taken, and the next good one is, without a restart."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)

        for wrong in ("version: metagpu/v1\npools: 3", "{", QUICK.replace("10}", "1000000}")):
            await anyio.Path(it.config_file).write_text(wrong)
            await it.agent.reload()

            assert it.agent.config.envelope.pools[0].name == "all"

        await anyio.Path(it.config_file).write_text(QUICK.replace("10}", "5}"))
        await it.agent.reload()
        await it.until(10, 10)


@pytest.mark.parametrize(
    "changed",
    [
        QUICK.replace("fraction,", "fraction, resource: example.com/new,"),
        QUICK.replace("10}", "100}"),
    ],
    ids=["renamed", "cut anew"],
)
async def test_changed_cut_waits_for_who_holds_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A GPU whose pod got it under the old configuration is not given away under the new one."""
    monkeypatch.setattr(podresources, "PERIOD", 0.02)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)
    resource = "example.com/new" if "new" in changed else METAGPU
    shares = 100 if "100}" in changed else 10

    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        old = Pod.single("old", {METAGPU: 3})
        await it.kubelet.admit(old)
        await it.told()
        await anyio.Path(it.config_file).write_text(changed)
        await it.agent.reload()
        await it.until(2 * shares, shares, resource)

        assert "held by default/old (main)" in hindrance(it.state(0))
        assert it.state(0).free(ResourceName(resource)) == 0

        await it.kubelet.admit(Pod.single("new", {resource: shares}))

        assert len(it.state(1).leases) == shares

        await it.kubelet.delete(old)
        await it.until(2 * shares, 2 * shares, resource)

        assert it.state(0).waits_for == ()


async def test_gpu_of_another_plugin_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that a pod holds through another plugin is not offered until that pod ends."""
    monkeypatch.setattr(podresources, "PERIOD", 0.02)
    theirs = "nvidia.com/gpu"
    both = QUICK + f"  - name: other\n    backends: [{{backend: fraction, resource: {theirs}}}]\n"

    async with agent_at_work(
        tmp_path, config=both.replace("all", "all\n    gpus: {index: 1}")
    ) as it:
        await it.until(10, 10)
        await it.until(100, 100, theirs)
        foreign = Pod.single("foreign", {theirs: 1})
        await it.kubelet.admit(foreign)
        await it.told()
        await anyio.Path(it.config_file).write_text(QUICK)
        await it.agent.reload()
        await it.until(20, 10)
        await it.kubelet.delete(foreign)
        await it.until(20, 20)


async def test_gpu_taken_out_of_the_node(tmp_path: Path) -> None:
    """A GPU that NVML lists no more stays on the list, unhealthy (case 15)."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.remove_gpu(it.node.gpu("1"))
        await it.until(20, 10)

        # Who counted it just before it went hears that its index is none.
        reasons = ("NVML does not list it any more", "Invalid Argument")
        assert it.state(1).verdict.reason.endswith(reasons)


def test_bad_configuration_at_start_is_one_clear_error(tmp_path: Path) -> None:
    """A configuration that is wrong at start raises, naming file, line and path."""
    from metagpu.app import Agent  # noqa: PLC0415
    from metagpu.nvml import Nvml  # noqa: PLC0415

    file = tmp_path / "bad.yaml"
    file.write_text("version: metagpu/v1\npools:\n  - name: a\n    backends: [{backend: magic}]\n")

    with pytest.raises(
        ConfigError, match=r"bad.yaml: 4: pools\[0\].backends\[0\].backend: 'magic'"
    ):
        Agent(Source((file,)), Nvml())


async def test_device_node_that_comes_late_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device node that was not there at the start is given to the next pod."""
    monkeypatch.setattr(laying, "NODES_PERIOD", 0.01)
    uvm = tmp_path / "dev" / "nvidia-uvm"

    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        before = await it.kubelet.admit(Pod.single("before", {METAGPU: 1}))
        laid = it.agent.layout
        await anyio.Path(uvm.parent).mkdir()
        await anyio.Path(uvm).touch()
        with anyio.fail_after(30):
            while it.agent.layout is laid:  # noqa: ASYNC110 - nothing tells of it: no offer changed
                await anyio.sleep(0.01)
        after = await it.kubelet.admit(Pod.single("after", {METAGPU: 1}))

    assert before["main"].devices == ()
    assert [node.container_path for node in after["main"].devices] == ["/dev/nvidia-uvm"]


async def test_gpu_in_mig_mode_is_cut_by_nobody(tmp_path: Path) -> None:
    """A GPU in MIG mode has no fractions, and the layout says why."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        it.node.gpus[0].mig.enabled = True
        await it.until(10, 10)

        assert it.agent.layout.assignments[0].why.endswith("nothing is cut: MIG mode is on")


async def test_reload_is_not_undone_by_a_gpu_that_comes(tmp_path: Path) -> None:
    """A reload and a GPU that comes at once end in the new configuration over all GPUs."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await anyio.Path(it.config_file).write_text(QUICK.replace("10}", "20}"))

        async with anyio.create_task_group() as group:
            group.start_soon(it.agent.reload)
            for _ in range(5):
                group.start_soon(it.agent.laying.again)

        assert len(it.agent.layout.shares) == 40
        await it.until(40, 40)


async def test_leases_follow_the_kubelet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease gets its holder from PodResources and ends when the pod is gone."""
    monkeypatch.setattr(podresources, "PERIOD", 0.02)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)

    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        train = Pod.single("train", {METAGPU: 5})
        await it.kubelet.admit(train)

        await it.told()

        [holder] = {str(lease.holder) for lease in it.state(0).leases.values()}
        assert holder == "default/train (main)"
        assert it.state(0).owner == "fraction"

        async with anyio.create_task_group() as group:
            group.start_soon(it.news, SharesReleased)
            await anyio.wait_all_tasks_blocked()
            await it.kubelet.delete(train)

        assert it.state(0).leases == {}
        assert it.state(0).owner is None


async def test_restarted_daemon_knows_who_holds_what(tmp_path: Path) -> None:
    """After a restart the leases are read from the kubelet, ids alone saying what they are."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    async with kubelet.running():
        async with agent_at_work(tmp_path, kubelet=kubelet) as it:
            await it.until(20, 20)
            await kubelet.admit(Pod.single("train", {METAGPU: 15}))

        async with agent_at_work(tmp_path, kubelet=kubelet) as it:
            await it.settles(lambda now: any(gpu.leases for gpu in now.gpus.values()))

            assert sorted(len(it.state(n).leases) for n in range(2)) == [5, 10]


async def test_what_may_conflict_is_offered_once_it_is_known_who_holds_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted daemon gives no whole GPU away whose shares a pod of before holds."""
    mixed = QUICK.replace("sharesPerGpu: 10}]", "sharesPerGpu: 10}, {backend: whole}]")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    observed, early = podresources.observed, []

    async with kubelet.running():
        async with agent_at_work(tmp_path, config=mixed, kubelet=kubelet) as it:
            await it.until(20, 20)
            await kubelet.admit(Pod.single("train", {METAGPU: 5}))
        before = sum(kubelet.registrations.values())

        async def slow(*arguments: Any) -> Any:  # noqa: ANN401 - as the function's own
            monkeypatch.setattr(podresources, "observed", observed)  # the first look alone
            with anyio.move_on_after(0.3):
                await kubelet.wait_for(lambda: sum(kubelet.registrations.values()) > before)
                early.append("registered")
            return await observed(*arguments)

        monkeypatch.setattr(app, "FIRST_LOOK", 1e9)
        monkeypatch.setattr(podresources, "observed", slow)
        async with agent_at_work(tmp_path, config=mixed, kubelet=kubelet) as it:
            await it.until(20, 20)

            assert not early
            assert any(state.withheld for state in it.agent.registry.snapshot.gpus.values())


async def test_a_fault_over_a_changed_file_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody thought of leaves the node as it is, and the next change is taken at once."""

    async def faulty(_: object) -> None:
        raise KeyError("a fault of ours")

    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        adopts = it.agent.adoption
        with monkeypatch.context() as patched:
            patched.setattr(adopts, "_adopt", faulty)
            await anyio.Path(it.config_file).write_text(QUICK.replace("10}", "5}"))
            with anyio.fail_after(30):
                while adopts.error is None:  # noqa: ASYNC110 - it is no fact, and has no event
                    await anyio.sleep(0.005)
        await it.kubelet.admit(Pod.single("train", {METAGPU: 5}))

        await anyio.Path(it.config_file).write_text(QUICK.replace("10}", "20}"))
        await it.until(40, 20)


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


async def test_whole_gpus_are_the_best_connected(tmp_path: Path) -> None:
    """Two whole V100s are the pair with the most NVLinks, and one is taken where it hurts least."""
    config = "version: metagpu/v1\npools: [{name: all, backends: [{backend: whole}]}]\n"
    gpu = "nvidia.com/gpu"

    async with agent_at_work(tmp_path, boards="v100-16gb:8", config=config) as it:
        await it.until(8, 8, gpu)
        [pair] = (await it.kubelet.admit(Pod.single("pair", {gpu: 2}))).values()
        ids = [it.node.gpu(index).id for index in (2, 3)]

        assert pair.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(ids)
        assert pair.envs["METAGPU_MEMORY_MIB"] == ",".join(f"{i}=16384" for i in ids)
        [alone] = (await it.kubelet.admit(Pod.single("alone", {gpu: 1}))).values()
        assert alone.envs["NVIDIA_VISIBLE_DEVICES"] == it.node.gpu(0).id

"""Other configurations while the daemon runs: the whole agent, a node and a kubelet."""

import gc
from functools import partial
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.agent import config_loader, layout_manager
from metagpu.agent.agent import Agent
from metagpu.agent.config_source import Backends, ConfigSource, ConfigText, Loaded
from metagpu.agent.config_watch import ConfigWatchTiming
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.timing import AgentTiming
from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.availability.conflict import orphaned_leases
from metagpu.core.availability.reasons import count_free
from metagpu.core.config.config import Config
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.model.shares import ResourceName
from metagpu.core.model.snapshot import Offer
from metagpu.core.reports.status import explain_report
from metagpu.core.usage.lease_differences import claims_of_holders, find_mixed_requests
from metagpu.core.usage.lost_devices import find_lost_gpus
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import AdmissionError, SimPod
from metagpu.sim.machine.gpu_models import GPU_MODELS
from tests.rigs.agent import METAGPU, QUICK, QUICK_USAGE, agent_at_work
from tests.rigs.build import refusal
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes

FIVE = QUICK.replace("10}", "5}")


async def test_reload_changes_only_what_differs(tmp_path: Path) -> None:
    """A reload that adds a resource leaves the other's stream untouched."""
    two = QUICK.replace("name: all", "name: first\n    gpus: {index: 0}")
    added = two + "  - name: rest\n    backends: [{backend: fraction, resource: example.com/r}]\n"

    async with agent_at_work(tmp_path, config=two) as scene:
        await scene.until(10, 10)
        await anyio.Path(scene.config_file).write_text(added)
        await scene.agent.reload()
        await scene.until(100, 100, "example.com/r")

        assert scene.kubelet.lists[METAGPU] == 1
        assert scene.kubelet.registrations[METAGPU] == 1


async def test_nothing_of_an_earlier_configuration_stays(tmp_path: Path) -> None:
    """No work by the clock, which last saw thousands of shares, holds any of them."""

    def offers_of(shares: int) -> int:
        offers = (each for each in gc.get_objects() if isinstance(each, Offer))
        return sum(len(offer.shares) == shares for offer in offers)

    rare = replace(QUICK_USAGE, lost_period=1e6, mixed_period=1e6, absent_period=1e6)
    async with agent_at_work(tmp_path, usage_timing=rare) as scene:
        await scene.until(20, 20)
        await anyio.Path(scene.config_file).write_text(QUICK.replace("10}", "1000}"))
        await scene.agent.reload()
        await scene.until(2000, 2000)
        for look in (claims_of_holders, find_mixed_requests, find_lost_gpus):
            look(scene.agent.registry.snapshot)
        assert offers_of(2000)

        gc.disable()
        try:
            await anyio.Path(scene.config_file).write_text(QUICK)
            await scene.agent.reload()
            await scene.until(20, 20)
            await becomes(lambda: not offers_of(2000))  # also what a thread still reads
        finally:
            gc.enable()


async def test_a_reload_that_is_cut_short_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that goes on after an exchange has the configuration that came meanwhile."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        loader, entered = scene.agent.config_loader, anyio.Event()
        apply = LayoutManager.apply

        async def never_end(*_: object) -> None:
            entered.set()
            await anyio.sleep_forever()

        monkeypatch.setattr(ConfigSource, "read", lambda _: (ConfigText("f", FIVE),))
        monkeypatch.setattr(LayoutManager, "apply", never_end)
        async with anyio.create_task_group() as group:
            group.start_soon(loader.reload)
            await entered.wait()
            monkeypatch.setattr(LayoutManager, "apply", apply)
            group.cancel_scope.cancel()
        await loader.reload(again=False)
        await scene.until(10, 10)


async def test_a_choice_of_the_cluster_during_a_reload_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files mean something else under another label, also for a reload under way."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        loader, contexts = scene.agent.config_loader, list[str | None]()
        entered, goes_on = anyio.Event(), anyio.Event()
        apply, parse = LayoutManager.apply, ConfigSource.parse

        def parse_noted(
            source: ConfigSource, texts: tuple[ConfigText, ...], backends: Backends
        ) -> Loaded:
            contexts.append(source.effective_context.mig_config)
            return parse(source, texts, backends)

        async def apply_slowly(manager: LayoutManager, config: Config) -> None:
            entered.set()
            await goes_on.wait()
            await apply(manager, config)

        monkeypatch.setattr(ConfigSource, "read", lambda _: (ConfigText("f", FIVE),))
        monkeypatch.setattr(ConfigSource, "parse", parse_noted)
        monkeypatch.setattr(LayoutManager, "apply", apply_slowly)
        choice = replace(loader._source.cluster, mig_config="all-balanced")
        async with anyio.create_task_group() as group:
            group.start_soon(partial(loader.reload, again=False))
            await entered.wait()
            group.start_soon(loader.follow_cluster, choice)
            await anyio.wait_all_tasks_blocked()
            goes_on.set()
        assert contexts == [None, "all-balanced"]


async def test_a_choice_that_is_refused_after_a_reload_was_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome is that of the cluster's choice, not of the reload that was under way."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        loader = scene.agent.config_loader
        entered, goes_on = anyio.Event(), anyio.Event()

        async def apply(_: LayoutManager, __: Config) -> None:
            if goes_on.is_set():
                raise ConfigError("no GPU can have this", ConfigReason.NO_GPU, file="f")
            entered.set()
            await goes_on.wait()

        monkeypatch.setattr(LayoutManager, "apply", apply)
        choice = replace(loader._source.cluster, mig_config="all-balanced")
        async with anyio.create_task_group() as group:
            group.start_soon(loader.reload)
            await entered.wait()
            group.start_soon(loader.follow_cluster, choice)
            await anyio.wait_all_tasks_blocked()
            goes_on.set()
        assert loader.outcome().rejection == loader.error == "f: no GPU can have this"


async def test_a_choice_that_is_being_read_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label has an outcome once its configuration is in force; `failed` is said of it alone."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        loader, entered, goes_on = scene.agent.config_loader, anyio.Event(), anyio.Event()

        async def apply_slowly(_: LayoutManager, __: Config) -> None:
            entered.set()
            await goes_on.wait()

        monkeypatch.setattr(LayoutManager, "apply", apply_slowly)
        choice = replace(loader._source.cluster, mig_config="all-balanced")
        async with anyio.create_task_group() as group:
            group.start_soon(loader.follow_cluster, choice)
            await entered.wait()
            assert loader.outcome().rejection is None
            goes_on.set()
        assert "all-balanced has no effect" in (loader.outcome().rejection or "")


async def test_an_internal_error_in_a_reload_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error is logged with its traceback, and the next reload works."""
    # The watch of the file would reload too, before or after this test does.
    watch = AgentTiming(config_watch=ConfigWatchTiming(quiet=1e6, longest=1e6))
    async with agent_at_work(tmp_path, timing=watch) as scene:
        await scene.until(20, 20)
        await anyio.Path(scene.config_file).write_text(QUICK.replace("10}", "5}"))

        def fail(*_: object) -> None:
            raise RuntimeError("nobody thought of that")

        with capture_module_logs(config_loader) as lines, monkeypatch.context() as patched:
            patched.setattr(FractionBackend, "shares", fail)
            await scene.agent.reload()
        [line] = [each for each in lines if each["log_level"] == "error"]
        assert "by a fault of metagpu's own" in line["event"]
        assert line["effect"] == "the last good configuration stays"
        assert line["exc_info"]
        assert scene.agent.config_loader.report().error == (
            "metagpu failed (RuntimeError: nobody thought of that); see its log"
        )
        await scene.until(20, 20)

        await scene.agent.reload()
        await scene.until(10, 10)
        assert scene.agent.config_loader.report().error is None


async def test_an_internal_error_with_a_new_gpu_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an internal error the offer stays, and the daemon continues."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)

        def fail(*_: object) -> None:
            raise RuntimeError("nobody thought of that")

        with capture_module_logs(layout_manager) as lines, monkeypatch.context() as patched:
            patched.setattr(FractionBackend, "shares", fail)
            scene.node.add_gpu(GPU_MODELS["t4"])
            with anyio.fail_after(30):
                while not lines:  # noqa: ASYNC110 - a log line has no event
                    await anyio.sleep(0.01)
        assert lines[0]["event"] == "layout of new gpus failed, by a fault of metagpu's own"
        await scene.until(20, 20)


async def test_bad_reload_keeps_the_last_good_one(tmp_path: Path) -> None:
    """A wrong file is refused, and the next good one takes effect without a restart."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)

        for wrong in ("version: metagpu/v1\npools: 3", "{", QUICK.replace("10}", "1000000}")):
            await anyio.Path(scene.config_file).write_text(wrong)
            await scene.agent.reload()

            assert scene.agent.config.root.pools[0].name == "all"

        await anyio.Path(scene.config_file).write_text(QUICK.replace("10}", "5}"))
        await scene.agent.reload()
        await scene.until(10, 10)


async def test_another_name_waits_for_the_holder_of_the_gpu(tmp_path: Path) -> None:
    """A GPU of a pod from the old configuration is not given away under the new name."""
    timing = KubeletTiming(poll_period=0.02, contended_period=0.05, settle=0.01)
    resource = "example.com/new"

    async with agent_at_work(tmp_path, kubelet_timing=timing) as scene:
        await scene.until(20, 20)
        old = SimPod.single("old", {METAGPU: 3})
        await scene.kubelet.admit(old)
        await scene.wait_holders()
        changed = QUICK.replace("fraction,", f"fraction, resource: {resource},")
        await anyio.Path(scene.config_file).write_text(changed)
        await scene.agent.reload()
        await scene.until(20, 10, resource)

        assert "held by default/old (main)" in refusal(scene.state(0))
        assert count_free(scene.state(0), ResourceName(resource)) == 0

        await scene.kubelet.admit(SimPod.single("new", {resource: 10}))

        assert len(scene.state(1).leases) == 10

        await scene.kubelet.delete(old)
        await scene.until(20, 20, resource)

        assert orphaned_leases(scene.state(0).shares, scene.state(0).leases) == ()


async def test_smaller_shares_of_a_gpu_are_offered_beside_its_pods(tmp_path: Path) -> None:
    """Of a GPU of which a pod holds 3 of 10 shares, 70 of 100 are free; the rest wait for it."""
    timing = KubeletTiming(poll_period=0.02, contended_period=0.05, settle=0.01)

    async with agent_at_work(tmp_path, "a100-40gb", kubelet_timing=timing) as scene:
        await scene.until(10, 10)
        old = SimPod.single("old", {METAGPU: 3})
        await scene.kubelet.admit(old)
        await scene.wait_holders()
        await anyio.Path(scene.config_file).write_text(QUICK.replace("10}", "100}"))
        await scene.agent.reload()
        await scene.until(100, 73)  # the kubelet counts the 3 held ids

        [gpu] = explain_report(scene.agent.registry.snapshot, scene.agent.layout).gpus
        assert (gpu.waits_for or "").endswith(
            "is held by default/old (main) under cnvrg.io/metagpu, which is not on offer as it was "
            "granted; 27 free shares wait for the end of that pod"
        )
        await scene.kubelet.admit(SimPod.single("new", {METAGPU: 70}))
        with pytest.raises(AdmissionError):
            await scene.kubelet.admit(SimPod.single("more", {METAGPU: 1}))

        await scene.kubelet.delete(old)
        await scene.until(100, 100)
        await scene.kubelet.admit(SimPod.single("more", {METAGPU: 30}))


async def test_more_replicas_are_there_at_once(tmp_path: Path) -> None:
    """Of 10 replicas in place of 4 held ones, six are free; of 3 none is until two pods end."""
    timing = KubeletTiming(poll_period=0.02, contended_period=0.05, settle=0.01)
    slices = QUICK.replace("fraction, sharesPerGpu: 10", "timeslice, replicas: 4")
    name = "nvidia.com/gpu.shared"

    async with agent_at_work(tmp_path, "a100-40gb", slices, kubelet_timing=timing) as scene:
        await scene.until(4, 4, name)
        pods = [SimPod.single(f"old{number}", {name: 1}) for number in range(4)]
        for pod in pods:
            await scene.kubelet.admit(pod)
        await scene.wait_holders()
        await anyio.Path(scene.config_file).write_text(
            slices.replace("replicas: 4", "replicas: 10")
        )
        await scene.agent.reload()
        await scene.until(10, 10, name)
        assert orphaned_leases(scene.state(0).shares, scene.state(0).leases) == ()
        six = [SimPod.single(f"new{number}", {name: 1}) for number in range(6)]
        for pod in six:
            await scene.kubelet.admit(pod)
        await scene.wait_holders()

        for pod in six:
            await scene.kubelet.delete(pod)
        await scene.wait_snapshot(lambda now: all(len(i.leases) == 4 for i in now.gpus.values()))
        await anyio.Path(scene.config_file).write_text(slices.replace("replicas: 4", "replicas: 3"))
        await scene.agent.reload()
        await scene.until(3, 3, name)
        assert count_free(scene.state(0), ResourceName(name)) == 0
        for pod in pods[:2]:
            await scene.kubelet.delete(pod)
        await scene.wait_snapshot(
            lambda now: all(count_free(i, ResourceName(name)) == 1 for i in now.gpus.values())
        )


def test_bad_configuration_at_start_is_one_clear_error(tmp_path: Path) -> None:
    """A wrong configuration at the start raises, with file, line and path."""
    file = tmp_path / "bad.yaml"
    file.write_text("version: metagpu/v1\npools:\n  - name: a\n    backends: [{backend: magic}]\n")

    with pytest.raises(
        ConfigError, match=r"bad.yaml: 4: pools\[0\].backends\[0\].backend: 'magic'"
    ):
        Agent(ConfigSource((file,)), NvmlDriver())


async def test_reload_is_not_undone_by_a_gpu_that_comes(tmp_path: Path) -> None:
    """A reload and a GPU that comes at once end in the new configuration over all GPUs."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        await anyio.Path(scene.config_file).write_text(QUICK.replace("10}", "20}"))

        async with anyio.create_task_group() as group:
            group.start_soon(scene.agent.reload)
            for _ in range(5):
                group.start_soon(scene.agent.layout_manager.reapply)

        assert len(scene.agent.layout.shares) == 40
        await scene.until(40, 40)


async def test_an_internal_error_over_a_changed_file_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an internal error the node is unchanged, and the next change takes effect."""

    async def faulty(*_: object) -> None:
        raise KeyError("a fault of ours")

    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        loader = scene.agent.config_loader
        with monkeypatch.context() as patched:
            patched.setattr(scene.agent.layout_manager, "apply", faulty)
            await anyio.Path(scene.config_file).write_text(QUICK.replace("10}", "5}"))
            with anyio.fail_after(30):
                while loader.error is None:  # noqa: ASYNC110 - it is no fact, and has no event
                    await anyio.sleep(0.005)
        await scene.kubelet.admit(SimPod.single("train", {METAGPU: 5}))

        await anyio.Path(scene.config_file).write_text(QUICK.replace("10}", "20}"))
        await scene.until(40, 35)  # 5 of 20 shares wait for the pod, which holds half of a GPU

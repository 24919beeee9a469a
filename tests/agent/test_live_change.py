"""A configuration that changes while the agent serves: what changes, stays and is logged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu.agent import config_loader
from metagpu.agent.config_source import ConfigSource
from metagpu.core.config.errors import ConfigError
from metagpu.core.config.profiles import ProfileChoice
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_config_watch import mounted
from tests.rigs.agent import METAGPU, QUICK, Scene, agent_at_work
from tests.rigs.logs import capture_module_logs

SLICES = """\
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources: [{name: nvidia.com/gpu, replicas: 4}]
"""
SHARED = "nvidia.com/gpu.shared"
TWO = """\
version: metagpu/v1
pools:
  - name: parts
    gpus: {index: 0}
    backends: [{backend: fraction, sharesPerGpu: 10}]
  - name: slices
    gpus: {index: 1}
    backends: [{backend: timeslice, replicas: 4}]
"""


async def write_config(scene: Scene, text: str) -> None:
    """Replace the agent's file by one rename, so that the agent never reads part of a file."""
    new = anyio.Path(scene.config_file.with_suffix(".new"))
    await new.write_text(text)
    await new.rename(scene.config_file)


async def configuration(scene: Scene) -> Mapping[str, Any]:
    """Return the configuration's part of `status`."""
    status: Any = await scene.status()
    answer: Mapping[str, Any] = status["configuration"]
    return answer


async def plan_of(scene: Scene, text: str) -> Mapping[str, Any]:
    """Return the agent's plan for a configuration."""
    plan: Any = await scene.agent.commands["plan"]({"text": text, "file": "new.yaml"})
    answer: Mapping[str, Any] = plan
    return answer


async def test_a_file_that_changes_is_taken(tmp_path: Path) -> None:
    """A rewritten file takes effect without a signal, as by SIGHUP."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        await write_config(scene, QUICK.replace("10}", "5}"))
        await scene.until(10, 10)

        assert scene.kubelet.registrations[METAGPU] == 1


async def test_an_exchanged_config_map_is_taken(tmp_path: Path) -> None:
    """The exchange of a mounted ConfigMap's `..data` takes effect, in a foreign format too."""
    folder = tmp_path / "config"
    mounted(folder, SLICES)

    async with agent_at_work(tmp_path, source=ConfigSource((folder,))) as scene:
        await scene.until(8, 8, SHARED)
        mounted(folder, SLICES.replace("4", "10"), 2)
        await scene.until(20, 20, SHARED)
        mounted(folder, SLICES.replace("4", "3"), 3)
        await scene.until(6, 6, SHARED)

        assert scene.kubelet.registrations[SHARED] == 1
        assert (await configuration(scene))["profiles"] == ["config.yaml"]


async def test_a_bad_file_keeps_the_last_good_one_and_is_logged_once(tmp_path: Path) -> None:
    """A wrong file is one log event and an error in `status`, until the next good file."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        with capture_module_logs(config_loader) as lines:
            for _ in range(2):
                await write_config(scene, QUICK.replace("sharesPerGpu", "sharePerGpu"))
                await scene.agent.config_loader.reload(again=False)
            answer = await configuration(scene)
            await write_config(scene, QUICK.replace("10}", "5}"))
            await scene.until(10, 10)

        [error] = [line for line in lines if line["log_level"] == "error"]
        assert error["error"] == answer["error"]
        assert answer["error"].startswith(
            f"{scene.config_file}: 6: pools[0].backends[0].sharePerGpu: "
        )
        assert (await configuration(scene))["error"] is None


async def test_a_file_that_goes_keeps_the_last_good_one(tmp_path: Path) -> None:
    """A removed file is logged, and its last content stays in force."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        await anyio.Path(scene.config_file).unlink()
        await scene.agent.config_loader.reload(again=False)

        report = await configuration(scene)
        assert report["error"] == f"{scene.config_file}: cannot be read: No such file or directory"
        assert report["reason"] == "unreadable"

        await write_config(scene, QUICK.replace("10}", "5}"))
        await scene.until(10, 10)


async def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A configuration that is too large for the GPUs is refused like a wrong one."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        await write_config(scene, QUICK.replace("10}", "60000}"))
        await scene.agent.config_loader.reload(again=False)

        error = (await configuration(scene))["error"]
        assert "would have 120000 shares or more; the kubelet takes" in error
        assert scene.agent.config.root.pools[0].name == "all"
        assert len(scene.agent.layout.shares) == 20


async def test_notes_on_a_foreign_file_are_logged_once(tmp_path: Path) -> None:
    """A setting without effect is one warning in the log, and a note in `status`."""
    folder = tmp_path / "config"
    mounted(folder, SLICES)
    strange = SLICES + "flags: {gdsEnabled: true}\n"

    async with agent_at_work(tmp_path, source=ConfigSource((folder,))) as scene:
        await scene.until(8, 8, SHARED)
        with capture_module_logs(config_loader) as lines:
            mounted(folder, strange, 2)
            await scene.agent.config_loader.reload(again=False)
            mounted(folder, strange.replace("4", "3"), 3)
            await scene.until(6, 6, SHARED)

        [note] = [line["note"] for line in lines if line["log_level"] == "warning"]
        assert note.endswith("it would have given containers GPUDirect Storage's devices")
        assert (await configuration(scene))["notes"] == [note]
        assert (await configuration(scene))["formats"] == ["NVIDIA device plugin v1"]


async def test_unchanged_resources_get_no_message(tmp_path: Path) -> None:
    """A resource that the plan calls unchanged keeps its stream, with no message."""
    then = TWO.replace("timeslice, replicas: 4", "whole")

    async with agent_at_work(tmp_path, config=TWO) as scene:
        await scene.until(10, 10)
        await scene.until(4, 4, SHARED)
        plan = await plan_of(scene, then)
        before = dict(scene.kubelet.lists), dict(scene.kubelet.registrations)

        assert {name: each["change"] for name, each in plan["resources"].items()} == {
            METAGPU: "unchanged",
            SHARED: "removed",
            "nvidia.com/gpu": "added",
        }
        assert [gpu["change"] for gpu in plan["gpus"]] == ["unchanged", "changed"]

        await write_config(scene, then)
        await scene.until(1, 1, "nvidia.com/gpu")

        assert scene.kubelet.lists[METAGPU] == before[0][METAGPU]
        assert scene.kubelet.registrations[METAGPU] == before[1][METAGPU]
        assert scene.kubelet.open_streams[METAGPU] == 1


async def test_a_plan_names_the_pods_that_it_waits_for(tmp_path: Path) -> None:
    """A GPU in use changes when its pod ends, and the plan names the pod beforehand."""
    timing = KubeletTiming(settle=0.01)

    async with agent_at_work(tmp_path, config=TWO, kubelet_timing=timing) as scene:
        await scene.until(10, 10)
        await scene.kubelet.admit(SimPod.single("old", {METAGPU: 3}))
        await scene.wait_holders()
        plan = await plan_of(scene, TWO.replace("10}", "20}"))

        assert [gpu["waitsFor"] for gpu in plan["gpus"]] == [
            [{"holder": "default/old (main)", "resource": METAGPU, "shares": 3}],
            [],
        ]
        assert len(scene.agent.layout.shares) == 14


async def test_a_plan_of_a_wrong_configuration_is_refused(tmp_path: Path) -> None:
    """A plan of a wrong configuration is refused with the same error as its reload."""
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)

        with pytest.raises(ConfigError, match=r"^new.yaml: 1: missing key `pools`"):
            await plan_of(scene, "version: metagpu/v1")
        too_large = QUICK.replace("sharesPerGpu: 10", "memoryUnit: 80Gi")
        with pytest.raises(ConfigError, match=r"pools\[0\]: no GPU can have this: GPUs 0, 1: a "):
            await plan_of(scene, too_large)


async def test_a_profile_that_goes_keeps_the_last_good_one(tmp_path: Path) -> None:
    """A chosen profile that leaves the ConfigMap stays in force with its last text."""
    folder = tmp_path / "config"
    mounted(folder, SLICES)

    async with agent_at_work(
        tmp_path, source=ConfigSource((folder,), ProfileChoice("config"))
    ) as scene:
        await scene.until(8, 8, SHARED)
        (folder / "config.yaml").rename(folder / "other.yaml")
        await scene.agent.config_loader.reload(again=False)

        assert (await configuration(scene))["error"] == (
            f"{folder}: there is no profile 'config' (--profile); there are: other.yaml"
        )
        assert scene.kubelet.capacity()[SHARED] == 8

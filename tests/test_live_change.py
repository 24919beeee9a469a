"""A configuration that changes while the agent serves: what is taken, what stays, what is said."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu import adoption
from metagpu.core.errors import ConfigError
from metagpu.core.profiles import Choice
from metagpu.plugins import podresources
from metagpu.sim.kubelet import Pod
from metagpu.sources import Source
from tests.agent_rig import METAGPU, QUICK, Scene, agent_at_work
from tests.heard import heard
from tests.plugins.test_config_files import mounted

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


async def written(it: Scene, text: str) -> None:
    """Put another in the place of the agent's file: nobody ever reads half of one."""
    new = anyio.Path(it.config_file.with_suffix(".new"))
    await new.write_text(text)
    await new.rename(it.config_file)


async def configuration(it: Scene) -> Mapping[str, Any]:
    """Give what `status` says of the configuration."""
    status: Any = await it.agent._status({})
    told: Mapping[str, Any] = status["configuration"]
    return told


async def planned(it: Scene, text: str) -> Mapping[str, Any]:
    """Ask the agent what a configuration would change."""
    plan: Any = await it.agent._plan({"text": text, "file": "new.yaml"})
    told: Mapping[str, Any] = plan
    return told


async def test_a_file_that_changes_is_taken(tmp_path: Path) -> None:
    """Nobody has to say so: a file written anew is taken as by SIGHUP."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await written(it, QUICK.replace("10}", "5}"))
        await it.until(10, 10)

        assert it.kubelet.registrations[METAGPU] == 1


async def test_an_exchanged_config_map_is_taken(tmp_path: Path) -> None:
    """The exchange of a mounted ConfigMap's `..data` is taken, of a foreign format too."""
    folder = tmp_path / "config"
    mounted(folder, SLICES)

    async with agent_at_work(tmp_path, source=Source((folder,))) as it:
        await it.until(8, 8, SHARED)
        mounted(folder, SLICES.replace("4", "10"), 2)
        await it.until(20, 20, SHARED)
        mounted(folder, SLICES.replace("4", "3"), 3)
        await it.until(6, 6, SHARED)

        assert it.kubelet.registrations[SHARED] == 1
        assert (await configuration(it))["profiles"] == ["config.yaml"]


async def test_a_bad_file_keeps_the_last_good_one_and_says_so_once(tmp_path: Path) -> None:
    """One log line tells what is wrong, `status` too, until the next good file is taken."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        with heard(adoption) as lines:
            for _ in range(2):
                await written(it, QUICK.replace("sharesPerGpu", "sharePerGpu"))
                await it.agent.adoption.reload(again=False)
            told = await configuration(it)
            await written(it, QUICK.replace("10}", "5}"))
            await it.until(10, 10)

        [error] = [line for line in lines if line["log_level"] == "error"]
        assert error["error"] == told["error"]
        assert told["error"].startswith(f"{it.config_file}: 6: pools[0].backends[0].sharePerGpu: ")
        assert (await configuration(it))["error"] is None


async def test_a_file_that_goes_keeps_the_last_good_one(tmp_path: Path) -> None:
    """A file that is removed is told, and what it said stays in force."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await anyio.Path(it.config_file).unlink()
        await it.agent.adoption.reload(again=False)

        assert (await configuration(it))["error"] == (
            f"{it.config_file}: cannot be read: No such file or directory"
        )

        await written(it, QUICK.replace("10}", "5}"))
        await it.until(10, 10)


async def test_what_is_good_and_does_not_fit_is_told(tmp_path: Path) -> None:
    """A configuration that only the GPUs show to be too large is refused like a wrong one."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await written(it, QUICK.replace("10}", "100000}"))
        await it.agent.adoption.reload(again=False)

        assert "the kubelet takes less than 4194304" in (await configuration(it))["error"]
        assert it.agent.config.envelope.pools[0].name == "all"
        assert len(it.agent.layout.shares) == 20


async def test_notes_on_a_foreign_file_are_logged_once(tmp_path: Path) -> None:
    """What has no effect is a warning in the log, again only when it is new; `status` has it."""
    folder = tmp_path / "config"
    mounted(folder, SLICES)
    strange = SLICES + "flags: {gdsEnabled: true}\n"

    async with agent_at_work(tmp_path, source=Source((folder,))) as it:
        await it.until(8, 8, SHARED)
        with heard(adoption) as lines:
            mounted(folder, strange, 2)
            await it.agent.adoption.reload(again=False)
            mounted(folder, strange.replace("4", "3"), 3)
            await it.until(6, 6, SHARED)

        [note] = [line["note"] for line in lines if line["log_level"] == "warning"]
        assert note.endswith("it would have given containers GPUDirect Storage's devices")
        assert (await configuration(it))["notes"] == [note]
        assert (await configuration(it))["formats"] == ["NVIDIA device plugin v1"]


async def test_untouched_resources_hear_not_one_message(tmp_path: Path) -> None:
    """What the plan calls untouched keeps its stream, with not one message, when it is done."""
    then = TWO.replace("timeslice, replicas: 4", "whole")

    async with agent_at_work(tmp_path, config=TWO) as it:
        await it.until(10, 10)
        await it.until(4, 4, SHARED)
        plan = await planned(it, then)
        before = dict(it.kubelet.lists), dict(it.kubelet.registrations)

        assert {name: each["change"] for name, each in plan["resources"].items()} == {
            METAGPU: "untouched",
            SHARED: "removed",
            "nvidia.com/gpu": "added",
        }
        assert [gpu["change"] for gpu in plan["gpus"]] == ["untouched", "changed"]

        await written(it, then)
        await it.until(1, 1, "nvidia.com/gpu")

        assert it.kubelet.lists[METAGPU] == before[0][METAGPU]
        assert it.kubelet.registrations[METAGPU] == before[1][METAGPU]
        assert it.kubelet.open_streams[METAGPU] == 1


async def test_a_plan_says_who_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is in use changes when its pod ends, and the plan names the pod beforehand."""
    monkeypatch.setattr(podresources, "SETTLE", 0.01)

    async with agent_at_work(tmp_path, config=TWO) as it:
        await it.until(10, 10)
        await it.kubelet.admit(Pod.single("old", {METAGPU: 3}))
        await it.told()
        plan = await planned(it, TWO.replace("10}", "20}"))

        assert [gpu["waitsFor"] for gpu in plan["gpus"]] == [
            [{"holder": "default/old (main)", "resource": METAGPU, "shares": 3}],
            [],
        ]
        assert len(it.agent.layout.shares) == 14


async def test_a_plan_of_a_wrong_configuration_is_refused(tmp_path: Path) -> None:
    """What could not be taken is not planned either, and the sentence is the same."""
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)

        with pytest.raises(ConfigError, match=r"^new.yaml: 1: missing key `pools`"):
            await planned(it, "version: metagpu/v1")


async def test_a_profile_that_goes_keeps_the_last_good_one(tmp_path: Path) -> None:
    """When the chosen profile is taken out of the ConfigMap, its last text stays in force."""
    folder = tmp_path / "config"
    mounted(folder, SLICES)

    async with agent_at_work(tmp_path, source=Source((folder,), Choice("config"))) as it:
        await it.until(8, 8, SHARED)
        (folder / "config.yaml").rename(folder / "other.yaml")
        await it.agent.adoption.reload(again=False)

        assert (await configuration(it))["error"] == (
            f"{folder}: there is no profile 'config' (--profile); there are: other.yaml"
        )
        assert it.kubelet.capacity()[SHARED] == 8

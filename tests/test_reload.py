"""Other configurations while the daemon runs: the whole agent, a node and a kubelet."""

from pathlib import Path

import anyio
import pytest

from metagpu import adoption, laying
from metagpu.app import Agent
from metagpu.backends.fraction import FractionBackend
from metagpu.core.errors import ConfigError
from metagpu.core.model import ResourceName
from metagpu.core.report import hindrance
from metagpu.nvml import Nvml
from metagpu.plugins import podresources
from metagpu.sim.boards import BOARDS
from metagpu.sim.kubelet import Pod
from metagpu.sources import Source
from tests.agent_rig import METAGPU, QUICK, agent_at_work
from tests.heard import heard


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


def test_bad_configuration_at_start_is_one_clear_error(tmp_path: Path) -> None:
    """A configuration that is wrong at start raises, naming file, line and path."""
    file = tmp_path / "bad.yaml"
    file.write_text("version: metagpu/v1\npools:\n  - name: a\n    backends: [{backend: magic}]\n")

    with pytest.raises(
        ConfigError, match=r"bad.yaml: 4: pools\[0\].backends\[0\].backend: 'magic'"
    ):
        Agent(Source((file,)), Nvml())


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

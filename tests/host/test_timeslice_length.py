"""The length of a time-slice, from the configuration to the command on the host."""

from pathlib import Path
from typing import ClassVar

import anyio
import pytest

from metagpu.core.errors import ProgramMissing
from metagpu.host.programs import HostPrograms
from metagpu.testing.node import RecordedPrograms
from tests.agent.test_daemon import daemon
from tests.host.test_programs import program
from tests.rigs.agent import agent_at_work

SHARED = "nvidia.com/gpu.shared"


def slices(options: str) -> str:
    """Write a configuration of four time-slices of every GPU."""
    return (
        "version: metagpu/v1\npools:\n"
        f"  - {{name: all, backends: [{{backend: timeslice, replicas: 4{options}}}]}}\n"
    )


def steps(calls: list[str]) -> list[str]:
    """Return the lengths set, command by command."""
    return [call.rpartition(" ")[2] for call in calls]


async def test_the_length_holds_while_the_layout_does(tmp_path: Path) -> None:
    """The length is set once on each GPU, stays over an equal reload, and is put back."""
    tools = RecordedPrograms()

    async with agent_at_work(
        tmp_path, config=slices(", timeSlice: short"), programs=tools
    ) as scene:
        await scene.until(8, 8, SHARED)
        await tools.until(2)
        assert steps(tools.calls) == ["1", "1"]

        for unchanged in (slices(", timeSlice: short"), slices(", timeSlice: short") + "#\n"):
            await anyio.Path(scene.config_file).write_text(unchanged)
            await scene.agent.reload()
        await anyio.Path(scene.config_file).write_text(slices(", timeSlice: long"))
        await scene.agent.reload()
        await tools.until(6)

        assert steps(tools.calls[2:]) == ["0", "0", "3", "3"]

    assert steps(tools.calls[6:]) == ["0", "0"]


async def test_a_gpu_that_comes_is_set_too(tmp_path: Path) -> None:
    """A GPU that NVML lists later gets the length, and the others are not set again."""
    tools = RecordedPrograms()
    config = slices(", timeSlice: short") + "health: {rescanPeriod: 100ms}\n"

    async with agent_at_work(tmp_path, config=config, programs=tools) as scene:
        await tools.until(2)
        scene.node.add_gpu(scene.node.gpus[0].model)
        await tools.until(3)

        assert steps(tools.calls) == ["1", "1", "1"]
        assert scene.state(2).gpu.id in tools.calls[2]


async def test_without_the_tool_shares_are_served(tmp_path: Path) -> None:
    """A host without nvidia-smi loses the length and nothing else."""
    tools = RecordedPrograms(refusal=ProgramMissing("there is no nvidia-smi here"))

    async with agent_at_work(
        tmp_path, config=slices(", timeSlice: short"), programs=tools
    ) as scene:
        await tools.until(2)
        await scene.until(8, 8, SHARED)


class AwaitedPrograms(HostPrograms, frozen=True):
    """The host's own programs, with an event for the end of the first."""

    ended: ClassVar = anyio.Event()

    async def run(self, program: str, *arguments: str) -> str:
        """Run the program, then set the event."""
        printed = await super().run(program, *arguments)
        self.ended.set()
        return printed


async def test_the_program_of_the_host_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvidia-smi in PATH is started with NVIDIA's own arguments, for each GPU."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    calls = tmp_path / "calls"
    program(tmp_path / "bin", f"open({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')")
    tools, config = AwaitedPrograms(), slices(", timeSlice: medium")

    async with agent_at_work(tmp_path, "a100-40gb:1", config, programs=tools) as scene:
        await tools.ended.wait()
        uuid = scene.state(0).gpu.id

    assert (await anyio.Path(calls).read_text()).splitlines() == [
        f"compute-policy -i {uuid} --set-timeslice 2",
        f"compute-policy -i {uuid} --set-timeslice 0",
    ]


async def test_a_simulated_node_logs_its_commands(tmp_path: Path) -> None:
    """Under --simulate no program runs; the log has the commands, and their undoing at the end."""
    async with daemon(tmp_path, slices(", timeSlice: long")) as live_daemon:
        await live_daemon.logged("--set-timeslice 3")
        live_daemon.process.terminate()
        await live_daemon.logged("--set-timeslice 0")

        assert await live_daemon.process.wait() == 0

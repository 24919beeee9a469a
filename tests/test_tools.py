"""Programs of the host: found, run to their end, and told about when they are not."""

import sys
from pathlib import Path

import anyio
import pytest

from metagpu.core.errors import ToolError, ToolMissing
from metagpu.sim import tools as sim_tools
from metagpu.sim.tools import SimulatedTools
from metagpu.tools import DRIVER_ROOT, HostTools
from tests.heard import heard


def program(folder: Path, text: str, name: str = "nvidia-smi") -> Path:
    """Put a small program into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -S\nimport os, sys, time\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let PATH be one folder with nothing in it."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


async def test_a_program_in_path_is_run(bare: Path) -> None:
    """It gets its arguments as they are, and what it printed is the answer."""
    program(bare / "bin", "print(sys.argv[1:])")

    assert await HostTools().run("nvidia-smi", "-i", "GPU 0; rm") == "['-i', 'GPU 0; rm']"


@pytest.mark.parametrize("folder", ["usr/bin", "bin", "usr/local/bin"])
async def test_a_program_of_the_drivers_root_is_found(bare: Path, folder: str) -> None:
    """What is not in PATH is looked for below the roots, the first of them first."""
    program(bare / "host" / folder, "print(sys.argv[0])")
    program(bare / "other" / "usr/bin", "print('no')")
    tools = HostTools(roots=(bare / "host", bare / "other"))

    assert await tools.run("nvidia-smi") == str(bare / "host" / folder / "nvidia-smi")


async def test_a_drivers_root_brings_its_library(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of another root finds NVML there, before what the environment names."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    program(bare / "host/usr/bin", "print(os.environ['LD_LIBRARY_PATH'])")
    library = bare / "host/usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.touch()

    printed = await HostTools(roots=(bare / "host",)).run("nvidia-smi")
    assert printed == f"{library.parent}:/mine"


async def test_a_missing_program_says_where_it_was_looked_for(bare: Path) -> None:
    """Whoever reads it knows where to put it."""
    with pytest.raises(ToolMissing) as caught:
        await HostTools(roots=(bare,)).run("nvidia-smi")
    assert str(caught.value).startswith(
        f"there is no nvidia-smi here; looked in PATH, {bare}/usr/bin, {bare}/bin"
    )


async def test_the_drivers_container_is_looked_at() -> None:
    """Where the gpu-operator installs the driver, it is found without a word."""
    assert HostTools().roots == (DRIVER_ROOT,)


async def test_a_failure_is_told_with_its_last_words(bare: Path) -> None:
    """The error names the command, the status and the last line printed."""
    path = program(bare / "bin", "print('one'); sys.stderr.write('Not Supported'); sys.exit(3)")

    with pytest.raises(ToolError) as caught:
        await HostTools().run("nvidia-smi", "-L")
    assert str(caught.value) == f"`{path} -L` failed with status 3: Not Supported"


async def test_a_silent_failure_is_told_too(bare: Path) -> None:
    """A program that says nothing is told of by its status."""
    program(bare / "bin", "sys.exit(9)")

    with pytest.raises(ToolError, match="failed with status 9: it printed nothing"):
        await HostTools().run("nvidia-smi")


async def test_a_program_that_hangs_is_ended(bare: Path) -> None:
    """No program holds the daemon longer than its deadline."""
    program(bare / "bin", "time.sleep(60)")

    with pytest.raises(ToolError, match=r"did not end within 0\.2 s"):
        await HostTools(deadline=0.2).run("nvidia-smi")


async def test_what_cannot_be_started_is_an_error_of_ours(bare: Path) -> None:
    """A file that is no program is told of, not raised through the daemon."""
    path = program(bare / "bin", "")
    await anyio.Path(path).write_bytes(b"\x7fELF, but no")

    with pytest.raises(ToolError, match="could not be started: Exec format error"):
        await HostTools().run("nvidia-smi")


async def test_a_simulated_host_only_tells() -> None:
    """On a simulated node the command is logged as simulated."""
    with heard(sim_tools) as logs:
        assert await SimulatedTools().run("nvidia-smi", "-i", "0") == ""

    assert logs == [{"event": "simulated", "command": "nvidia-smi -i 0", "log_level": "info"}]

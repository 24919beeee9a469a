"""Programs of the host: found, run to their end, and clear errors otherwise."""

import gc
import os
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from metagpu.core.errors import ProgramError, ProgramMissing
from metagpu.host import programs as host_programs
from metagpu.host.programs import HostPrograms, run_child, run_command
from metagpu.sim.machine import programs as sim_tools
from metagpu.sim.machine.programs import SimPrograms
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import until
from tests.rigs.waiting import skip


def program(folder: Path, text: str, name: str = "nvidia-smi") -> Path:
    """Write a small program into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -S\nimport os, sys, time\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set PATH to one empty folder."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time that killed programs have to end: the machine may be busy."""
    monkeypatch.setattr(host_programs, "_DRAIN", 30.0)


async def test_a_program_in_path_is_run(bare: Path) -> None:
    """A program gets its arguments unchanged, and its output is the answer."""
    program(bare / "bin", "print(sys.argv[1:])")

    assert await HostPrograms().run("nvidia-smi", "-i", "GPU 0; rm") == "['-i', 'GPU 0; rm']"


@pytest.mark.parametrize("folder", ["usr/bin", "bin", "usr/local/bin"])
async def test_a_program_of_the_drivers_root_is_found(bare: Path, folder: str) -> None:
    """A program outside PATH is searched below the roots, in their order."""
    program(bare / "host" / folder, "print(sys.argv[0])")
    program(bare / "other" / "usr/bin", "print('no')")
    tools = HostPrograms(roots=(bare / "host", bare / "other"))

    assert await tools.run("nvidia-smi") == str(bare / "host" / folder / "nvidia-smi")


async def test_an_absolute_link_leads_below_its_root(bare: Path) -> None:
    """A link in the driver's root is that system's: here its target is another file, or none."""
    program(bare / "host/etc/alternatives", "print('the root has it')")
    (bare / "host/usr/bin").mkdir(parents=True)
    (bare / "host/usr/bin/nvidia-smi").symlink_to("/etc/alternatives/nvidia-smi")

    assert await HostPrograms(roots=(bare / "host",)).run("nvidia-smi") == "the root has it"


async def test_a_drivers_root_brings_its_library(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of another root finds NVML there, before the environment's path."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    program(bare / "host/usr/bin", "print(os.environ['LD_LIBRARY_PATH'])")
    library = bare / "host/usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.touch()

    printed = await HostPrograms(roots=(bare / "host",)).run("nvidia-smi")
    assert printed == f"{library.parent}:/mine"


async def test_a_missing_program_is_an_error_with_the_searched_folders(bare: Path) -> None:
    """The error names the folders searched."""
    with pytest.raises(ProgramMissing) as caught:
        await HostPrograms(roots=(bare,)).run("nvidia-smi")
    assert str(caught.value).startswith(
        f"there is no nvidia-smi here; looked in PATH, {bare}/usr/bin, {bare}/bin"
    )


async def test_the_toolkits_own_program_is_run(bare: Path) -> None:
    """The toolkit's program is run itself: its script has paths of the host's."""
    toolkit = bare / "host/usr/local/nvidia/toolkit"
    program(toolkit, "sys.exit(3)", "nvidia-ctk")
    program(toolkit, "print('itself')", "nvidia-ctk.real")

    assert await HostPrograms(roots=(bare / "host",)).run("nvidia-ctk") == "itself"


async def test_a_failure_has_its_last_line(bare: Path) -> None:
    """The error names the command, the status and the last line printed."""
    path = program(bare / "bin", "print('one'); sys.stderr.write('Not Supported'); sys.exit(3)")

    with pytest.raises(ProgramError) as caught:
        await HostPrograms().run("nvidia-smi", "-L")
    assert str(caught.value) == f"`{path} -L` failed with status 3: Not Supported"


async def test_a_silent_failure_has_its_status(bare: Path) -> None:
    """A program without output fails with its status in the error."""
    program(bare / "bin", "sys.exit(9)")

    with pytest.raises(ProgramError, match="failed with status 9: it printed nothing"):
        await HostPrograms().run("nvidia-smi")


async def test_a_program_that_hangs_is_ended(bare: Path) -> None:
    """A program is ended at its deadline."""
    program(bare / "bin", "time.sleep(60)")

    with pytest.raises(ProgramError, match=r"did not end within 0\.2 s"):
        await HostPrograms(deadline=0.2).run("nvidia-smi")


async def test_a_file_that_cannot_be_started_is_one_error(bare: Path) -> None:
    """A file that is no program is an error of ours, and no OSError."""
    path = program(bare / "bin", "")
    await anyio.Path(path).write_bytes(b"\x7fELF, but no")

    with pytest.raises(ProgramError, match="could not be started: Exec format error"):
        await HostPrograms().run("nvidia-smi")


async def test_a_simulated_host_only_logs() -> None:
    """On a simulated node the command is logged as simulated."""
    with capture_module_logs(sim_tools) as logs:
        assert await SimPrograms().run("nvidia-smi", "-i", "0") == ""

    assert logs == [{"event": "simulated", "command": "nvidia-smi -i 0", "log_level": "info"}]


async def test_a_command_has_exactly_its_environment_and_both_outputs() -> None:
    """The status, the output and the error output of a command are separate."""
    env = {"WORD": "one"}
    done = await run_command(["/bin/sh", "-c", "env; echo two >&2; exit 3"], env=env, deadline=60)

    assert done.status == 3
    assert {"WORD=one"} <= set(done.stdout.decode().split())
    assert b"HOME=" not in done.stdout
    assert done.stderr == b"two\n"


async def test_a_command_reads_nothing() -> None:
    """A command's standard input is at its end, so that no command waits for a person."""
    done = await run_command(["/bin/cat"], env={}, deadline=60)
    assert (done.status, done.stdout) == (0, b"")


async def test_a_command_ends_at_its_deadline_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that hangs is ended with its children."""
    noted, began, start = tmp_path / "pids", anyio.Event(), anyio.open_process
    script = f"sleep 3600 & echo $$ $! > {noted}; wait"

    async def noting(*args: Any, **more: Any) -> anyio.abc.Process:  # noqa: ANN401 - as it is called
        process = await start(*args, **more)
        began.set()  # its time begins before anybody else runs
        return process

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await run_command(["/bin/sh", "-c", script], env=dict(os.environ), deadline=600)

    monkeypatch.setattr(anyio, "open_process", noting)
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await until(lambda: noted.exists() and noted.read_text().endswith("\n"))
        await began.wait()
        skip(600)  # once: what is killed has time to end

    pids = [int(pid) for pid in noted.read_text().split()]
    await until(lambda: not any(map(is_running, pids)))


async def test_a_command_that_is_cancelled_in_its_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that is cancelled in its start is ended, and its pipes are closed."""
    started: list[int] = []
    start = anyio.open_process

    async def cancelled(*args: Any, **more: Any) -> anyio.abc.Process:  # noqa: ANN401 - as it is called
        group.cancel_scope.cancel()
        process = await start(*args, **more)
        started.append(process.pid)
        return process

    async def run() -> None:
        await run_command(["/bin/sleep", "3600"], env={}, deadline=60)

    monkeypatch.setattr(anyio, "open_process", cancelled)
    async with anyio.create_task_group() as group:
        group.start_soon(run)

    [pid] = started
    await until(lambda: not is_running(pid))
    gc.collect()  # a pipe that is open still is a warning, and that fails


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_output_without_end_takes_limited_memory(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of a long output is the answer; the rest is read and forgotten."""
    monkeypatch.setattr(host_programs, "LONGEST_OUTPUT", 1000)
    program(bare / "bin", "print('x' * 1_000_000)")

    assert await HostPrograms().run("nvidia-smi") == "x" * 1000


async def test_a_child_ends_with_its_block() -> None:
    """A child has its standard input from us, no terminal of ours, and is killed at the end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003 - the socket module's signature
    text = "import os, time; os.write(0, b'%d %d' % (os.getpid(), os.getsid(0))); time.sleep(60)"
    with closing(ours), closing(theirs):
        async with run_child([sys.executable, "-S", "-c", text], stdin=theirs.fileno()):
            theirs.close()
            with anyio.fail_after(30):
                await anyio.wait_readable(ours)
            pid, session = map(int, ours.recv(100).split())
            assert (pid, session) == (pid, pid)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_child_that_cannot_be_started_is_an_error() -> None:
    """The error is the kernel's."""
    with pytest.raises(FileNotFoundError):
        async with run_child(["/no/such/program"], stdin=0):
            pass


def links_of(folder: Path) -> dict[str, Path]:
    """Return the files that the links in a folder lead to."""
    return {link.name: link.resolve() for link in folder.iterdir()}


async def test_another_systems_c_library_is_left_alone(bare: Path) -> None:
    """Beside a whole system's libraries, a program finds those of the driver alone."""
    program(bare / "host/usr/bin", "print(os.environ['LD_LIBRARY_PATH'])")
    libraries = bare / "host/usr/lib64"
    libraries.mkdir(parents=True)
    for name in ("libnvidia-ml.so.1", "libcuda.so.1", "libc.so.6"):
        (libraries / name).touch()
    host = HostPrograms(roots=(bare / "host",), links=bare / "links")

    for _ in range(2):
        folder = Path(await host.run("nvidia-smi"))
        assert folder.is_relative_to(bare / "links")
        wanted = ("libnvidia-ml.so.1", "libcuda.so.1")
        assert links_of(folder) == {name: libraries / name for name in wanted}

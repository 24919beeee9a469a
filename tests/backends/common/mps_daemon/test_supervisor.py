"""A GPU's control daemon under adversity: the stand-in always, NVIDIA's own with `make e2e`."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace

from metagpu.backends.common.mps_daemon import supervisor
from metagpu.backends.mps.backend import MpsBackend
from metagpu.core.contracts.programs import DaemonProcess
from metagpu.host import daemons as host_daemons
from metagpu.host.daemons import HostDaemons
from metagpu.sim.machine.programs import sim_daemons
from tests.backends.mps.rig import SELDOM, TIMING, mps
from tests.rigs.logs import capture_module_logs
from tests.rigs.real_mps import DRIVERS, real_daemons

Hostile = Callable[[Path], object]
ARCHIVED = [pytest.param(other, marks=pytest.mark.e2e) for other in DRIVERS]

KILLED = """
import os, signal, sys
from pathlib import Path
import anyio
from metagpu.backends.mps.backend import MpsBackend
from tests.backends.mps.rig import TIMING, mps
from tests.backends.common.mps_daemon.test_supervisor import daemons_of

async def main(folder, driver):
    MpsBackend.timing = TIMING
    async with mps(Path(folder), daemons=daemons_of(driver)) as it:
        await it.ready()
        print((await it.process()).pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main, *sys.argv[1:])
"""


def daemons_of(driver: str) -> HostDaemons:
    """Return control daemons of a driver's version: `stand-in 535`, or `535` for NVIDIA's own."""
    kind, _, version = driver.rpartition(" ")
    return sim_daemons(int(version)) if kind else real_daemons(version)


async def agent_is_killed(folder: Path, driver: str) -> int:
    """Run an agent until its control daemon serves, and kill it; return the daemon's number."""
    command = [sys.executable, "-c", KILLED, str(folder), driver]
    done = await anyio.run_process(command, check=False, stderr=None)
    return int(done.stdout.split()[-1])  # after the log


@pytest.fixture(params=["stand-in 535", "stand-in 550", *ARCHIVED])
def driver(request: pytest.FixtureRequest) -> str:
    """Return the version of a driver."""
    return str(request.param)


@pytest.fixture
async def daemons(driver: str) -> HostDaemons:
    """Return the control daemons of a driver."""
    return await to_thread.run_sync(daemons_of, driver)


# --- life and death -----------------------------------------------------------------------------


async def test_it_is_adopted_after_a_kill(
    driver: str, daemons: HostDaemons, tmp_path: Path
) -> None:
    """After `kill -9` of the agent the next one has the same daemon, and starts no other."""
    pid = await agent_is_killed(tmp_path, driver)

    with capture_module_logs(supervisor) as lines:
        async with mps(tmp_path, daemons=daemons) as scene:
            await scene.ready()
            assert (await scene.process()).pid == pid
            assert scene.care.state().suspended == {}
    assert "mps control daemon started" not in [line["event"] for line in lines]


async def test_an_agent_without_its_number_adopts_it(
    driver: str, daemons: HostDaemons, tmp_path: Path
) -> None:
    """A daemon of which no agent has written the number, as an older one's, is adopted."""
    pid = await agent_is_killed(tmp_path, driver)
    [file] = (tmp_path / "mps").glob("*/pid")
    file.unlink()

    async with mps(tmp_path, daemons=daemons) as scene:
        await scene.ready()
        assert (await scene.process()).pid == pid


async def test_a_crash_is_followed_by_a_start(daemons: HostDaemons, tmp_path: Path) -> None:
    """A killed control daemon leaves its files, and another one serves."""
    async with mps(tmp_path, daemons=daemons) as scene:
        await scene.ready()
        first = await scene.process()
        os.kill(first.pid, signal.SIGKILL)
        await scene.another(first)
        await scene.ready()


async def test_a_quit_of_a_containers_root_is_named(
    daemons: HostDaemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command `quit` of another process is the reason, and another daemon serves."""
    monkeypatch.setattr(MpsBackend, "timing", SELDOM)
    async with mps(tmp_path, daemons=daemons) as scene:
        await scene.ready()
        first = await scene.process()
        async with anyio.create_task_group() as group:
            group.start_soon(scene.suspended, "it received `quit`, but not from metagpu")
            await anyio.wait_all_tasks_blocked()
            await scene.at().quit()
        await scene.another(first)
        await scene.ready()


async def test_an_unused_daemon_ends_with_its_agent(daemons: HostDaemons, tmp_path: Path) -> None:
    """At the agent's end the unused daemon is gone, and so are the mounts of its folders.

    A server that failed, as NVIDIA's do without a driver, makes `quit` fail, and changes nothing.
    """
    with capture_module_logs(supervisor) as lines:
        async with mps(tmp_path, daemons=daemons, stays=True) as scene:
            await scene.ready()
            process = await scene.process()
            await daemons.send_command(scene.at().daemon, "start_server -uid 0\n", deadline=30.0)

    assert [line for line in lines if line["log_level"] == "warning"] == []
    with anyio.fail_after(30):
        await daemons.wait_ended(process)
    assert str(tmp_path) not in await anyio.Path("/proc/self/mountinfo").read_text()


def stop(daemon: DaemonProcess, folder: Path) -> None:
    """Stop a daemon's process."""
    assert folder.is_dir()
    os.kill(daemon.pid, signal.SIGSTOP)


def write_to_log(daemon: DaemonProcess, folder: Path) -> None:
    """Write text into the FIFO that a daemon opens to every user."""
    assert daemon.pid
    with (folder / "log").open("wb") as fifo:
        fifo.write(b"no message of a client\n")


@pytest.mark.long
@pytest.mark.parametrize("driver", ARCHIVED)
@pytest.mark.parametrize("disturb", [stop, write_to_log])
async def test_a_hanging_daemon_is_replaced(
    disturb: Callable[[DaemonProcess, Path], None],
    daemons: HostDaemons,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon that answers no probe is killed if it is unused, and another one serves."""
    monkeypatch.setattr(MpsBackend, "timing", replace(TIMING, deadline=3.0))
    async with mps(tmp_path, daemons=daemons) as scene:
        await scene.ready()
        first = await scene.process()
        await to_thread.run_sync(disturb, first, scene.at().folders.pipes)
        await scene.another(first)
        await scene.ready()


@pytest.mark.e2e
async def test_a_driver_is_upgraded_below_a_running_daemon(tmp_path: Path) -> None:
    """The old driver's daemon is adopted by an agent with the new programs, and serves."""
    pid = await agent_is_killed(tmp_path, "535")
    newer = await to_thread.run_sync(daemons_of, "550")

    async with mps(tmp_path, daemons=newer) as scene:
        await scene.ready()
        old = await scene.process()
        assert old.pid == pid
        os.kill(pid, signal.SIGKILL)
        await scene.another(old)
        await scene.ready()


# --- what containers may write ------------------------------------------------------------------


def link_to_zero(place: Path) -> None:
    """Leave a link to a file without end."""
    place.symlink_to("/dev/zero")


def link_to_victim(place: Path) -> None:
    """Leave a link to a file of the host."""
    place.symlink_to(place.parents[1] / "victim")


def huge_file(place: Path) -> None:
    """Leave a file of a terabyte; it has no blocks."""
    with place.open("wb") as file:
        file.truncate(1 << 40)


def unix_socket(place: Path) -> None:
    """Leave a socket that nobody serves."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(place))


def deep_tree(place: Path) -> None:
    """Leave a folder in a folder in a folder, longer than any path may be."""
    here = os.open(place.parent, os.O_RDONLY)
    for name in (place.name, *["d" * 200] * 60):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


HOSTILE: list[Hostile] = [
    link_to_zero,
    link_to_victim,
    os.mkfifo,
    huge_file,
    unix_socket,
    Path.mkdir,
    deep_tree,
]
NAMES = ("nvidia-cuda-mps-control.pid", "control_lock", "control", "control_privileged", "log")


@pytest.mark.parametrize("driver", ["stand-in 550", *ARCHIVED])
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda value: value.__name__)
async def test_nothing_in_a_containers_folder_is_believed(
    hostile: Hostile, daemons: HostDaemons, tmp_path: Path
) -> None:
    """Another daemon starts, whatever a container leaves in place of the first one's files.

    The files of the host that it links to stay as they are.
    """
    async with mps(tmp_path, daemons=daemons) as scene:
        await scene.ready()
        folders, first = scene.at().folders, await scene.process()
        victim = folders.home / "victim"
        victim.write_text("secret")
        victim.chmod(0o600)
        await to_thread.run_sync(_replace_all, folders.pipes, hostile)
        assert await scene.process() == first  # by its number

        os.kill(first.pid, signal.SIGKILL)
        await scene.another(first)
        await scene.ready()
        assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("secret", 0o600)
        assert (folders.pipes / "control_lock").is_file()


@pytest.mark.parametrize("driver", ARCHIVED)
async def test_a_link_that_comes_after_the_emptying_is_not_followed(
    daemons: HostDaemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is faster than the daemon's start changes no file of the host.

    NVIDIA's daemon would give everybody the right to write to it.
    """
    async with mps(tmp_path, daemons=daemons) as scene:
        await scene.ready()
        folders, first = scene.at().folders, await scene.process()
        victim = folders.home / "victim"
        victim.write_text("secret")
        victim.chmod(0o600)
        empty = host_daemons.empty

        def empty_slowly(folder: Path) -> None:
            empty(folder)
            (folder / "log").symlink_to(victim)

        monkeypatch.setattr(host_daemons, "empty", empty_slowly)
        os.kill(first.pid, signal.SIGKILL)
        await scene.another(first)
        await scene.ready()
        assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("secret", 0o600)


def _replace_all(folder: Path, hostile: Hostile) -> None:
    for name in NAMES:
        (folder / name).unlink(missing_ok=True)
        hostile(folder / name)

"""Daemons of the host: programs that outlive metagpu, found again and never mistaken."""

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio import from_thread, to_thread
from msgspec.structs import replace

from metagpu.core.contracts.programs import DaemonProcess, DaemonSpec
from metagpu.core.errors import ProgramError, ProgramMissing
from metagpu.core.model.shares import Holder
from metagpu.host import daemons
from metagpu.host import processes as running
from metagpu.host.daemons import HostDaemons
from metagpu.host.programs import HostPrograms
from metagpu.sim.machine.containers import SimHost
from tests.host.test_programs import program
from tests.rigs.daemons import DAEMONS, serving, stand_in
from tests.rigs.privileges import require_mounts
from tests.rigs.waiting import until

pytestmark = pytest.mark.long

HERE = os.getpid()


def sleeper(folder: Path, text: str = "print('up', flush=True); time.sleep(60)") -> DaemonSpec:
    """Describe a daemon for tests, which sleeps by default."""
    path = program(folder / "bin", text, name="sleeper")
    (folder / "pipe").mkdir(exist_ok=True)
    return DaemonSpec(
        str(path),
        ("-f",),
        {"WHERE": str(folder)},
        output=folder / "output",
        pid_file=folder / "pid",
        lock=folder / "pipe" / "lock",
    )


async def wait_output(spec: DaemonSpec, word: str) -> None:
    """Wait until a daemon has printed a word."""

    async def is_so() -> bool:
        return word in await anyio.Path(spec.output).read_text()

    await until(is_so)


HOST = HostDaemons(HostPrograms(roots=()))


async def test_a_daemon_has_a_session_of_its_own(tmp_path: Path) -> None:
    """No signal to metagpu's terminal or group reaches the daemon, which is not our child."""
    process = await HOST.start(sleeper(tmp_path))
    try:
        assert os.getsid(process.pid) != os.getsid(0)
        assert os.getpgid(process.pid) != os.getpgid(0)
        status = await anyio.Path(f"/proc/{process.pid}/stat").read_text()
        assert int(status.rpartition(")")[2].split()[1]) != HERE
    finally:
        await HOST.kill(process)


async def test_a_daemon_outlives_its_starter(tmp_path: Path) -> None:
    """The next metagpu finds the daemon again, waits for its end and ends it."""
    folder = str(tmp_path)
    script = (
        "import anyio\n"
        "from pathlib import Path\n"
        "from tests.host.test_daemons import HOST, sleeper\n"
        f"print(anyio.run(HOST.start, sleeper(Path({folder!r}))).pid)\n"
    )
    starter = await anyio.run_process([sys.executable, "-c", script], stderr=None)
    pid = int(starter.stdout)
    await wait_output(
        sleeper(tmp_path), "up"
    )  # before that it is not itself yet, but its interpreter

    found = await HOST.find(sleeper(tmp_path))
    assert found is not None
    assert found.pid == pid
    await HOST.kill(found)
    await HOST.wait_ended(found)
    assert await HOST.find(sleeper(tmp_path)) is None


async def test_a_pods_imitation_is_not_taken_for_the_daemon(tmp_path: Path) -> None:
    """A look-alike in a container, whose pid is in the daemon's pid file, is not taken for it."""
    place = tmp_path / "host"
    place.mkdir()
    seen = SimHost(place)
    host = HostDaemons(HostPrograms(roots=()), proc=seen.proc)
    process = await host.start(sleeper(tmp_path))
    try:
        await wait_output(sleeper(tmp_path), "up")
        seen.add_process(HERE, "0::/system.slice/metagpu.service\n")
        seen.add_container_process(process.pid, Holder("team", "mallory", "main"))
        assert await host.find(sleeper(tmp_path)) is None

        seen.add_container_process(HERE, Holder("team", "mallory", "main"))
        assert await host.find(sleeper(tmp_path)) == process

        seen.add_process(process.pid, "0::/system.slice/metagpu.service\n")
        assert await host.find(sleeper(tmp_path)) == process
    finally:
        await host.kill(process)


async def test_another_process_is_never_taken_for_the_daemon(tmp_path: Path) -> None:
    """A pid alone is not enough: environment and command line have to be the same."""
    async with serving(tmp_path) as live_stand_in, stand_in(tmp_path, "GPU-1") as other:
        process = await live_stand_in.process()
        assert process is not None
        pid = process.pid
        assert await DAEMONS.find(live_stand_in.daemon) == process
        assert await DAEMONS.find(replace(live_stand_in.daemon, arguments=("-d",))) is None

        async def taken(pid: int, spec: DaemonSpec) -> DaemonProcess | None:
            spec = replace(spec, lock=tmp_path / "nowhere")
            await anyio.Path(spec.pid_file).write_text(str(pid))
            return await DAEMONS.find(spec)

        assert await taken(pid, other.daemon) is None
        with live_stand_in.client():
            [server] = await live_stand_in.control.servers()
            assert await taken(server, live_stand_in.daemon) is None
        assert await taken(HERE, live_stand_in.daemon) is None
        assert await taken(2**22 + 1, live_stand_in.daemon) is None
        assert await taken(pid, live_stand_in.daemon) == process


async def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    """A process with the same pid and another start time is neither awaited nor killed."""
    process = await HOST.start(sleeper(tmp_path))
    before = replace(process, started=process.started - 1)

    with anyio.fail_after(30):
        await HOST.wait_ended(before)
        await HOST.kill(before)
    assert await to_thread.run_sync(running.read_process, process.pid) is not None
    await HOST.kill(process)


async def test_the_end_of_a_daemon_ends_the_wait(tmp_path: Path) -> None:
    """A wait lasts as long as the process does."""
    process = await HOST.start(sleeper(tmp_path))
    over = anyio.Event()

    async with anyio.create_task_group() as group:

        async def wait() -> None:
            await HOST.wait_ended(process)
            over.set()

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not over.is_set()
        await HOST.kill(process)
        with anyio.fail_after(30):
            await over.wait()


async def test_a_wait_that_is_given_up_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled wait closes the descriptor of the process."""
    process = await HOST.start(sleeper(tmp_path))
    opened, descriptors = running.open_pidfd, []
    scope = anyio.CancelScope()

    def late(wanted: DaemonProcess) -> int | None:
        descriptors.append(opened(wanted))
        from_thread.run_sync(scope.cancel)
        return descriptors[-1]

    monkeypatch.setattr(running, "open_pidfd", late)
    with scope:
        await HOST.wait_ended(process)
    monkeypatch.undo()
    await HOST.kill(process)

    [descriptor] = descriptors
    assert descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


async def test_an_ended_daemon_is_killed_without_an_error(tmp_path: Path) -> None:
    """Killing a process that is gone is no error."""
    process = await HOST.start(sleeper(tmp_path))

    await HOST.kill(process)
    await HOST.kill(process)


async def test_the_output_of_a_daemon_is_kept(tmp_path: Path) -> None:
    """The daemon's output file has the text of both streams."""
    spec = sleeper(tmp_path, "print('one'); sys.stderr.write('no such GPU')")

    with suppress(ProgramError):  # it may be seen before it has ended
        await HOST.wait_ended(await HOST.start(spec))
    assert "no such GPU" in await anyio.Path(spec.output).read_text()


async def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    """A missing program is an error that names the folders searched."""
    spec = replace(sleeper(tmp_path), program="no-such-program")

    with pytest.raises(ProgramMissing, match="there is no no-such-program here; looked in PATH"):
        await HOST.start(spec)


async def test_a_daemon_sees_its_own_folder(tmp_path: Path) -> None:
    """Only the daemon sees its mounts; the host's folder stays unchanged."""
    require_mounts("a daemon has its own /dev/shm")
    place, private = tmp_path / "place", tmp_path / "private"
    place.mkdir()
    private.mkdir()
    text = f"open({str(place / 'mark')!r}, 'w').close(); print('done', flush=True); time.sleep(60)"
    spec = replace(sleeper(tmp_path, text), mounts={place: private})

    process = await HOST.start(spec)
    try:
        await wait_output(spec, "done")
        assert [path.name for path in private.iterdir()] == ["mark"]
        assert list(place.iterdir()) == []
        assert await HOST.find(spec) == process
    finally:
        await HOST.kill(process)


async def test_a_volume_is_bounded_and_mounted_once(tmp_path: Path) -> None:
    """A volume is a tmpfs with a size and the folder's mode; the next start uses it again."""
    require_mounts("a volume has a size")
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o1777)
    spec = replace(sleeper(tmp_path), volumes={volume: 1 << 20})
    try:
        await HOST.kill(await HOST.start(spec))
        size = os.statvfs(volume)
        assert size.f_blocks * size.f_frsize == 1 << 20
        assert size.f_files == 256
        assert stat.S_IMODE(volume.stat().st_mode) == 0o1777
        (volume / "file").touch()

        await HOST.kill(await HOST.start(spec))
        assert (volume / "file").exists()
        mounts = await anyio.Path("/proc/self/mountinfo").read_text()
        assert mounts.count(str(volume)) == 1
    finally:
        await HOST.unmount(spec)
    assert not volume.is_mount()
    await HOST.unmount(spec)


IN_CONTAINER = """
import os, sys
from pathlib import Path
import anyio
from msgspec.structs import replace
from metagpu.core.errors import ProgramError
from tests.host.test_daemons import HOST, sleeper

async def main(folder):
    spec = replace(sleeper(folder), volumes={folder / "volume": 1 << 20})
    try:
        print((await replace(HOST, host_process=os.getppid()).start(spec)).pid)
    except ProgramError as error:
        print(error)

anyio.run(main, Path(sys.argv[1]))
"""


async def run_in_container(command: Sequence[str], folder: Path) -> str:
    """Run `IN_CONTAINER` by a command that separates it from the host; return what it prints."""
    program = [*command, sys.executable, "-c", IN_CONTAINER, str(folder)]
    return (await anyio.run_process(program, stderr=None)).stdout.decode()


@pytest.mark.parametrize("propagation", ["private", "slave"])
async def test_a_daemon_of_a_container_has_the_hosts_mounts(
    tmp_path: Path, propagation: str
) -> None:
    """From a container's mount namespace, the daemon and its volume are in the host's.

    Where the container does not see the host's mounts, the error has the fix, and no mount is left.
    """
    require_mounts("a volume is the host's")
    volume = tmp_path / "volume"
    volume.mkdir()
    run = HOST.programs.run
    await run("mount", "--bind", str(tmp_path), str(tmp_path))
    try:
        await run("mount", "--make-shared", str(tmp_path))
        container = ("unshare", "--mount", "--propagation", propagation)
        printed = await run_in_container(container, tmp_path)

        if propagation == "private":
            assert "`mountPropagation: HostToContainer`" in printed
            assert not volume.is_mount()
        else:
            daemon = await HOST.find(sleeper(tmp_path))
            assert daemon is not None
            assert daemon.pid == int(printed.splitlines()[-1])
            assert volume.is_mount()
            namespaces = [anyio.Path(f"/proc/{name}/ns/mnt") for name in (daemon.pid, "self")]
            assert len({await namespace.readlink() for namespace in namespaces}) == 1
            await HOST.kill(daemon)
    finally:
        await run("umount", "--recursive", "-l", str(tmp_path))


async def test_a_pod_without_the_hosts_processes_starts_no_daemon(tmp_path: Path) -> None:
    """A first process that is metagpu itself is not the host's; the error has the fix."""
    host = replace(HOST, host_process=HERE)
    with pytest.raises(ProgramError, match="give the pod `hostPID: true`"):
        await host.start(replace(sleeper(tmp_path), volumes={tmp_path: 1 << 20}))


@pytest.mark.parametrize("lacking", ["sys_admin", "sys_ptrace", "sys_chroot"])
async def test_a_missing_capability_is_named(tmp_path: Path, lacking: str) -> None:
    """Without the right to mount, or to enter the host, no daemon starts; the error names it."""
    require_mounts("a capability that is missing")
    (tmp_path / "volume").mkdir()
    drop = ("setpriv", f"--bounding-set=-{lacking}", f"--inh-caps=-{lacking}")
    container = drop if lacking == "sys_admin" else ("unshare", "--mount", *drop)
    printed = await run_in_container(container, tmp_path)

    assert lacking.upper() in printed.partition("metagpu needs the capabilit")[2]


SYS_RESOURCE = 24
"""The bit of the capability that lowers scores, of linux/capability.h."""
OWN_SCORE = int(Path("/proc/self/oom_score_adj").read_text())


def holds(capability: int) -> bool:
    """Return whether this process has a capability."""
    (mask,) = re.findall(r"^CapEff:\s(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> capability & 1)


async def test_a_daemon_is_in_a_cgroup_of_its_own(tmp_path: Path) -> None:
    """The daemon is in its cgroup in every hierarchy, with a node's score; it ends with it."""
    require_mounts("a daemon has its own cgroup, which a container's root cannot make either")
    name = f"metagpu-test/{tmp_path.name}"
    spec = replace(sleeper(tmp_path), cgroup=name)
    process = await HOST.start(spec)
    try:
        lines = await anyio.Path(f"/proc/{process.pid}/cgroup").read_text()
        assert {line.rpartition(":")[2] for line in lines.splitlines()} == {f"/{name}"}
        own = await anyio.Path("/proc/self/cgroup").read_text()
        assert name not in own
        score = int(await anyio.Path(f"/proc/{process.pid}/oom_score_adj").read_text())
        assert score == (-997 if holds(SYS_RESOURCE) else OWN_SCORE)
    finally:
        await HOST.kill(process)
        await HOST.unmount(spec)
    assert not [file async for file in anyio.Path("/sys/fs/cgroup").glob(f"**/{name}")]


def _copy_shell(root: Path, libraries: Sequence[str]) -> None:
    script = b'#!/bin/sh\necho up > "$WHERE/mark"\nkill -STOP $$\n'
    files = {text: Path(text).read_bytes() for text in ("/bin/sh", *libraries)}
    for name, content in (files | {"/usr/bin/nvidia-daemon": script}).items():
        copy = root / name.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        copy.chmod(0o755)


async def test_a_driver_container_is_entered(tmp_path: Path) -> None:
    """A root with a loader of its own is the daemon's root, and has the daemon's folder."""
    require_mounts("a daemon changes its root")
    root = tmp_path / "driver"
    for name in ("proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    listing = await HOST.programs.run("ldd", "/bin/sh")
    await to_thread.run_sync(
        _copy_shell, root, [part for part in listing.split() if part[0] == "/"]
    )
    home = tmp_path / "home"
    home.mkdir()
    spec = replace(sleeper(home), program="nvidia-daemon")
    host = HostDaemons(HostPrograms(roots=(root,)))

    process = await host.start(spec)
    try:

        async def marked() -> bool:
            return (home / "mark").exists()

        await until(marked)
        assert await anyio.Path(f"/proc/{process.pid}/root").readlink() == anyio.Path(root)
        assert await host.find(spec) == process
    finally:
        await host.kill(process)


async def test_the_lock_of_a_container_keeps_no_daemon_from_its_start(tmp_path: Path) -> None:
    """A container that holds a daemon's lock loses it with the file; a host's process is named."""
    place = tmp_path / "host"
    place.mkdir()
    seen = SimHost(place)
    host = HostDaemons(HostPrograms(roots=()), proc=seen.proc)
    spec = sleeper(tmp_path)
    script = (
        f"import fcntl; lock = open({str(spec.lock)!r}, 'w'); fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); input()\n"
    )
    seen.add_process(HERE, "0::/system.slice/metagpu.service\n")

    async with await anyio.open_process([sys.executable, "-c", script]) as holder:
        assert holder.stdout is not None
        assert (await holder.stdout.receive()).startswith(b"locked")
        try:
            seen.add_process(holder.pid, "0::/user.slice\n")
            assert await host.find(spec) is None
            with pytest.raises(ProgramError, match=rf"process {holder.pid} holds .*end it"):
                await host.start(spec)

            seen.add_container_process(holder.pid, Holder("team", "mallory", "main"))
            process = await host.start(spec)
            await host.kill(process)
        finally:
            holder.kill()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "socket", "missing"])
def test_only_a_regular_file_has_a_lock(tmp_path: Path, kind: str) -> None:
    """Whatever a container shows in place of the lock has no holder, and is not waited for."""
    place = tmp_path / "lock"
    if kind == "link":
        place.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(place))

    assert running.lock_holder(place) is None


async def test_long_output_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that writes on and on keeps its process and takes a limited part of the disk."""
    monkeypatch.setattr(daemons, "LONGEST_OUTPUT", 1000)
    text = (
        "print('x' * 2000, flush=True)\n"
        "while os.stat(1).st_size: time.sleep(0.01)\n"
        "print('again', flush=True); time.sleep(60)"
    )
    spec = sleeper(tmp_path, text)
    process = await HOST.start(spec)
    try:
        await wait_output(spec, "x" * 2000)
        assert (await HOST.last_output_line(spec)) == "x" * 2000
        await HOST.limit_output(spec)
        await wait_output(spec, "again")

        assert await anyio.Path(spec.output).read_text() == "again\n"
    finally:
        await HOST.kill(process)


async def test_a_mount_that_fails_ends_the_start(tmp_path: Path) -> None:
    """A daemon whose mount fails is not started; the error has the folder and the reason."""
    require_mounts("a mount that fails")
    spec = replace(sleeper(tmp_path), mounts={tmp_path / "nowhere": tmp_path / "missing"})

    with pytest.raises(ProgramError, match="nowhere: No such file or directory"):
        await HOST.start(spec)


async def test_a_simulated_daemon_needs_no_mount(tmp_path: Path) -> None:
    """A daemon that is not the host's starts without its mounts, and so without a privilege."""
    spec = replace(sleeper(tmp_path), mounts={tmp_path / "nowhere": tmp_path / "missing"})
    daemons = replace(HOST, on_host=False)

    await daemons.kill(await daemons.start(spec))


def test_processes_are_identified_by_their_start() -> None:
    """Our pid with another start time is not a running process."""
    ourselves = running.read_process(HERE)
    assert ourselves is not None
    assert ourselves.process.pid == HERE

    assert running.open_pidfd(DaemonProcess(HERE, ourselves.process.started - 1)) is None
    descriptor = running.open_pidfd(ourselves.process)
    assert descriptor is not None
    os.close(descriptor)


@pytest.mark.timeout(30)  # the kernel ends such a lease after 45 s
def test_a_lease_on_the_lock_holds_nobody(tmp_path: Path) -> None:
    """A container's lease on its file, which makes an open wait for 45 s, tells of no holder."""
    lock = tmp_path / "lock"
    lock.touch()
    holder = subprocess.Popen(  # noqa: S603 - a program of the test
        [sys.executable, "-c", LEASE, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"leased\n"
        assert running.lock_holder(lock) is None
        holder.communicate(b"")


LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
sys.stdin.read()
"""

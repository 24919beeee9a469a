"""Real processes of this machine: identified, described, and signalled or left alone."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.contracts.host import Container, ProcessIdentity
from metagpu.core.errors import HostError
from metagpu.core.model.shares import Holder
from metagpu.host import linux
from metagpu.host.linux import LinuxHost
from metagpu.sim.machine.containers import SimHost, container_of
from tests.rigs.host import running

ALICE = Holder("team", "alice", "main")
BOB = Holder("team", "bob", "main")


@pytest.fixture
def rig(tmp_path: Path) -> SimHost:
    """Build a machine for the test."""
    return SimHost(tmp_path)


async def identity(rig: SimHost, pid: int) -> ProcessIdentity:
    """Return the identity of a pid's present process."""
    return (await rig.host.identify([pid]))[pid]


# --- identity ------------------------------------------------------------------------------------


async def test_processes_are_identified(rig: SimHost) -> None:
    """Pid, start and container identify a process, also among those of one container."""
    async with running() as one, running() as other:
        rig.add_container_process(one.pid, ALICE)
        rig.add_container_process(other.pid, ALICE)
        found = await rig.host.identify([one.pid, other.pid])

        assert {who.container for who in found.values()} == {container_of(ALICE)}
        assert found[one.pid] != found[other.pid]
        assert await rig.host.identify([one.pid, other.pid]) == found


async def test_callers_at_the_same_time_share_a_reading(
    rig: SimHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight callers have two readings: that of the first one, and one for all the others."""
    readings: list[set[int]] = []
    found: dict[int, ProcessIdentity] = {}
    read = vars(LinuxHost)["_identify"]

    def note(host: LinuxHost, pids: set[int]) -> Mapping[int, ProcessIdentity]:
        readings.append(set(pids))
        identities: Mapping[int, ProcessIdentity] = read(host, pids)
        return identities

    async def ask(pid: int) -> None:
        [found[pid]] = (await rig.host.identify([pid])).values()

    monkeypatch.setattr(LinuxHost, "_identify", note)
    pids = range(100, 108)
    for pid in pids:
        rig.add_container_process(pid, ALICE, real=os.getpid())
    async with anyio.create_task_group() as group:
        for pid in pids:
            group.start_soon(ask, pid)

    assert readings == [{100}, set(pids) - {100}]
    assert found == {pid: await identity(rig, pid) for pid in pids}


async def test_a_process_that_is_gone_is_left_out(rig: SimHost) -> None:
    """A process that has ended, or cannot be seen, is left out without an error."""
    async with running() as ended:
        rig.add_container_process(ended.pid, ALICE)
        known = await identity(rig, ended.pid)
        ended.kill()
        await ended.wait()

    assert await rig.host.identify([ended.pid, 999_999_999]) == {}
    assert await rig.host.describe([known]) == {}


async def test_a_process_may_have_any_name(rig: SimHost) -> None:
    """Parentheses, spaces and line ends in a program's name do not change the other fields."""
    odd = rig.folder / ") R 1 (\n x"
    odd.symlink_to("/bin/sleep")

    async with running(str(odd), "60") as process:
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)
        details = (await rig.host.describe([who]))[who]

    assert abs(details.started_at - time.time()) < 60
    assert details.command == (str(odd), "60")


async def test_details_are_the_kernels(rig: SimHost) -> None:
    """The details of a process are user, command, start, memory, processor time and inner pid."""
    busy = "import time\nx = bytearray(32 << 20)\nfor _ in range(10**6): pass\nprint(flush=True)"
    code = f"{busy}\ntime.sleep(60)"
    async with running(sys.executable, "-c", code) as process:
        assert process.stdout is not None
        await process.stdout.receive()
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)
        details = (await rig.host.describe([who]))[who]

    assert details.command == (sys.executable, "-c", code)
    assert details.uid == os.getuid()
    assert details.inner_pid == process.pid
    assert details.memory > 32 << 20
    assert details.cpu > 0
    assert abs(details.started_at - time.time()) < 60


async def test_the_pid_within_the_container_is_the_innermost(rig: SimHost) -> None:
    """The kernel lists a pid for each namespace, and the container knows the innermost."""
    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        status = rig.proc / str(process.pid) / "status"
        text = status.read_text()
        status.unlink()
        status.write_text(text.replace(f"NSpid:\t{process.pid}", f"NSpid:\t{process.pid}\t40\t7"))
        who = await identity(rig, process.pid)

        assert (await rig.host.describe([who]))[who].inner_pid == 7


async def test_without_a_command_line_the_kernels_name_is_used(rig: SimHost) -> None:
    """A process without a command line has the kernel's name, in brackets."""
    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        command = rig.proc / str(process.pid) / "cmdline"
        command.unlink()
        command.write_text("")
        who = await identity(rig, process.pid)

        assert (await rig.host.describe([who]))[who].command == ("[sleep]",)


async def test_another_with_the_same_pid_is_not_described(rig: SimHost) -> None:
    """A process of another start time is another process, whatever its pid."""
    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)
        earlier = replace(who, started=who.started - 1)

        assert await rig.host.describe([earlier]) == {}


# --- containers ----------------------------------------------------------------------------------


async def test_containers_have_names(rig: SimHost) -> None:
    """A container's names are found once its link is there, and remembered afterwards."""
    container = container_of(ALICE)
    assert await rig.host.holders([container]) == {}

    rig.name(ALICE, container)
    assert await rig.host.holders([container]) == {container: ALICE}

    for link in rig.logs.iterdir():
        link.unlink()
    assert await rig.host.holders([container]) == {container: ALICE}


async def test_names_are_not_remembered_for_ever(
    rig: SimHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a limited number of names is kept, however many pods come and go."""
    monkeypatch.setattr(linux, "_REMEMBERED", 3)
    for life in range(10):
        container = container_of(ALICE, life)
        rig.name(ALICE, container)
        await rig.host.holders([container])

    assert list(rig.host._holders) == [container_of(ALICE, life) for life in (7, 8, 9)]


async def test_outside_the_hosts_pid_namespace_no_process_is_known(rig: SimHost) -> None:
    """In another pid namespace no process is identified, with an error."""
    namespace = rig.proc / "self/ns"
    namespace.mkdir(parents=True)
    (namespace / "pid").write_text("")  # no namespace of the kernel's has this file's inode
    host = LinuxHost(rig.proc, rig.logs)

    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        assert await host.identify([process.pid]) == {}

    [hint] = await host.hints()
    assert hint == (
        "metagpu does not run in the host's pid namespace, and NVML names processes by the host's "
        "pids: no process has a known container; set `hostPID: true` for its pod"
    )


async def test_without_logs_there_are_no_names(rig: SimHost) -> None:
    """Without the kubelet's links no container has a name, and a hint names the mount."""
    host = LinuxHost(rig.proc, rig.folder / "none", own_pids=True)

    assert await host.holders([container_of(ALICE)]) == {}
    [hint] = await host.hints()
    assert hint == (
        f"processes cannot be matched to containers: {rig.folder / 'none'} is missing; mount the "
        "host's /var/log read-only at the same place"
    )


async def test_where_all_is_well_there_is_no_hint(rig: SimHost) -> None:
    """A machine that shows everything has no hint."""
    assert await rig.host.hints() == []


# --- signals --------------------------------------------------------------------------------------


async def test_a_signal_reaches_its_process(rig: SimHost) -> None:
    """A process of a container ends by the signal, and its neighbour stays."""
    async with running() as meant, running() as neighbour:
        rig.add_container_process(meant.pid, ALICE)
        rig.add_container_process(neighbour.pid, BOB)

        assert await rig.host.signal(await identity(rig, meant.pid), signal.SIGTERM)
        assert await meant.wait() == -signal.SIGTERM
        assert neighbour.returncode is None


async def test_an_ended_process_is_not_signalled(rig: SimHost) -> None:
    """A process that ends between decision and signal costs no other process a signal."""
    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)
        process.kill()
        await process.wait()

        assert not await rig.host.signal(who, signal.SIGKILL)


@pytest.mark.parametrize(
    "other",
    [
        lambda who: replace(who, started=who.started - 1),
        lambda who: replace(who, container=container_of(BOB)),
        lambda who: replace(who, container=Container(who.container.id, "another-pod")),
    ],
)
async def test_another_with_the_same_pid_is_not_signalled(
    rig: SimHost, other: Callable[[ProcessIdentity], ProcessIdentity]
) -> None:
    """Start and container are read again through the pidfd, so a reused pid is safe."""
    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)

        assert not await rig.host.signal(other(who), signal.SIGKILL)
        assert process.returncode is None
        assert await rig.host.signal(who, signal.SIGKILL)


async def test_a_process_that_moved_to_another_container_is_not_signalled(rig: SimHost) -> None:
    """A signal decided for one container is not sent in another."""
    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)
        rig.add_container_process(process.pid, BOB)

        assert not await rig.host.signal(who, signal.SIGKILL)
        assert process.returncode is None


async def test_a_process_of_the_host_is_never_signalled(rig: SimHost) -> None:
    """A process outside containers is not signalled for any caller."""
    async with running() as process:
        rig.add_process(process.pid, "0::/system.slice/sshd.service")

        with pytest.raises(ValueError, match="is in no container of a pod"):
            await rig.host.signal(await identity(rig, process.pid), signal.SIGKILL)
        assert process.returncode is None


@pytest.mark.parametrize("call", ["os.pidfd_open", "metagpu.host.linux.pidfd_send_signal"])
async def test_a_refusal_of_the_kernel_is_an_error(
    rig: SimHost, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Without the permission to signal, the error names the process and the capability."""

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)
        monkeypatch.setattr(call, refuse)
        with pytest.raises(HostError) as refused:
            await rig.host.signal(who, signal.SIGTERM)

    assert str(refused.value) == (
        f"SIGTERM cannot be sent to process {process.pid}: Operation not permitted; metagpu needs "
        "root with the capability KILL, and Linux 5.3 or newer"
    )


async def test_a_process_that_ends_just_before_the_signal_is_no_error(
    rig: SimHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may end after the last check: the pidfd still belongs to it alone."""

    def too_late(*_: object) -> None:
        raise ProcessLookupError

    async with running() as process:
        rig.add_container_process(process.pid, ALICE)
        who = await identity(rig, process.pid)
        monkeypatch.setattr(linux, "pidfd_send_signal", too_late)

        assert not await rig.host.signal(who, signal.SIGTERM)

"""Processes: the one at the other end of a socket, and the limit of this one."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from metagpu.core.contracts.host import Peer
from metagpu.core.model.shares import Holder
from metagpu.host import processes
from metagpu.host.linux import LinuxHost
from metagpu.host.processes import (
    is_in_other_container,
    raise_file_limit,
    read_identity,
    read_peer,
)
from metagpu.plugins.pod_api.relay.open_calls import group_of
from metagpu.sim.machine.containers import SimHost, container_of
from tests.rigs.cgroups import real_cgroup
from tests.rigs.logs import capture_module_logs

ALICE = Holder("default", "alice", "main")


@pytest.fixture
def own() -> Iterator[Peer]:
    """Return this process as a peer."""
    peer = Peer(os.getpid(), os.pidfd_open(os.getpid()))
    yield peer
    os.close(peer.pidfd)


def test_the_peer_is_known(tmp_path: Path, own: Peer) -> None:
    """A peer is its process, and the process's cgroup is its container."""
    rig = SimHost(tmp_path)
    rig.add_container_process(os.getpid(), ALICE)

    identity = read_peer(rig.proc, own)

    assert identity == read_identity(rig.proc, os.getpid())
    assert identity
    assert identity.container == container_of(ALICE)


def test_an_ending_peer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that ends while its files are read is unknown, as its pid may be reused."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        peer = Peer(process.pid, os.pidfd_open(process.pid))

        def end_meanwhile(proc: Path, pid: int, cgroups: Path) -> object:
            identity = read_identity(proc, pid, cgroups)
            process.kill()
            process.wait()
            return identity

        assert read_peer(Path("/proc"), peer)
        monkeypatch.setattr(processes, "read_identity", end_meanwhile)
        assert read_peer(Path("/proc"), peer) is None
        os.close(peer.pidfd)


LEADERLESS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.readline).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
"""Ends its first thread, and goes on in another: a zombie that works."""


def test_a_process_without_its_first_thread_is_in_its_container() -> None:
    """The kernel shows such a leader outside of all cgroups of v1; a thread that lives has them."""
    container = container_of(ALICE)
    with (
        real_cgroup(container) as folder,
        subprocess.Popen(  # noqa: S603 - as written above
            [sys.executable, "-c", LEADERLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        try:
            (folder / "cgroup.procs").write_text(str(process.pid))
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            state = Path(f"/proc/{process.pid}/stat")
            while state.read_text().rpartition(")")[2].split()[0] != "Z":
                os.sched_yield()

            identity = read_identity(Path("/proc"), process.pid)
            assert identity
            assert identity.container == container
            assert is_in_other_container(process.pid)
            assert group_of("/proc", process.pid) == f"pod{container.pod_uid}".encode()
        finally:
            process.kill()


SUCCESSIVE: Final = """
import _thread, ctypes, sys
sys.setswitchinterval(1e-5)
def follow():
    _thread.start_new_thread(follow, ())
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2):
    follow()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Goes on in threads that each start another one, and end."""


def test_threads_that_end_as_they_are_found_leave_no_container() -> None:
    """A process without its first thread is in its container or unknown, and never in none."""
    container = container_of(Holder("default", "mallory", "main"))
    with (
        real_cgroup(container) as folder,
        subprocess.Popen(  # noqa: S603 - as written above
            [sys.executable, "-c", SUCCESSIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        try:
            (folder / "cgroup.procs").write_text(str(process.pid))
            assert process.stdin
            process.stdin.write(b"\n")
            process.stdin.flush()
            state = Path(f"/proc/{process.pid}/stat")
            while state.read_text().rpartition(")")[2].split()[0] != "Z":
                os.sched_yield()

            found = [read_identity(Path("/proc"), process.pid) for _ in range(2000)]
            known = [identity.container for identity in found if identity]
            assert known
            assert set(known) == {container}
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("place", "threads", "expected"),
    [
        ("0::{0}", 3, (container_of(ALICE),)),  # cgroup v2 keeps the place of what ends
        ("1:name=systemd:/\n0::{0}", 3, ()),
        ("1:name=systemd:/\n0::/", 2, ()),  # the listing has one of two threads
        ("1:name=systemd:/\n0::/", 1, (None,)),  # all of it has ended
    ],
)
def test_ended_threads_are_read_for_a_short_time(
    tmp_path: Path, place: str, threads: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that has ended has its cgroup of v2; for v1, threads are tried for 50 ms."""
    container = container_of(ALICE)
    folder = tmp_path / "7"
    cgroup = place.format(f"/kubepods/pod{container.pod_uid}/{container.id}") + "\n"
    for file in (folder, *(folder / "task" / str(7 + n) for n in range(max(1, threads - 1)))):
        file.mkdir(parents=True)
        (file / "cgroup").write_text(cgroup)
        (file / "stat").write_text(f"7 (a) Z 1 7 7 0 -1 {0x4} {'0 ' * 10}{threads} 0 99 0 0\n")
    monkeypatch.setattr("time.monotonic", count(step=0.02).__next__)
    passes, listdir = count(), os.listdir

    def listed(path: int) -> list[str]:
        assert next(passes) < 4
        return listdir(path)

    monkeypatch.setattr(os, "listdir", listed)
    identity = read_identity(tmp_path, 7)
    assert (() if identity is None else (identity.container,)) == expected


async def test_without_the_hosts_pids_every_peer_is_unknown(tmp_path: Path, own: Peer) -> None:
    """In a pid namespace of our own a pid may be that of any process, so no peer is known."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").write_text("")
    assert await LinuxHost(tmp_path).peer(own) is None
    assert await LinuxHost(tmp_path, own_pids=True).peer(own) is None  # nor without a /proc
    assert await LinuxHost(own_pids=True).peer(own)


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "reported"),
    [
        (16, 16, None, True),
        (16, 100, 100, True),
        (16, 512, 512, False),
        (256, 4096, 2048, False),
        (16, resource.RLIM_INFINITY, 2048, False),
        (1024, 1024, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_the_limit_is_raised_or_reported(
    soft: int, hard: int, raised: int | None, *, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft limit is raised to what is needed; a hard one that is too low is reported."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))

    with capture_module_logs(processes) as entries:
        raise_file_limit()

    assert limits == ([(raised, hard)] if raised else [])
    assert [entry["event"] for entry in entries] == ["too few open files allowed"] * reported

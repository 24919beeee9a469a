"""Processes: the one at the other end of a socket, and the limit of this one."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metagpu.core.contracts.host import Peer
from metagpu.core.model.shares import Holder
from metagpu.host import processes
from metagpu.host.linux import LinuxHost
from metagpu.host.processes import raise_file_limit, read_identity, read_peer
from metagpu.sim.machine.containers import SimHost, container_of
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
        (256, 4096, 1024, False),
        (16, resource.RLIM_INFINITY, 1024, False),
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

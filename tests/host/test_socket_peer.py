"""The process at the other end of a socket."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metagpu.core.contracts.host import Peer
from metagpu.core.model.shares import Holder
from metagpu.host import socket_peer
from metagpu.host.linux import LinuxHost
from metagpu.host.process import read_identity
from metagpu.host.socket_peer import read_peer
from metagpu.sim.machine.containers import SimHost, container_of

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
        monkeypatch.setattr(socket_peer, "read_identity", end_meanwhile)
        assert read_peer(Path("/proc"), peer) is None
        os.close(peer.pidfd)


async def test_without_the_hosts_pids_every_peer_is_unknown(tmp_path: Path, own: Peer) -> None:
    """In a pid namespace of our own a pid may be that of any process, so no peer is known."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").write_text("")
    assert await LinuxHost(tmp_path).peer(own) is None
    assert await LinuxHost(tmp_path, own_pids=True).peer(own) is None  # nor without a /proc
    assert await LinuxHost(own_pids=True).peer(own)

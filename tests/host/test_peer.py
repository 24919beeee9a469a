"""Who has opened the other end of a unix socket."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from metagpu.core.model import Holder
from metagpu.host import LinuxHost, peer
from metagpu.host.peer import read_peer
from metagpu.host.process import read_identity
from metagpu.sim.host import SimHost, container_of

ALICE = Holder("default", "alice", "main")
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"
UNKNOWN_OPTION = 9999
"""A socket option that no kernel has: to this one, it is as SO_PEERPIDFD to an older one."""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen in the test's folder."""
    with closing(socket.socket(socket.AF_UNIX)) as it:
        it.bind(str(tmp_path / "s"))
        it.listen()
        yield it


@pytest.fixture(params=["this kernel", "a kernel before 6.5"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have both ways of opening a peer's pidfd."""
    if request.param != "this kernel":
        monkeypatch.setattr(peer, "_SO_PEERPIDFD", UNKNOWN_OPTION)


@pytest.mark.usefixtures("kernel")
def test_who_connected_is_known(tmp_path: Path, listener: socket.socket) -> None:
    """The kernel says which process it was, and its cgroup which container that is."""
    rig = SimHost(tmp_path)
    rig.house(os.getpid(), ALICE)

    with closing(socket.socket(socket.AF_UNIX)) as caller:
        caller.connect(str(tmp_path / "s"))
        with closing(listener.accept()[0]) as accepted:
            identity = read_peer(rig.proc, accepted)

    assert identity == read_identity(rig.proc, os.getpid())
    assert identity
    assert identity.container == container_of(ALICE)


@pytest.mark.usefixtures("kernel")
def test_who_has_ended_is_nobody(tmp_path: Path, listener: socket.socket) -> None:
    """A connection outlives its opener; whoever has the pid by now is not asked for."""
    subprocess.run([sys.executable, "-c", CONNECT, tmp_path / "s"], check=True)  # noqa: S603

    with closing(listener.accept()[0]) as accepted:
        assert read_peer(Path("/proc"), accepted) is None


def test_who_is_ending_is_nobody(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends while it is looked at may have given its pid to another: it is not believed."""
    with subprocess.Popen(  # noqa: S603 - our own Python
        [sys.executable, "-c", f"{CONNECT}; sys.stdin.read()", tmp_path / "s"],
        stdin=subprocess.PIPE,
    ) as process:

        def end_meanwhile(proc: Path, pid: int) -> object:
            identity = read_identity(proc, pid)
            process.kill()
            process.wait()
            return identity

        with closing(listener.accept()[0]) as accepted:
            assert read_peer(Path("/proc"), accepted)
            monkeypatch.setattr(peer, "read_identity", end_meanwhile)
            assert read_peer(Path("/proc"), accepted) is None


async def test_without_the_hosts_pids_everybody_is_nobody(tmp_path: Path) -> None:
    """In a pid namespace of our own, a pid that we read could be anybody's."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").write_text("")
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with closing(ours), closing(theirs):
        assert await LinuxHost(tmp_path).peer(ours) is None
        assert await LinuxHost(tmp_path, own_pids=True).peer(ours) is None  # nor without a /proc
        assert await LinuxHost(own_pids=True).peer(ours)

"""The process that holds the containers' connections: what it asks of the kernel."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from metagpu.core.contracts.host import Peer
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.host.socket_peer import read_peer
from metagpu.plugins.pod_api import relay

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
    """Parametrize both ways of opening a caller's pidfd."""
    if request.param != "this kernel":
        monkeypatch.setattr(relay, "_SO_PEERPIDFD", UNKNOWN_OPTION)


@pytest.mark.usefixtures("kernel")
def test_the_caller_is_a_process(tmp_path: Path, listener: socket.socket) -> None:
    """The kernel names the process that called, and opens a descriptor of it."""
    with closing(socket.socket(socket.AF_UNIX)) as caller:
        caller.connect(str(tmp_path / "s"))
        with closing(listener.accept()[0]) as accepted:
            pid = relay._pid_of(accepted)
            pidfd = relay._pidfd(accepted, pid)

    about = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    os.close(pidfd)
    assert pid == os.getpid()
    assert f"Pid:\t{pid}\n" in about


@pytest.mark.usefixtures("kernel")
def test_an_ended_caller_is_unknown(tmp_path: Path, listener: socket.socket) -> None:
    """A connection outlives its opener, and a process that reuses the pid is not taken for it."""
    subprocess.run([sys.executable, "-c", CONNECT, tmp_path / "s"], check=True)  # noqa: S603

    with closing(listener.accept()[0]) as accepted:
        pid = relay._pid_of(accepted)
        try:
            pidfd = relay._pidfd(accepted, pid)
        except ProcessLookupError:
            return
        assert read_peer(Path("/proc"), Peer(pid, pidfd)) is None
        os.close(pidfd)


@pytest.mark.parametrize(
    ("text", "pod"),
    [
        (
            "0::/kubepods.slice/kubepods-pod4cb21a6c_3f0e_4c9b_8a6e_0d3a6a2f9b11.slice/cri-x.scope",
            b"pod4cb21a6c_3f0e_4c9b_8a6e_0d3a6a2f9b11",
        ),
        (
            "1:cpu:/kubepods/burstable/pod4cb21a6c-3f0e-4c9b-8a6e-0d3a6a2f9b11/abc/podded",
            b"pod4cb21a6c-3f0e-4c9b-8a6e-0d3a6a2f9b11",
        ),
        (f"0::/kubepods/pod{'a1' * 16}/abc", b"pod" + b"a1" * 16),
        ("0::/user.slice/session-1.scope", b""),
    ],
)
def test_turns_are_by_pod(tmp_path: Path, text: str, pod: bytes) -> None:
    """All containers of a pod share its turns; all other processes of the host share one."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(text, encoding="ascii")

    assert relay._pod_of(str(tmp_path), 7) == pod
    assert relay._pod_of(str(tmp_path), 8) == b""


def test_the_pace_is_that_of_a_token_bucket() -> None:
    """The relay, which imports nothing of the package, keeps the same rates as the package."""
    pace, bucket = relay.Pace(3, 10), TokenBucket(3, 10)
    now, waits = 100.0, list[tuple[float, float]]()
    for step in (0, 0, 0, 0.05, 0.2, 0, 1, 0, 0, 0, 0):
        now += step
        waits.append((pace.wait(now), bucket.wait(now)))
        if not waits[-1][0]:
            pace.take(now)
            bucket.take(now)
    assert [pytest.approx(b, abs=1e-9) for _, b in waits] == [a for a, _ in waits]
    assert {a > 0 for a, _ in waits} == {True, False}


def test_a_relay_with_too_much_to_close_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closes that pile up end the relay, as an ending process waits for none of them."""
    settings = dict.fromkeys(("accept_burst", "accepted", "call_burst", "calls"), 1.0)

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(relay, "_TICK", 0.0)  # no time to close any
    monkeypatch.setattr(os, "_exit", end)
    with ExitStack() as stack:
        ours, theirs, *callers = (stack.enter_context(socket.socket()) for _ in range(5))
        it = relay.Relay(ours, theirs, "/proc", settings)
        stack.callback(it._selector.close)
        it._held = 4

        it._dropped.extend(callers[:2])
        it._close_dropped()
        it._dropped.extend(callers[2:])
        with pytest.raises(SystemExit):
            it._close_dropped()

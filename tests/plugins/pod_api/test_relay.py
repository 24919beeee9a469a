"""The process that holds the containers' connections: what it asks of the kernel."""

import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from metagpu.core.contracts.host import Peer
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.host.processes import read_peer
from metagpu.plugins.pod_api.relay import open_calls, relay
from metagpu.plugins.pod_api.relay.open_calls import EVENT_READ, EVENT_WRITE, Call, OpenCalls
from metagpu.plugins.pod_api.relay.relay import Pace, Turns

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"
UNKNOWN_OPTION = 9999
"""A socket option that no kernel has: to this one, it is as SO_PEERPIDFD to an older one."""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen in the test's folder."""
    with closing(socket.socket(socket.AF_UNIX)) as live_socket:
        live_socket.bind(str(tmp_path / "s"))
        live_socket.listen()
        yield live_socket


@pytest.fixture(params=["this kernel", "a kernel before 6.5"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parametrize both ways of opening a caller's pidfd."""
    if request.param != "this kernel":
        monkeypatch.setattr(open_calls, "_SO_PEERPIDFD", UNKNOWN_OPTION)


@pytest.mark.usefixtures("kernel")
def test_the_caller_is_a_process(tmp_path: Path, listener: socket.socket) -> None:
    """The kernel names the process that called, and opens a descriptor of it."""
    with closing(socket.socket(socket.AF_UNIX)) as caller:
        caller.connect(str(tmp_path / "s"))
        with closing(listener.accept()[0]) as accepted:
            pid = open_calls.pid_of(accepted)
            pidfd = open_calls.open_pidfd(accepted, pid)

    about = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    os.close(pidfd)
    assert pid == os.getpid()
    assert f"Pid:\t{pid}\n" in about


@pytest.mark.usefixtures("kernel")
def test_an_ended_caller_is_unknown(tmp_path: Path, listener: socket.socket) -> None:
    """A connection outlives its opener, and a process that reuses the pid is not taken for it."""
    subprocess.run([sys.executable, "-c", CONNECT, tmp_path / "s"], check=True)  # noqa: S603

    with closing(listener.accept()[0]) as accepted:
        pid = open_calls.pid_of(accepted)
        try:
            pidfd = open_calls.open_pidfd(accepted, pid)
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

    assert open_calls.group_of(str(tmp_path), 7) == pod
    assert open_calls.group_of(str(tmp_path), 8) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs folders of another user")
def test_a_users_cgroups_are_no_groups(tmp_path: Path) -> None:
    """A cgroup of a pod's name counts where root has made it, whatever the names above it are."""
    pods = [f"pod{letter * 32}" for letter in "ab"]
    text = "0::/some.service/{}/x\n"
    for pid, (pod, user) in enumerate(zip(pods, (0, 4242), strict=True)):
        folder = tmp_path / "cgroup" / "some.service" / pod
        folder.mkdir(parents=True)
        os.chown(folder, user, user)
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(text.format(pod), encoding="ascii")

    groups = [
        open_calls.group_of(str(tmp_path), number, str(tmp_path / "cgroup")) for number in (0, 1)
    ]
    assert groups == [pods[0].encode(), b""]


def test_the_pace_is_that_of_a_token_bucket() -> None:
    """The relay, which imports nothing of the package, keeps the same rates as the package."""
    pace, bucket = Pace(3, 10), TokenBucket(3, 10)
    now, waits = 100.0, list[tuple[float, float]]()
    for step in (0, 0, 0, 0.05, 0.2, 0, 1, 0, 0, 0, 0):
        now += step
        waits.append((pace.wait(now), bucket.wait(now)))
        if not waits[-1][0]:
            pace.take(now)
            bucket.take(now)
    assert [pytest.approx(b, abs=1e-9) for _, b in waits] == [a for a, _ in waits]
    assert {a > 0 for a, _ in waits} == {True, False}


def test_turns_pass_over_groups_with_many_calls_under_way() -> None:
    """A group whose calls do not end waits for them, and no other group does."""
    turns, at = Turns(Pace(100, 1), most=3, most_of_group=2), 1000.0
    with ExitStack() as stack:
        for group in (b"a", b"a", b"a", b"b", b"b"):
            turns.add(group, stack.enter_context(socket.socket()))

        def taken() -> list[bytes]:
            return [turn[0] for turn in iter(lambda: turns.take(at), None)]

        assert taken() == [b"a", b"b", b"a"]
        assert (turns.wait(at), turns.waiting) == (None, 2)
        turns.end(b"b")
        assert taken() == [b"b"]
        turns.end(b"b")
        assert taken() == []  # the one that waits has its two calls
        turns.end(b"a")
        assert taken() == [b"a"]


def test_a_caller_that_reads_slowly_holds_no_place() -> None:
    """A caller has its time for each part of an answer, not for each byte of it."""
    ended = list[Call]()
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        (caller, theirs), (daemon, ours) = (
            [stack.enter_context(end) for end in socket.socketpair()] for _ in range(2)
        )
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        caller.settimeout(0)
        calls = OpenCalls(selector, 100, 5.0, ended.append)
        call = Call(b"a", caller, daemon)
        calls.add(call)

        ours.sendall(b"x" * 65536)
        calls.carry(call, daemon, EVENT_READ, 0.0)
        for now in (1.0, 2.0, 3.0, 4.0):
            left = len(call.rest)
            with suppress(BlockingIOError):
                while theirs.recv(65536, socket.MSG_DONTWAIT):
                    pass
            calls.carry(call, caller, EVENT_WRITE, now)
            assert 0 < len(call.rest) < left
            calls.end_unread(now)
        assert not ended
        calls.end_unread(5.5)
    assert ended == [call]


def test_a_relay_with_too_much_to_close_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closes that pile up end the relay, as an ending process waits for none of them."""
    settings = dict.fromkeys(("accept_burst", "accepted", "call_burst", "calls", "pod_calls"), 1.0)
    settings |= dict.fromkeys(("beat", "request_limit", "reading_time"), 1.0)

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(relay, "_TICK", 0.0)  # no time to close any
    monkeypatch.setattr(os, "_exit", end)
    with ExitStack() as stack:
        ours, theirs, *callers = (stack.enter_context(socket.socket()) for _ in range(5))
        live_relay = relay.Relay(ours, theirs, "/proc", settings)
        stack.callback(live_relay._selector.close)
        live_relay._held = 4

        live_relay._dropped.extend(callers[:2])
        live_relay._close_dropped()
        live_relay._dropped.extend(callers[2:])
        with pytest.raises(SystemExit):
            live_relay._close_dropped()

"""The socket that containers call, and callers that mean no good."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagpu.core.errors import MetagpuError
from metagpu.core.host import Container
from metagpu.core.model import Holder
from metagpu.plugins import pod_socket
from metagpu.plugins.frames import HEAD, REQUEST_LIMIT, Request
from metagpu.plugins.pod_folder import SOCKET_NAME, furnish, listening
from metagpu.plugins.pod_socket import Conversation, PodSocket
from metagpu.sim.host import SimHost, container_of
from tests.mgctl_rig import packed

ALICE = Holder("default", "alice", "main")
TOO_OFTEN = (
    "mgctl: this pod asks too often: 5 requests a second are answered; `-w` looks again by itself\n"
)


@dataclass
class Answerer:
    """Answers as a test wants, and remembers who asked what."""

    asked: list[tuple[Container, Request]] = field(default_factory=list)
    open: int = 0

    async def respond(self, container: Container, request: Request, to: Conversation) -> int:
        """Do what the first argument says."""
        self.asked.append((container, request))
        self.open += 1
        try:
            match request.arguments:
                case ["refuse"]:
                    raise MetagpuError("not today")
                case ["fail"]:
                    raise ZeroDivisionError
                case ["wait"]:
                    await anyio.sleep_forever()
                case ["flood"]:
                    while True:
                        await to.out("x" * 65536)
            await to.out("hello\n")
        finally:
            self.open -= 1
        return 0


@dataclass
class Ground:
    """A socket at work, which sees this test's own process in Alice's container."""

    path: Path
    machine: SimHost
    answerer: Answerer

    async def said(self, data: bytes) -> list[tuple[bytes, bytes | int]]:
        """Send bytes, hear the whole answer: letters with their text, or the status at the end."""
        async with connected(self.path) as (reader, writer):
            writer.write(data)
            return parsed(await reader.read())

    async def until(self, open_: int) -> None:
        """Wait until so many requests are being answered."""
        with anyio.fail_after(30):
            while self.answerer.open != open_:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.005)


@asynccontextmanager
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    """Serve while the block lasts."""
    machine, answerer = SimHost(tmp_path), Answerer()
    machine.house(os.getpid(), ALICE)
    async with anyio.create_task_group() as group:
        group.start_soon(PodSocket(tmp_path, machine.host, answerer.respond).run)
        path = tmp_path / SOCKET_NAME
        with anyio.fail_after(30):
            while not await anyio.Path(path).exists():  # noqa: ASYNC110 - files have no events here
                await anyio.sleep(0.005)
        yield Ground(path, machine, answerer)
        group.cancel_scope.cancel()


@asynccontextmanager
async def connected(
    path: Path,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Speak to the socket by hand."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def parsed(data: bytes) -> list[tuple[bytes, bytes | int]]:
    """Read the frames of an answer."""
    frames: list[tuple[bytes, bytes | int]] = []
    while data:
        kind, number = HEAD.unpack(data[:5])
        frames.append((kind, number if kind == b"x" else data[5 : 5 + number]))
        data = data[5:] if kind == b"x" else data[5 + number :]
    return frames


async def test_a_request_is_answered(tmp_path: Path) -> None:
    """Who asks is the container that the kernel names, what is asked what was sent."""
    async with ground(tmp_path) as it:
        assert await it.said(packed("get", "pods")) == [(b"o", b"hello\n"), (b"x", 0)]
        assert it.answerer.asked == [(container_of(ALICE), Request(("get", "pods")))]


def test_everybody_may_call(tmp_path: Path) -> None:
    """Users in containers have any number; the socket goes with the daemon, and is replaced."""
    path = tmp_path / SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    with listening(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert not path.exists()


async def test_a_refusal_is_a_line_and_a_failure_tells_nothing(tmp_path: Path) -> None:
    """An error of ours is for who asked; any other is for our log, and ends that call alone."""
    async with ground(tmp_path) as it:
        assert await it.said(packed("refuse")) == [(b"e", b"mgctl: not today\n"), (b"x", 1)]
        assert await it.said(packed("fail")) == []
        assert await it.said(packed()) == [(b"o", b"hello\n"), (b"x", 0)]


# --- who means no good ----------------------------------------------------------------------------


async def test_a_pod_has_few_calls_open(tmp_path: Path) -> None:
    """One pod cannot take the places of others; what it ends it may begin anew."""
    async with ground(tmp_path) as it, AsyncExitStack() as calls:
        for _ in range(pod_socket.CONNECTIONS_OF_A_POD):
            _, writer = await calls.enter_async_context(connected(it.path))
            writer.write(packed("wait"))
        await it.until(pod_socket.CONNECTIONS_OF_A_POD)

        assert await it.said(packed()) == [
            (b"e", b"mgctl: this pod has 4 calls open already; end one of them\n"),
            (b"x", 1),
        ]
        await calls.aclose()
        await it.until(0)
        assert await it.said(packed()) == [(b"o", b"hello\n"), (b"x", 0)]


async def test_a_pod_that_asks_too_often_waits_and_no_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond its rate a pod is refused at once, and another pod's first request is answered."""
    # So slow that no machine is slower; 5 a second is what it is.
    assert pod_socket.REQUESTS_A_SECOND == 5
    monkeypatch.setattr(pod_socket, "REQUESTS_A_SECOND", 0.001)
    async with ground(tmp_path) as it:
        for _ in range(pod_socket.REQUESTS_AT_ONCE + 10):
            answer = await it.said(packed())
        assert answer == [(b"e", TOO_OFTEN.replace("5 r", "0.001 r").encode()), (b"x", 1)]
        asked = len(it.answerer.asked)
        assert asked == pod_socket.REQUESTS_AT_ONCE

        bob = Holder("default", "bob", "main")
        it.machine.house(os.getpid(), bob)
        assert await it.said(packed()) == [(b"o", b"hello\n"), (b"x", 0)]
        assert it.answerer.asked[asked:] == [(container_of(bob), Request(()))]


async def test_half_a_request_has_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who connects and says nothing, or not all, is let go, and costs nobody a place."""
    monkeypatch.setattr(pod_socket, "REQUEST_TIME", 0.05)
    async with ground(tmp_path) as it:
        for half in (b"", b"\0", packed("get")[:-1]):
            assert await it.said(half) == [
                (b"e", b"mgctl: no request came within 0.05 s\n"),
                (b"x", 1),
            ]
    assert it.answerer.asked == []


async def test_who_does_not_read_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that nobody takes is given up, however long the caller stays."""
    monkeypatch.setattr(pod_socket, "READING_TIME", 0.1)
    async with ground(tmp_path) as it:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(str(it.path))
            deaf.sendall(packed("flood"))
            await it.until(1)
            await it.until(0)
            assert await it.said(packed()) == [(b"o", b"hello\n"), (b"x", 0)]


@pytest.mark.parametrize("more", [b"", b"x"])
async def test_who_hangs_up_or_says_more_is_answered_no_more(tmp_path: Path, more: bytes) -> None:
    """The answering ends with the caller, and with one that does not keep to one request."""
    async with ground(tmp_path) as it:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(it.path))
            caller.sendall(packed("wait"))
            await it.until(1)
            if more:
                caller.sendall(more)
                await it.until(0)
        await it.until(0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b'{"command": "usage"}\n' * 10,
        (REQUEST_LIMIT).to_bytes(2, "big") + b"x" * REQUEST_LIMIT,
    ],
)
async def test_garbage_is_refused(tmp_path: Path, garbage: bytes) -> None:
    """What is no request reaches nobody, and the next caller is served."""
    async with ground(tmp_path) as it:
        with suppress(ConnectionError):
            (kind, text), status = await it.said(garbage)
            assert (kind, status) == (b"e", (b"x", 1))
            assert isinstance(text, bytes)
            assert text.startswith(b"mgctl: this")
        assert it.answerer.asked == []
        assert await it.said(packed()) == [(b"o", b"hello\n"), (b"x", 0)]


@settings(max_examples=15)
@given(
    st.lists(
        st.one_of(st.binary(max_size=200), st.binary(max_size=64).map(lambda b: b"\0\x40" + b)),
        max_size=8,
    )
)
async def test_a_socket_outlives_whatever_is_sent(calls: Sequence[bytes]) -> None:
    """After any bytes, from callers that hang up at once, an honest request is answered."""
    async with (
        anyio.TemporaryDirectory(prefix="mg", dir="/tmp") as folder,  # noqa: S108 - a short name
        ground(Path(folder)) as it,
    ):
        for call in calls:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(it.path))
                caller.sendall(call)
        assert await it.said(packed()) == [(b"o", b"hello\n"), (b"x", 0)]


async def test_a_crowd_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of calls few are answered and none is left open; the last caller is served."""
    monkeypatch.setattr(pod_socket, "_ACCEPTED_A_SECOND", 1e6)
    monkeypatch.setattr(pod_socket, "REQUESTS_A_SECOND", 0.001)
    async with ground(tmp_path) as it:
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone
        limiter = anyio.CapacityLimiter(50)

        async def call() -> None:
            async with limiter:
                with suppress(OSError):
                    await it.said(packed())

        async with anyio.create_task_group() as group:
            for _ in range(2000):
                group.start_soon(call)

        assert 0 < len(it.answerer.asked) <= pod_socket.REQUESTS_AT_ONCE
        await it.until(0)
        it.machine.house(os.getpid(), Holder("default", "bob", "main"))
        assert await it.said(packed()) == [(b"o", b"hello\n"), (b"x", 0)]
        assert len(set(os.listdir("/proc/self/fd")) - before) < 5  # noqa: PTH208 - as above


async def test_a_crowd_is_taken_in_turns(tmp_path: Path) -> None:
    """However many call, so many a second are taken in: the rest wait in the kernel."""
    async with ground(tmp_path) as it:
        started = anyio.current_time()
        for _ in range(pod_socket._ACCEPTED_AT_ONCE + 40):
            await it.said(packed())
        assert anyio.current_time() - started >= 39 / pod_socket._ACCEPTED_A_SECOND


async def test_pods_that_are_gone_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of callers does not grow with the pods a node has had."""
    monkeypatch.setattr(pod_socket, "_REMEMBERED", 5)
    monkeypatch.setattr(pod_socket, "REQUESTS_A_SECOND", 1e9)
    machine, answerer = SimHost(tmp_path), Answerer()
    it = PodSocket(tmp_path, machine.host, answerer.respond)
    async with anyio.create_task_group() as group:
        group.start_soon(it.run)
        await anyio.wait_all_tasks_blocked()
        there = Ground(tmp_path / SOCKET_NAME, machine, answerer)
        for number in range(20):
            machine.house(os.getpid(), Holder("default", f"pod-{number}", "main"))
            await there.said(packed())
        group.cancel_scope.cancel()

    assert len(it._callers) <= 6


# --- the folder -----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_listened_in(tmp_path: Path) -> None:
    """It says which path, and what to do."""
    with pytest.raises(MetagpuError) as caught, listening(tmp_path / "none"):
        pass
    assert str(caught.value) == (
        f"cannot listen on {tmp_path / 'none' / SOCKET_NAME}: No such file or directory; run as "
        "root, or name another folder with --pod-dir"
    )


def test_the_program_is_put_there_and_kept_new(tmp_path: Path) -> None:
    """A copy that everybody may run; made anew when the daemon has another, and not otherwise."""
    programs, folder = tmp_path / "programs", tmp_path / "a" / "pod"
    programs.mkdir()
    program = programs / f"mgctl-{os.uname().machine}"

    program.write_bytes(b"one")
    folder.mkdir(parents=True, mode=0o700)
    furnish(folder, programs)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    first = (folder / "mgctl").stat()
    furnish(folder, programs)
    assert (folder / "mgctl").stat().st_ino == first.st_ino
    assert stat.S_IMODE(first.st_mode) == 0o755

    program.write_bytes(b"two")
    furnish(folder, programs)
    assert (folder / "mgctl").read_bytes() == b"two"
    assert [entry.name for entry in folder.iterdir()] == ["mgctl"]


def test_a_folder_in_the_programs_place_is_removed(tmp_path: Path) -> None:
    """A container runtime makes a folder of what it shall mount and does not find."""
    programs, folder = tmp_path / "programs", tmp_path / "pod"
    (folder / "mgctl").mkdir(parents=True)
    programs.mkdir()
    (programs / f"mgctl-{os.uname().machine}").write_bytes(b"one")

    furnish(folder, programs)
    assert (folder / "mgctl").read_bytes() == b"one"


def test_a_package_without_the_program(tmp_path: Path) -> None:
    """What was built without it says so, and how to build it."""
    with pytest.raises(MetagpuError) as caught:
        furnish(tmp_path / "pod", tmp_path)
    assert str(caught.value) == (
        f"this installation has no mgctl-{os.uname().machine} (No such file or directory); build "
        "it with `make mgctl` before the package is built"
    )

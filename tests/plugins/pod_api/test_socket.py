"""The socket that containers call, and its defence against malicious callers."""

import asyncio
import errno
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagpu.core.contracts.host import Container
from metagpu.core.errors import MetagpuError
from metagpu.core.grants.injection import POD_SOCKET_NAME
from metagpu.core.model.shares import Holder
from metagpu.host.programs import run_child
from metagpu.plugins.pod_api.frames import HEAD, REQUEST_LIMIT, PodRequest
from metagpu.plugins.pod_api.server import install_mgctl
from metagpu.plugins.pod_api.socket import (
    DEFAULT_LIMITS,
    CallerConnection,
    PodSocket,
    PodSocketLimits,
)
from metagpu.sim.machine.containers import SimHost, container_of
from tests.rigs.attack import attacker
from tests.rigs.mgctl import pack_request
from tests.rigs.waiting import becomes, skip, until

ALICE = Holder("default", "alice", "main")
TOO_OFTEN = (
    "mgctl: this pod asks too often: 5 requests a second are answered; `-w` looks again by itself\n"
)


@dataclass
class Answerer:
    """A responder that answers as a test wants, and records each caller and request."""

    asked: list[tuple[Container, PodRequest]] = field(default_factory=list)
    open: int = 0

    async def respond(self, container: Container, request: PodRequest, to: CallerConnection) -> int:
        """Answer as the first argument demands."""
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
                        await to.write_stdout("x" * 65536)
            await to.write_stdout("hello\n")
        finally:
            self.open -= 1
        return 0


@dataclass
class SocketRig:
    """A running socket, which sees this test's own process in Alice's container."""

    path: Path
    machine: SimHost
    answerer: Answerer
    pods: PodSocket

    async def is_served(self) -> bool:
        """Return whether the socket has a listener."""
        try:
            async with connected(self.path):
                return True
        except OSError:
            return False

    async def exchange(self, data: bytes) -> list[tuple[bytes, bytes | int]]:
        """Send bytes, read the whole answer: letters with their text, or the status at the end."""
        async with connected(self.path) as (reader, writer):
            writer.write(data)
            return parsed(await reader.read())

    async def is_answered(self) -> bool:
        """Return whether a valid request is answered."""
        return await self.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]

    async def until(self, open_: int) -> None:
        """Wait until so many requests are being answered."""
        with anyio.fail_after(30):
            while self.answerer.open != open_:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.005)


def children() -> list[int]:
    """Return the children of this process."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


@asynccontextmanager
async def pod_socket(
    tmp_path: Path, limits: PodSocketLimits = DEFAULT_LIMITS
) -> AsyncIterator[SocketRig]:
    """Serve while the block lasts."""
    machine, answerer = SimHost(tmp_path), Answerer()
    machine.add_container_process(os.getpid(), ALICE)
    pods = PodSocket(
        tmp_path, machine.host, run_child, answerer.respond, limits=limits, proc=machine.proc
    )
    rig = SocketRig(tmp_path / POD_SOCKET_NAME, machine, answerer, pods)
    async with anyio.create_task_group() as group:
        group.start_soon(pods.run)
        await until(rig.is_served)
        yield rig
        group.cancel_scope.cancel()


@asynccontextmanager
async def connected(
    path: Path,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the socket."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def parsed(data: bytes) -> list[tuple[bytes, bytes | int]]:
    """Parse the frames of an answer."""
    frames: list[tuple[bytes, bytes | int]] = []
    while data:
        kind, number = HEAD.unpack(data[:5])
        frames.append((kind, number if kind == b"x" else data[5 : 5 + number]))
        data = data[5:] if kind == b"x" else data[5 + number :]
    return frames


async def test_a_request_is_answered(tmp_path: Path) -> None:
    """The caller is the container that the kernel names, and the request arrives as sent."""
    async with pod_socket(tmp_path) as rig:
        assert await rig.exchange(pack_request("get", "pods")) == [(b"o", b"hello\n"), (b"x", 0)]
        assert rig.answerer.asked == [(container_of(ALICE), PodRequest(("get", "pods")))]


async def test_every_user_may_call(tmp_path: Path) -> None:
    """Any user may call; the socket ends with the daemon, and a leftover one is replaced."""
    path = tmp_path / POD_SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async with pod_socket(tmp_path) as rig:
        await rig.exchange(pack_request())
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o666  # noqa: PTH116 - as others see it
    assert not path.exists()


async def test_a_refusal_is_a_line_and_a_failure_is_silent(tmp_path: Path) -> None:
    """Our own error goes to the caller; any other goes to the log, and ends that call alone."""
    async with pod_socket(tmp_path) as rig:
        assert await rig.exchange(pack_request("refuse")) == [
            (b"e", b"mgctl: not today\n"),
            (b"x", 1),
        ]
        assert await rig.exchange(pack_request("fail")) == []
        assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]


async def test_with_json_a_refusal_has_its_reason(tmp_path: Path) -> None:
    """A caller that asks for JSON gets an object, also before its request counts."""
    json = pack_request("get", "pods", "-o", "json")
    async with pod_socket(tmp_path, PodSocketLimits(pod_requests=0.001, pod_burst=1)) as rig:
        assert await rig.exchange(json) == [(b"o", b"hello\n"), (b"x", 0)]
        (kind, text), status = await rig.exchange(json)
        assert (kind, status) == (b"e", (b"x", 1))
        refusal = TOO_OFTEN.removeprefix("mgctl: ").replace("5 r", "0.001 r").strip()
        assert msgspec.json.decode(cast("bytes", text)) == {
            "reason": "caller_refused",
            "error": refusal,
        }

        rig.machine.add_process(os.getpid(), "0::/user.slice")
        (_, text), _ = await rig.exchange(json)
        error = msgspec.json.decode(cast("bytes", text))["error"]
        assert error.startswith("this socket answers containers")


# --- malicious callers ----------------------------------------------------------------------------


async def test_a_pod_has_few_calls_open(tmp_path: Path) -> None:
    """One pod cannot take the connections of others; an ended call frees one."""
    async with pod_socket(tmp_path) as rig, AsyncExitStack() as calls:
        for _ in range(DEFAULT_LIMITS.pod_connections):
            _, writer = await calls.enter_async_context(connected(rig.path))
            writer.write(pack_request("wait"))
        await rig.until(DEFAULT_LIMITS.pod_connections)

        assert await rig.exchange(pack_request()) == [
            (b"e", b"mgctl: this pod has 4 calls open already; end one of them\n"),
            (b"x", 1),
        ]
        await calls.aclose()
        await rig.until(0)
        assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]


async def test_a_pod_that_asks_too_often_waits_and_no_other_does(tmp_path: Path) -> None:
    """Beyond its rate a pod is refused at once, and another pod's first request is answered."""
    # So slow that no machine is slower; 5 a second is what it is.
    assert DEFAULT_LIMITS.pod_requests == 5
    async with pod_socket(tmp_path, PodSocketLimits(pod_requests=0.001)) as rig:
        for _ in range(DEFAULT_LIMITS.pod_burst + 10):
            answer = await rig.exchange(pack_request())
        assert answer == [(b"e", TOO_OFTEN.replace("5 r", "0.001 r").encode()), (b"x", 1)]
        asked = len(rig.answerer.asked)
        assert asked == DEFAULT_LIMITS.pod_burst

        bob = Holder("default", "bob", "main")
        rig.machine.add_container_process(os.getpid(), bob)
        assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]
        assert rig.answerer.asked[asked:] == [(container_of(bob), PodRequest(()))]


async def test_half_a_request_has_little_time(tmp_path: Path) -> None:
    """A caller without a whole request is disconnected, and takes no other caller's connection."""
    async with pod_socket(tmp_path, PodSocketLimits(request_time=0.05)) as rig:
        for half in (b"", b"\0", pack_request("get")[:-1]):
            assert await rig.exchange(half) == [
                (b"e", b"mgctl: no request came within 0.05 s\n"),
                (b"x", 1),
            ]
    assert rig.answerer.asked == []


async def test_a_caller_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    """An answer that the caller does not read ends, however long the caller stays."""
    async with pod_socket(tmp_path, PodSocketLimits(reading_time=0.1)) as rig:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(str(rig.path))
            deaf.sendall(pack_request("flood"))
            await becomes(lambda: rig.answerer.asked)
            await rig.until(0)
            assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]


async def test_a_pod_whose_calls_do_not_end_waits_for_itself(tmp_path: Path) -> None:
    """Beyond the calls that a pod may have at the daemon it waits, and another pod does not."""
    async with pod_socket(tmp_path, PodSocketLimits(pod_calls=2)) as rig, AsyncExitStack() as calls:
        writers = []
        for _ in range(3):
            _, writer = await calls.enter_async_context(connected(rig.path))
            writer.write(pack_request("wait"))
            writers.append(writer)
        await rig.until(2)

        rig.machine.add_container_process(os.getpid(), Holder("default", "bob", "main"))
        assert await rig.is_answered()
        assert rig.answerer.open == 2
        writers[0].close()
        await becomes(
            lambda: sum(request.arguments == ("wait",) for _, request in rig.answerer.asked) == 3
        )


@pytest.mark.parametrize("more", [b"", b"x"])
async def test_a_caller_that_hangs_up_or_sends_more_is_answered_no_more(
    tmp_path: Path, more: bytes
) -> None:
    """The answer ends when the caller hangs up or sends more than one request."""
    async with pod_socket(tmp_path) as rig:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(rig.path))
            caller.sendall(pack_request("wait"))
            await rig.until(1)
            if more:
                caller.sendall(more)
                await rig.until(0)
        await rig.until(0)


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
    """An invalid request reaches no responder, and the next caller is served."""
    async with pod_socket(tmp_path) as rig:
        with suppress(ConnectionError):
            (kind, text), status = await rig.exchange(garbage)
            assert (kind, status) == (b"e", (b"x", 1))
            assert isinstance(text, bytes)
            assert text.startswith(b"mgctl: this")
        assert rig.answerer.asked == []
        assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]


@settings(max_examples=8)
@given(
    st.lists(
        st.one_of(st.binary(max_size=200), st.binary(max_size=64).map(lambda b: b"\0\x40" + b)),
        max_size=8,
    )
)
async def test_a_socket_outlives_any_bytes(calls: Sequence[bytes]) -> None:
    """After any bytes, from callers that hang up at once, a valid request is answered."""
    async with (
        anyio.TemporaryDirectory(prefix="mg", dir="/tmp") as folder,  # noqa: S108 - a short name
        pod_socket(Path(folder)) as rig,
    ):
        for call in calls:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(rig.path))
                caller.sendall(call)
        # Until the daemon has seen them hang up, they count as the pod's open calls.
        await until(rig.is_answered)


async def test_a_crowd_does_no_harm(tmp_path: Path) -> None:
    """Of thousands of calls few are answered and none stays open; the last caller is served."""
    limits = PodSocketLimits(accepted=1e6, pod_requests=0.001)
    async with pod_socket(tmp_path, limits) as rig:
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone
        limiter = anyio.CapacityLimiter(50)

        async def call() -> None:
            async with limiter:
                with suppress(OSError):
                    await rig.exchange(pack_request())

        async with anyio.create_task_group() as group:
            for _ in range(2000):
                group.start_soon(call)

        assert 0 < len(rig.answerer.asked) <= DEFAULT_LIMITS.pod_burst
        await rig.until(0)
        rig.machine.add_container_process(os.getpid(), Holder("default", "bob", "main"))
        assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]
        assert len(set(os.listdir("/proc/self/fd")) - before) < 5  # noqa: PTH208 - as above


async def test_a_crowd_is_taken_in_turns(tmp_path: Path) -> None:
    """Calls are given to the daemon at a limited rate; the rest wait for their turn."""
    limits = PodSocketLimits(call_burst=5, calls=100)
    async with pod_socket(tmp_path, limits) as rig:
        started = anyio.current_time()
        for _ in range(25):
            await rig.exchange(pack_request())
        assert anyio.current_time() - started >= 19 / limits.calls


async def test_pods_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    """The records of callers do not grow with the pods that a node has had."""
    limits = PodSocketLimits(remembered_pods=5, pod_requests=1e9)
    async with pod_socket(tmp_path, limits) as rig:
        for number in range(20):
            holder = Holder("default", f"pod-{number}", "main")
            rig.machine.add_container_process(os.getpid(), holder)
            await rig.exchange(pack_request())

    assert len(rig.pods._pods) <= 6


async def test_a_crowd_of_one_pod_waits_for_itself(tmp_path: Path) -> None:
    """Calls are answered in turns by pod: a pod's thousand waiting calls are one turn."""
    # At this rate the crowd alone would take a quarter of an hour.
    limits = PodSocketLimits(call_burst=1, calls=1)
    async with (
        pod_socket(tmp_path, limits) as rig,
        attacker("crowd", rig.path, 1000) as crowd,
    ):
        rig.machine.add_container_process(crowd.process.pid, Holder("default", "mallory", "main"))
        assert await crowd.attack() == "sent"
        with anyio.fail_after(30):
            assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]


# --- the relay ------------------------------------------------------------------------------------


async def test_a_relay_that_hangs_is_replaced(tmp_path: Path) -> None:
    """A relay without a sign of life is killed, and callers are answered by the next one."""
    before = children()
    async with pod_socket(tmp_path) as rig:
        (relay,) = set(children()) - set(before)
        os.kill(relay, signal.SIGSTOP)
        await anyio.wait_all_tasks_blocked()
        skip(20)
        await becomes(lambda: "gave no sign of life for 10 s" in rig.pods.problem)
        await becomes(lambda: not rig.pods.problem)

        assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]
        assert relay not in children()


async def test_a_socket_file_that_is_removed_is_made_again(tmp_path: Path) -> None:
    """Callers are answered again within seconds after root has removed the socket file."""
    async with pod_socket(tmp_path) as rig:
        rig.path.unlink()
        await becomes(lambda: "was removed" in rig.pods.problem)
        await becomes(rig.path.is_socket)

        assert await rig.exchange(pack_request()) == [(b"o", b"hello\n"), (b"x", 0)]


async def test_a_relay_that_cannot_listen_is_a_problem(tmp_path: Path) -> None:
    """A folder that the relay cannot use is a reason with the path and the fix."""
    folder = tmp_path / "none"
    pods = PodSocket(folder, SimHost(tmp_path).host, run_child, Answerer().respond)
    async with anyio.create_task_group() as group:
        group.start_soon(pods.run)
        await becomes(lambda: pods.problem)
        group.cancel_scope.cancel()

    assert pods.problem == (
        f"cannot listen on {folder / POD_SOCKET_NAME}: No such file or directory; run as root, or "
        "name another folder with --pod-dir"
    )


async def test_a_relay_that_cannot_be_started_is_a_problem(tmp_path: Path) -> None:
    """Without a process for the relay there is a reason, and another attempt."""
    starts = list[Sequence[str]]()

    def refuse(command: Sequence[str], *, stdin: int) -> AbstractAsyncContextManager[object]:  # noqa: ARG001
        starts.append(command)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    pods = PodSocket(tmp_path, SimHost(tmp_path).host, refuse, Answerer().respond)
    async with anyio.create_task_group() as group:
        group.start_soon(pods.run)
        await becomes(lambda: len(starts) > 1)
        group.cancel_scope.cancel()

    assert pods.problem == f"{sys.executable} cannot be started: Resource temporarily unavailable"


# --- the folder -----------------------------------------------------------------------------------


def test_the_program_is_installed_and_kept_current(tmp_path: Path) -> None:
    """The folder has an executable copy, written again only when the daemon's copy differs."""
    programs, folder = tmp_path / "programs", tmp_path / "a" / "pod"
    programs.mkdir()
    program = programs / f"mgctl-{os.uname().machine}"

    program.write_bytes(b"one")
    folder.mkdir(parents=True, mode=0o700)
    install_mgctl(folder, programs)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    first = (folder / "mgctl").stat()
    install_mgctl(folder, programs)
    assert (folder / "mgctl").stat().st_ino == first.st_ino
    assert stat.S_IMODE(first.st_mode) == 0o755

    program.write_bytes(b"two")
    install_mgctl(folder, programs)
    assert (folder / "mgctl").read_bytes() == b"two"
    assert {entry.name for entry in folder.iterdir()} == {"mgctl", "metagpu-hook"}
    assert (folder / "metagpu-hook").read_bytes() == b"two"


def test_a_folder_in_the_programs_place_is_removed(tmp_path: Path) -> None:
    """A folder that a container runtime created in the program's place is removed."""
    programs, folder = tmp_path / "programs", tmp_path / "pod"
    (folder / "mgctl").mkdir(parents=True)
    programs.mkdir()
    (programs / f"mgctl-{os.uname().machine}").write_bytes(b"one")

    install_mgctl(folder, programs)
    assert (folder / "mgctl").read_bytes() == b"one"


def test_a_package_without_the_program(tmp_path: Path) -> None:
    """A package built without the program is an error that names the build command."""
    with pytest.raises(MetagpuError) as caught:
        install_mgctl(tmp_path / "pod", tmp_path)
    assert str(caught.value) == (
        f"this installation has no mgctl-{os.uname().machine} (No such file or directory); build "
        "it with `make mgctl` before the package is built"
    )

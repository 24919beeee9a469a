"""Servers of gRPC: what is left of one whose start is cancelled, and of calls without a caller."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread
from grpclib.exceptions import GRPCError

from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.grpc_server import (
    BatchedTransport,
    StreamingCalls,
    serve_grpc,
    unary_method,
)
from tests.rigs.waiting import becomes

METHOD = "/example.Echo/Echo"


async def echo(request: bytes) -> bytes:
    """Return the request."""
    return request


async def call_in_vain(path: Path, begun: Callable[[], object]) -> None:
    """Call a server, and give up once it has begun to answer."""
    async with anyio.create_task_group() as group:
        group.start_soon(call_raw, path, METHOD, b"1", 30.0)
        await becomes(begun)
        group.cancel_scope.cancel()


async def test_after_a_cancelled_start_the_next_server_answers(tmp_path: Path) -> None:
    """The next listener has the file descriptor of the cancelled one, and accepts connections."""
    methods = {METHOD: unary_method(echo)}
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with serve_grpc(tmp_path / "1.sock", methods, StreamingCalls()):
            pass
    assert scope.cancelled_caught

    async with serve_grpc(tmp_path / "2.sock", methods, StreamingCalls()):
        assert await call_raw(tmp_path / "2.sock", METHOD, b"hello", deadline=30.0) == b"hello"


async def test_a_bug_in_an_answer_is_told_by_every_service(tmp_path: Path) -> None:
    """The kubelet gets its name from DRA too, where grpclib alone says "Internal Server Error"."""

    async def broken(_: bytes) -> bytes:
        raise ZeroDivisionError("a bug")

    async with serve_grpc(tmp_path / "s.sock", {METHOD: unary_method(broken)}, StreamingCalls()):
        with pytest.raises(GRPCError, match="ZeroDivisionError: a bug"):
            await call_raw(tmp_path / "s.sock", METHOD, b"", deadline=30.0)


async def test_an_answer_without_a_caller_keeps_its_lock_to_the_end(tmp_path: Path) -> None:
    """A thread that works for a call goes on when the caller has gone; the next call waits."""
    lines, lock, gate = list[str](), anyio.Lock(), threading.Event()

    async def answer(request: bytes) -> bytes:
        lines.append(f"call {request.decode()}")
        async with lock:
            lines.append(f"begin {request.decode()}")
            try:
                await to_thread.run_sync(gate.wait)
            finally:
                lines.append(f"end {request.decode()}")
        return b""

    path = tmp_path / "s.sock"
    methods = {METHOD: unary_method(answer)}
    async with (
        serve_grpc(path, methods, StreamingCalls()),
        anyio.create_task_group() as group,
    ):
        await call_in_vain(path, lambda: "begin 1" in lines)
        group.start_soon(call_raw, path, METHOD, b"2", 30.0)
        await becomes(lambda: "call 2" in lines)
        await anyio.wait_all_tasks_blocked()
        assert "begin 2" not in lines
        gate.set()
    assert lines == ["call 1", "begin 1", "call 2", "end 1", "begin 2", "end 2"]


async def test_the_end_of_a_server_waits_for_answers_without_a_caller(tmp_path: Path) -> None:
    """The next server finds no work of the one before under way."""
    begun, ended, gate = list[str](), list[str](), threading.Event()

    async def answer(_: bytes) -> bytes:
        begun.append("answer")
        try:
            await to_thread.run_sync(gate.wait)
        finally:
            ended.append("answer")
        return b""

    path = tmp_path / "s.sock"
    methods = {METHOD: unary_method(answer)}
    async with anyio.create_task_group() as group:
        async with serve_grpc(path, methods, StreamingCalls(), linger=30.0):
            await call_in_vain(path, lambda: begun)

            async def let_go() -> None:
                await anyio.wait_all_tasks_blocked()
                gate.set()

            group.start_soon(let_go)
        assert ended == ["answer"]


class Recorder(asyncio.Transport):
    """A transport that keeps what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep what is written."""
        self.done.append(bytes(data))

    def close(self) -> None:
        """Note the end."""
        self.closing = True
        self.done.append(b"closed")

    def is_closing(self) -> bool:
        """Return whether it was closed."""
        return self.closing


async def test_an_answer_is_sent_at_once() -> None:
    """Headers, message and trailers are one write; the next answer is another."""
    below = Recorder()
    transport = BatchedTransport(below)
    for part in (b"headers ", b"message ", b"trailers"):
        transport.write(part)
    assert below.done == []
    await anyio.lowlevel.checkpoint()
    assert below.done == [b"headers message trailers"]

    transport.write(b"next")
    await anyio.lowlevel.checkpoint()
    assert below.done[1:] == [b"next"]


async def test_a_closing_transport_sends_what_it_has() -> None:
    """Closing sends what was written before; afterwards nothing is written."""
    below = Recorder()
    transport = BatchedTransport(below)
    transport.write(b"last")
    transport.close()
    transport.write(b"too late")
    await anyio.lowlevel.checkpoint()

    assert below.done == [b"last", b"closed"]
    assert transport.is_closing()

"""Servers of gRPC: what is left of one whose start is cancelled, and of calls without a caller."""

import threading
from contextlib import suppress
from pathlib import Path

import anyio
from anyio import to_thread

from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, serve_grpc, unary_method

METHOD = "/example.Echo/Echo"


async def echo(request: bytes) -> bytes:
    """Return the request."""
    return request


async def test_after_a_cancelled_start_the_next_server_answers(tmp_path: Path) -> None:
    """The next listener has the file descriptor of the cancelled one, and accepts connections."""
    methods = {METHOD: unary_method(echo)}
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with serve_grpc(tmp_path / "1.sock", methods, StreamingCalls()):
            pass
    assert scope.cancelled_caught

    async with serve_grpc(tmp_path / "2.sock", methods, StreamingCalls()):
        assert await call_raw(tmp_path / "2.sock", METHOD, b"hello", deadline=5.0) == b"hello"


async def test_an_answer_without_a_caller_keeps_its_lock_to_the_end(tmp_path: Path) -> None:
    """A thread that works for a call goes on when the caller has gone; the next call waits."""
    lines, lock, gate = list[str](), anyio.Lock(), threading.Event()

    async def answer(request: bytes) -> bytes:
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
        with suppress(OSError):
            await call_raw(path, METHOD, b"1", deadline=0.1)
        group.start_soon(call_raw, path, METHOD, b"2", 30.0)
        await anyio.sleep(0.1)
        assert lines == ["begin 1"]
        gate.set()
    assert lines == ["begin 1", "end 1", "begin 2", "end 2"]

"""Servers of gRPC: what is left of one whose start is cancelled."""

from pathlib import Path

import anyio

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

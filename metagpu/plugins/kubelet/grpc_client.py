"""gRPC calls to the kubelet, each in a task of its own.

grpclib ends a call whose connection is lost, or whose deadline passes, by cancelling the task that
makes the call, and it never takes that cancellation back. A cancel scope around such a call no
longer recognises its own cancellation afterwards, and the task group around the scope ends without
an error. So no call of grpclib's client runs in a task that has scopes of ours.
"""

import asyncio
from collections.abc import Coroutine
from errno import ECONNRESET
from pathlib import Path
from typing import Any, TypeVar, cast

from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol

from metagpu.plugins.kubelet.messages import RawCodec

ResultT = TypeVar("ResultT")


class UnixChannel(Channel):
    """A connection to a gRPC server on a unix socket."""

    def __init__(self, path: Path, codec: CodecBase | None = None) -> None:
        super().__init__(path=str(path), codec=codec)

    async def connect(self) -> None:
        """Connect, unless the connection is open.

        Raises:
            OSError: no server listens, or it is gone.
        """
        await self.__connect__()

    async def __connect__(self) -> H2Protocol:
        """Connect for a call.

        grpclib returns a connection that its server ended meanwhile, and a call on it fails with an
        AttributeError.
        """
        protocol = await super().__connect__()
        if not self._connected:
            raise ConnectionResetError(ECONNRESET, "the server ended the connection")
        return protocol


async def call_raw(socket: Path, method: str, request: bytes, deadline: float) -> bytes:
    """Make one unary call with encoded messages, on a connection of its own.

    Raises:
        OSError: the server cannot be reached, or exceeds `deadline` seconds.
        GRPCError: the server refuses.
        StreamTerminatedError: the server goes away meanwhile.
    """
    async with UnixChannel(socket, RawCodec()) as channel:
        call = UnaryUnaryMethod[bytes, bytes](channel, method, bytes, bytes)
        return await call_alone(call(request, timeout=deadline)) or b""


async def call_alone(call: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Make a call of grpclib's client in a task of its own; return its result.

    Cancelling the caller cancels the call, which has ended at the return.

    Raises:
        ConnectionAbortedError: the call was cancelled, and its caller was not.
        Exception: any error of the call.
    """
    caller = cast("asyncio.Task[Any]", asyncio.current_task())
    cancellations = caller.cancelling()

    try:
        return await asyncio.create_task(call)
    except asyncio.CancelledError:
        if caller.cancelling() > cancellations:
            raise
        raise ConnectionAbortedError("the call was cancelled") from None

"""A device plugin that does nothing: what grpclib alone costs.

    python -m bench.null_plugin FOLDER

For every file `NAME.answer` in the folder it serves a socket `NAME.sock`, on which each unary call
of the DevicePlugin service is answered with the file's bytes. Nothing is decoded, looked up or
encoded: a pass-through codec hands the handler the request's raw bytes, and the handler ignores
them. The server is grpclib's own, as it comes.
"""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase
from grpclib.server import Server

if TYPE_CHECKING:
    from grpclib.server import Stream

_UNARY: Final = ("GetDevicePluginOptions", "GetPreferredAllocation", "Allocate")


class PassThrough(CodecBase):
    """Hands message bytes through."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Give the bytes as they are."""
        return message

    def decode(self, data: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Give the bytes as they are."""
        return data


class NullPlugin:
    """Answers every unary call with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def __mapping__(self) -> dict[str, Handler]:
        """Give the methods as grpclib asks for them."""
        return {
            f"/v1beta1.DevicePlugin/{name}": Handler(
                self._call, Cardinality.UNARY_UNARY, bytes, bytes
            )
            for name in _UNARY
        }

    async def _call(self, stream: "Stream[bytes, bytes]") -> None:
        await stream.recv_message()
        await stream.send_message(self._answer)


async def serve(answers: Iterable[Path]) -> None:
    """Serve each answer on a socket beside its file, until ended."""
    for file in answers:
        server = Server([NullPlugin(file.read_bytes())], codec=PassThrough())
        await server.start(path=str(file.with_suffix(".sock")))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(list(Path(sys.argv[1]).glob("*.answer"))))

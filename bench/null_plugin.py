"""A device plugin that does nothing: the cost of grpclib alone.

    python -m bench.null_plugin FOLDER

For every file `NAME.answer` in the folder the plugin serves a socket `NAME.sock`, and answers each
unary call of the DevicePlugin service with the file's bytes. Nothing is decoded, searched or
encoded: a pass-through codec gives the handler the request's raw bytes, and the handler ignores
them. The server is grpclib's own, unchanged.
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
    """A codec that passes message bytes through."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Return the bytes unchanged."""
        return message

    def decode(self, data: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Return the bytes unchanged."""
        return data


class NullPlugin:
    """A service that answers every unary call with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def __mapping__(self) -> dict[str, Handler]:
        """Return the methods as grpclib expects them."""
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
    """Serve each answer on a socket beside its file, until the process ends."""
    for file in answers:
        server = Server([NullPlugin(file.read_bytes())], codec=PassThrough())
        await server.start(path=str(file.with_suffix(".sock")))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(list(Path(sys.argv[1]).glob("*.answer"))))

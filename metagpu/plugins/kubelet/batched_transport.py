"""A transport that sends what is written in one turn of the event loop together.

grpclib writes the headers, the message and the end of an answer one after the other. Each would be
a call to the system, and wake the kubelet.
"""

import asyncio
from typing import Any


class BatchedTransport(asyncio.Transport):
    """The part of a transport that grpclib uses."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._unsent: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data before the event loop's next turn ends."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(bytes(data))

    def close(self) -> None:
        """Close the connection once all data is sent."""
        self._send()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as asyncio has it
        """Return a property of the connection."""
        return self._transport.get_extra_info(name, default)

    def _send(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        if data and not self._transport.is_closing():
            self._transport.write(data)

"""Writes of one turn of the event loop reach the socket together."""

import asyncio

import anyio.lowlevel

from metagpu.plugins.kubelet.batched_transport import BatchedTransport


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

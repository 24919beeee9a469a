"""The API server at the address that pods know: that of the Service `kubernetes`.

The node runs no kube-proxy. Its pods reach an address of the machine through their gateway, so
the machine has the address for a while, and passes connections on to the API server.
"""

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from tests.e2e.rig.machine import SERVICE_ADDRESS
from tests.e2e.rig.settings import API_PORT, LOOPBACK

SERVICE_PORT = 443
_PIECE = 1 << 16


@contextmanager
def service_address() -> Iterator[None]:
    """Answer as the Service `kubernetes` in the block."""
    subprocess.run(["ip", "address", "add", SERVICE_ADDRESS, "dev", "lo"], check=True)
    started = Future[Callable[[], object]]()
    thread = threading.Thread(target=asyncio.run, args=(_serve(started),))
    thread.start()
    try:
        stop = started.result()
        try:
            yield
        finally:
            stop()
    finally:
        thread.join()
        subprocess.run(["ip", "address", "delete", SERVICE_ADDRESS, "dev", "lo"], check=True)


async def _serve(started: "Future[Callable[[], object]]") -> None:
    """Serve until the function that STARTED gets is called, from any thread."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    try:
        server = await asyncio.start_server(
            _connect, SERVICE_ADDRESS.partition("/")[0], SERVICE_PORT
        )
    except OSError as error:
        started.set_exception(error)
        return
    started.set_result(lambda: loop.call_soon_threadsafe(stopped.set))
    await stopped.wait()
    server.close()  # asyncio.run cancels the connections


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        inner, outer = await asyncio.open_connection(LOOPBACK, API_PORT)
        await asyncio.gather(_pass_on(reader, outer), _pass_on(inner, writer))
    writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    writer.close()

"""Services at their addresses: that of the API server, which pods know, and others.

The node runs no kube-proxy. Its pods reach an address of the machine through their gateway, so
the machine has the address for a while, and passes connections on to an endpoint of the Service.
"""

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.settings import API_PORT, KUBERNETES_ADDRESS, LOOPBACK

SERVICE_PORT = 443
_PIECE = 1 << 16

Endpoint = tuple[str, int]
"""An address and its port."""


def api_server() -> Endpoint:
    """Return the endpoint of the Service `kubernetes`."""
    return LOOPBACK, API_PORT


@contextmanager
def service_address(
    address: str = KUBERNETES_ADDRESS, endpoint: Callable[[], Endpoint] = api_server
) -> Iterator[None]:
    """Answer as a Service in the block; ENDPOINT is called for each connection, in a thread."""
    subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    started = Future[Callable[[], object]]()
    thread = threading.Thread(target=asyncio.run, args=(_serve(started, address, endpoint),))
    thread.start()
    try:
        stop = started.result()
        try:
            yield
        finally:
            stop()
    finally:
        thread.join()
        subprocess.run(["ip", "address", "delete", f"{address}/32", "dev", "lo"], check=True)


async def _serve(
    started: "Future[Callable[[], object]]", address: str, endpoint: Callable[[], Endpoint]
) -> None:
    """Serve until the function that STARTED gets is called, from any thread."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, RigError):
            inner, outer = await asyncio.open_connection(*await asyncio.to_thread(endpoint))
            with closing(outer):
                await asyncio.gather(_pass_on(reader, outer), _pass_on(inner, writer))

    try:
        server = await asyncio.start_server(connect, address, SERVICE_PORT)
    except OSError as error:
        started.set_exception(error)
        return
    started.set_result(lambda: loop.call_soon_threadsafe(stopped.set))
    await stopped.wait()
    server.close()  # asyncio.run cancels the connections


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    writer.close()

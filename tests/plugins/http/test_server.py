"""Pages over HTTP, and misbehaving clients."""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus

import anyio
import anyio.lowlevel
import h11
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from metagpu.plugins.http import server as http
from metagpu.plugins.http.address import ALL_ADDRESSES, HttpTiming, ListenAddress
from metagpu.plugins.http.messages import HttpRequest, HttpResponse, HttpStream
from metagpu.plugins.http.server import CONNECTIONS, PageServer
from tests.plugins.http.rig import asked, sent
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import until

HERE = ListenAddress("127.0.0.1", 0)
QUICK = HttpTiming(retry_period=0.0, silence=0)
LARGE = b"x" * 32 * 2**20


@dataclass
class Pages:
    """Pages that behave as a test wants; `open` counts the requests in progress."""

    gate: anyio.Event = field(default_factory=anyio.Event)
    open: int = 0

    async def hello(self, _: HttpRequest) -> HttpResponse:
        """Return a short page."""
        return HttpResponse(HTTPStatus.OK, b"hello\n", "text/x-greeting")

    async def wait(self, request: HttpRequest) -> HttpResponse:
        """Return a page when the event is set."""
        self.open += 1
        try:
            await self.gate.wait()
        finally:
            self.open -= 1
        return await self.hello(request)

    async def large(self, _: HttpRequest) -> HttpResponse:
        """Return a large page."""
        return HttpResponse(HTTPStatus.OK, LARGE)

    async def endless(self, _: HttpRequest) -> HttpStream:
        """Return a page without an end."""

        async def parts() -> AsyncGenerator[bytes, None]:
            while True:
                yield b"x" * 2**20

        return HttpStream(parts, "text/x-endless")

    async def fail(self, _: HttpRequest) -> HttpResponse:
        """Fail by a fault of the page."""
        raise ZeroDivisionError


@asynccontextmanager
async def serving(
    address: ListenAddress = HERE, timing: HttpTiming = QUICK
) -> AsyncIterator[tuple[PageServer, Pages]]:
    """Serve until the block ends."""
    pages = Pages()
    names = ("hello", "wait", "large", "endless", "fail")
    named = {f"/{name}": getattr(pages, name) for name in names}
    server = PageServer(address, named, timing)
    async with anyio.create_task_group() as group:
        group.start_soon(server.run)
        await listening(server)
        yield server, pages
        group.cancel_scope.cancel()


async def listening(server: PageServer) -> None:
    """Wait until the server listens."""

    async def so() -> bool:
        return server.port != 0

    await until(so, deadline=30)


async def test_a_page_is_served() -> None:
    """A page has a type and a length; each connection serves one request."""
    async with serving() as (server, _):
        status, headers, body = await asked(server.port, "/hello?a=b")

        assert (status, body) == (200, "hello\n")
        assert headers == {
            "content-type": "text/x-greeting",
            "content-length": "6",
            "connection": "close",
        }


async def test_head_is_a_page_without_its_body() -> None:
    """HEAD returns the headers of a page."""
    async with serving() as (server, _):
        status, headers, body = await asked(server.port, "/hello", "HEAD")

        assert (status, headers["content-length"], body) == (200, "6", "")


async def test_a_page_without_an_end_arrives_in_parts_until_the_client_has_enough() -> None:
    """A stream has no length, HEAD ends it at once, and a client that leaves ends it."""
    async with serving() as (server, _):
        status, headers, body = await asked(server.port, "/endless", "HEAD")
        assert (status, headers["content-type"], body) == (200, "text/x-endless", "")

        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: it\r\n\r\n")
        assert b"content-length" not in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2**22)
        assert server._streams == 1
        writer.close()

        async def gone() -> bool:
            return server._streams == 0

        await until(gone, deadline=30)


async def test_what_is_not_there() -> None:
    """Other paths and methods get an error status with a text."""
    async with serving() as (server, _):
        status, headers, body = await asked(server.port, "/etc/passwd")
        assert (status, headers["content-type"]) == (404, "text/plain; charset=utf-8")
        assert body == "no such page; the pages are: /hello, /wait, /large, /endless, /fail\n"

        status, headers, body = await asked(server.port, "/hello", "DELETE")
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        assert body == "only GET and HEAD are allowed\n"


async def test_a_body_is_not_read() -> None:
    """A client that sends a large body gets its answer all the same."""
    async with serving() as (server, _):
        data = b"POST /hello HTTP/1.1\r\nHost: it\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200000
        assert (await sent(server.port, data))[0] == 405


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\n\r\n", 400),  # without a host
        (b"GET /hello HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100, 400),  # TLS
        (b"\x00" * 1000, 400),
    ],
)
async def test_what_is_no_request_is_refused(data: bytes, status: int) -> None:
    """A malformed request gets a status; the next client is served."""
    async with serving() as (server, _):
        assert (await sent(server.port, data))[0] == status
        assert (await asked(server.port, "/hello"))[0] == 200


async def test_a_fault_of_ours_is_logged() -> None:
    """A fault of a page is logged; its client gets no answer, the next one does."""
    async with serving() as (server, _):
        with capture_module_logs(http) as logs:
            status, _, body = await asked(server.port, "/fail")
        assert (status, body) == (500, "metagpu failed; its log has the details\n")
        assert [entry["event"] for entry in logs] == ["page failed"]
        assert (await asked(server.port, "/hello"))[0] == 200


@pytest.mark.parametrize("data", [b"", b"GET /he", b"GET /hello HTTP/1.1\r\nX: "])
async def test_a_silent_client_is_dropped(data: bytes) -> None:
    """A silent client gets a timeout status and is disconnected."""
    async with serving(timing=HttpTiming(request_timeout=0.05, silence=0)) as (server, _):
        status, _, body = await sent(server.port, data)
        assert (status, body) == (408, "no request arrived within 0.05 s\n")


@pytest.mark.parametrize("path", ["/large", "/endless"])
async def test_a_client_that_does_not_read_is_dropped(path: str) -> None:
    """A client that does not read its answer is disconnected."""
    async with serving(timing=HttpTiming(response_timeout=0.05)) as (server, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: it\r\n\r\n".encode())

        async def dropped() -> bool:
            return not server._open and not server._streams

        while await dropped():
            await checkpoint()
        await until(dropped, deadline=30)
        assert (await asked(server.port, "/hello"))[0] == 200
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_a_large_page_arrives() -> None:
    """A page larger than the socket's buffers arrives whole."""
    async with serving() as (server, _):
        assert len((await asked(server.port, "/large"))[2]) == len(LARGE)


async def test_a_crowd_of_silent_clients_keeps_no_other_out() -> None:
    """At the limit the oldest client is dropped, and a request is served at once."""
    async with serving() as (server, _):
        silent = [
            await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS + 8)
        ]
        try:
            assert (await asked(server.port, "/hello"))[0] == 200
            assert len(server._open) <= CONNECTIONS
            reader, _ = silent[0]
            assert await reader.read() == b""
        finally:
            for _, writer in silent:
                writer.close()
            for _, writer in silent:
                with suppress(OSError):
                    await writer.wait_closed()


async def test_hundreds_of_silent_clients_delay_no_probe() -> None:
    """Clients that send nothing take no turn of those that send a request."""
    async with serving(timing=HttpTiming()) as (server, _), AsyncExitStack() as silent:
        for _ in range(500):
            client = silent.enter_context(socket.socket())
            client.connect(("127.0.0.1", server.port))

        assert (await asked(server.port, "/hello"))[0] == 200
        # The kernel kept the silent ones: none had to be accepted, and dropped, before the request.
        assert len(server._open) <= 1


async def test_a_crowd_of_another_address_delays_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of connections with a byte each, from one pod, wait behind the kubelet's probe."""
    # In the order of their arrival, the probe would wait for minutes.
    monkeypatch.setattr(http, "_ACCEPT_RATE", 4.0)
    async with serving(timing=HttpTiming()) as (server, _), AsyncExitStack() as crowd:
        for _ in range(900):
            client = crowd.enter_context(socket.socket())
            client.bind(("127.0.0.2", 0))
            client.connect(("127.0.0.1", server.port))
            client.send(b"G")

        assert (await asked(server.port, "/hello"))[0] == 200


async def test_a_client_that_hangs_up_is_forgotten() -> None:
    """A client may hang up before its request or during the answer."""
    async with serving() as (server, pages):
        for data in (b"", b"GET /hel", b"GET /wait HTTP/1.1\r\nHost: it\r\n\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        pages.gate.set()

        async def forgotten() -> bool:
            return not server._open and not pages.open

        await until(forgotten, deadline=30)
        assert (await asked(server.port, "/hello"))[0] == 200


async def test_slow_pages_do_not_wait_for_each_other() -> None:
    """A slow page delays no other client."""
    async with serving() as (server, pages), anyio.create_task_group() as group:
        group.start_soon(asked, server.port, "/wait")

        async def waiting() -> bool:
            return pages.open == 1

        await until(waiting, deadline=30)
        assert (await asked(server.port, "/hello"))[0] == 200
        pages.gate.set()


@settings(max_examples=25)
@given(st.binary(max_size=300))
def test_no_bytes_stop_the_server(data: bytes) -> None:
    """After any bytes of one client, the next client is served."""

    async def attack() -> None:
        async with serving() as (server, _):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            assert (await asked(server.port, "/hello"))[0] == 200

    anyio.run(attack)


async def test_a_port_in_use_is_logged_once_and_bound_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A taken port is logged once and served when free."""
    tries, bind = 0, http.bind_address

    def counted(address: ListenAddress, silence: int) -> socket.socket:
        nonlocal tries
        tries += 1
        return bind(address, silence)

    monkeypatch.setattr(http, "bind_address", counted)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as other,
        capture_module_logs(http) as logs,
    ):
        port = other.getsockname()[1]
        server = PageServer(ListenAddress("127.0.0.1", port), {"/hello": Pages().hello}, QUICK)
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            while tries < 3:
                await checkpoint()
            other.close()
            await listening(server)
            assert (await asked(port, "/hello"))[0] == 200
            group.cancel_scope.cancel()

    refused, served = logs
    assert (refused["event"], refused["server"]) == ("http port unavailable", "metrics")
    assert refused["error"] == (
        f"127.0.0.1:{port}: another program has this port; stop it, or give --metrics another port"
    )
    assert served["event"] == "metrics served"
    assert served["address"] == f"127.0.0.1:{port}"


async def test_a_missing_address_is_logged() -> None:
    """A missing address is logged and served when its interface appears."""
    server = PageServer(ListenAddress("203.0.113.7", 9400), {}, QUICK)

    with capture_module_logs(http) as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            while not logs:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert logs[0]["error"] == (
        "203.0.113.7:9400: this machine has no such address; give --metrics one that it has"
    )


async def test_every_address_is_served() -> None:
    """A port alone stands for all addresses."""
    async with serving(ListenAddress(ALL_ADDRESSES, 0)) as (server, _):
        assert (await asked(server.port, "/hello"))[0] == 200


async def test_every_address_of_a_node_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without IPv6 all IPv4 addresses are served."""
    listening_on = http._listen

    def without_v6(host: str, port: int, silence: int, *, v6: bool) -> socket.socket:
        if v6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return listening_on(host, port, silence, v6=v6)

    monkeypatch.setattr(http, "_listen", without_v6)
    async with serving(ListenAddress(ALL_ADDRESSES, 0)) as (server, _):
        assert (await asked(server.port, "/hello"))[0] == 200


async def test_nothing_listens_when_it_ends() -> None:
    """The port is free after the end of the server."""
    async with serving() as (server, _):
        port = server.port
    with pytest.raises(OSError, match="Connect call failed"):
        await asked(port, "/hello")
    assert server.port == 0


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0, identity", False),
        ("br, x-gzip", False),
    ],
)
def test_a_client_gets_gzip_where_it_takes_it(accepted: str, compressed: bool) -> None:  # noqa: FBT001
    """The body is compressed for requests that accept gzip, and plain for all others."""
    headers = [("Host", "it"), ("Accept-Encoding", accepted)]
    request = h11.Request(method="GET", target="/metrics", headers=headers)
    response = HttpResponse(HTTPStatus.OK, b"plain", compressed=b"small")
    assert response.encoded_for(request) == ((b"small", "gzip") if compressed else (b"plain", ""))
    assert HttpResponse(HTTPStatus.OK, b"plain").encoded_for(request) == (b"plain", "")

"""Pages over HTTP, and clients that mean no good."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus

import anyio
import anyio.lowlevel
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from metagpu.plugins.metrics import http
from metagpu.plugins.metrics.address import ANYWHERE, Address
from metagpu.plugins.metrics.http import CONNECTIONS, PageServer, Response
from tests.heard import heard
from tests.plugins.metrics.rig import asked, sent
from tests.waiting import until

HERE = Address("127.0.0.1", 0)
LARGE = b"x" * 32 * 2**20


@dataclass
class Pages:
    """Pages that do as a test wants; `open` requests are being answered."""

    gate: anyio.Event = field(default_factory=anyio.Event)
    open: int = 0

    async def hello(self) -> Response:
        """Answer."""
        return Response(HTTPStatus.OK, b"hello\n", "text/x-greeting")

    async def wait(self) -> Response:
        """Answer when it is time."""
        self.open += 1
        try:
            await self.gate.wait()
        finally:
            self.open -= 1
        return await self.hello()

    async def large(self) -> Response:
        """Answer with much."""
        return Response(HTTPStatus.OK, LARGE)

    async def fail(self) -> Response:
        """Fail for a reason of ours."""
        raise ZeroDivisionError


@asynccontextmanager
async def serving(address: Address = HERE) -> AsyncIterator[tuple[PageServer, Pages]]:
    """Serve while the block lasts."""
    pages = Pages()
    named = {f"/{name}": getattr(pages, name) for name in ("hello", "wait", "large", "fail")}
    server = PageServer(address, named)
    async with anyio.create_task_group() as group:
        group.start_soon(server.run)
        await listening(server)
        yield server, pages
        group.cancel_scope.cancel()


async def listening(server: PageServer) -> None:
    """Wait until it listens."""

    async def so() -> bool:
        return server.port != 0

    await until(so, deadline=30)


async def test_a_page_is_served() -> None:
    """With its type and length; one request for each connection."""
    async with serving() as (server, _):
        status, headers, body = await asked(server.port, "/hello?a=b")

        assert (status, body) == (200, "hello\n")
        assert headers == {
            "content-type": "text/x-greeting",
            "content-length": "6",
            "connection": "close",
        }


async def test_head_is_a_page_without_its_body() -> None:
    """As a monitor may ask whether there is one."""
    async with serving() as (server, _):
        status, headers, body = await asked(server.port, "/hello", "HEAD")

        assert (status, headers["content-length"], body) == (200, "6", "")


async def test_what_is_not_there() -> None:
    """Other paths and methods are refused in words."""
    async with serving() as (server, _):
        status, headers, body = await asked(server.port, "/etc/passwd")
        assert (status, headers["content-type"]) == (404, "text/plain; charset=utf-8")
        assert body == "no such page; there are: /hello, /wait, /large, /fail\n"

        status, headers, body = await asked(server.port, "/hello", "DELETE")
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        assert body == "only GET and HEAD are answered\n"


async def test_a_body_is_not_read() -> None:
    """A client that sends much gets its answer all the same."""
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
    """With a status; the next client is served."""
    async with serving() as (server, _):
        assert (await sent(server.port, data))[0] == status
        assert (await asked(server.port, "/hello"))[0] == 200


async def test_a_fault_of_ours_is_told_in_the_log() -> None:
    """The client hears no answer, and the next one is served."""
    async with serving() as (server, _):
        with heard(http) as logs:
            status, _, body = await asked(server.port, "/fail")
        assert (status, body) == (500, "metagpu failed; its log has the details\n")
        assert [entry["event"] for entry in logs] == ["a page could not be made"]
        assert (await asked(server.port, "/hello"))[0] == 200


@pytest.mark.parametrize("data", [b"", b"GET /he", b"GET /hello HTTP/1.1\r\nX: "])
async def test_who_sends_no_request_is_dropped(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, with a word."""
    monkeypatch.setattr(http, "REQUEST_TIME", 0.05)
    async with serving() as (server, _):
        status, _, body = await sent(server.port, data)
        assert (status, body) == (408, "no request came within 0.05 s\n")


async def test_who_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is not kept for ever."""
    monkeypatch.setattr(http, "READING_TIME", 0.05)
    async with serving() as (server, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET /large HTTP/1.1\r\nHost: it\r\n\r\n")

        async def dropped() -> bool:
            return not server._open

        await anyio.wait_all_tasks_blocked()
        await until(dropped, deadline=30)
        assert (await asked(server.port, "/hello"))[0] == 200
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_a_large_page_arrives() -> None:
    """Whatever the size of the socket's buffers."""
    async with serving() as (server, _):
        assert len((await asked(server.port, "/large"))[2]) == len(LARGE)


async def test_a_crowd_of_silent_clients_keeps_nobody_out() -> None:
    """When there are too many, the oldest has to go: who asks is served at once."""
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


async def test_who_hangs_up_is_forgotten() -> None:
    """Before its request, and while it is being answered."""
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
    """A page that takes its time keeps no other client waiting."""
    async with serving() as (server, pages), anyio.create_task_group() as group:
        group.start_soon(asked, server.port, "/wait")

        async def waiting() -> bool:
            return pages.open == 1

        await until(waiting, deadline=30)
        assert (await asked(server.port, "/hello"))[0] == 200
        pages.gate.set()


@settings(max_examples=25)
@given(st.binary(max_size=300))
def test_no_bytes_hinder_the_server(data: bytes) -> None:
    """Whatever is sent, the next client is served."""

    async def attack() -> None:
        async with serving() as (server, _):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            assert (await asked(server.port, "/hello"))[0] == 200

    anyio.run(attack)


async def test_a_port_that_is_taken_is_told_once_and_had_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sentence, however often it is tried; nothing ends."""
    tries, bound = 0, http._bound

    def counted(address: Address) -> socket.socket:
        nonlocal tries
        tries += 1
        return bound(address)

    monkeypatch.setattr(http, "RETRY", 0.0)
    monkeypatch.setattr(http, "_bound", counted)
    with closing(socket.create_server(("127.0.0.1", 0))) as other, heard(http) as logs:
        port = other.getsockname()[1]
        server = PageServer(Address("127.0.0.1", port), {"/hello": Pages().hello})
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            while tries < 3:
                await checkpoint()
            other.close()
            await listening(server)
            assert (await asked(port, "/hello"))[0] == 200
            group.cancel_scope.cancel()

    refused, served = logs
    assert refused["event"] == "metrics are not served; trying again"
    assert refused["why"] == (
        f"127.0.0.1:{port}: another program has this port; stop it, or give --metrics another port"
    )
    assert served["event"] == "metrics are served"
    assert served["address"] == f"127.0.0.1:{port}"


async def test_an_address_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come, as an interface may; until then it is said what is missing."""
    monkeypatch.setattr(http, "RETRY", 0.0)
    server = PageServer(Address("203.0.113.7", 9400), {})

    with heard(http) as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            while not logs:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert logs[0]["why"] == (
        "203.0.113.7:9400: this machine has no such address; give --metrics one that it has"
    )


async def test_every_address_is_served() -> None:
    """A port alone is all addresses."""
    async with serving(Address(ANYWHERE, 0)) as (server, _):
        assert (await asked(server.port, "/hello"))[0] == 200


async def test_every_address_of_a_node_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it has are served."""
    listening_on = http._listening

    def without_v6(host: str, port: int, *, v6: bool) -> socket.socket:
        if v6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return listening_on(host, port, v6=v6)

    monkeypatch.setattr(http, "_listening", without_v6)
    async with serving(Address(ANYWHERE, 0)) as (server, _):
        assert (await asked(server.port, "/hello"))[0] == 200


async def test_nothing_listens_when_it_ends() -> None:
    """The port is free again."""
    async with serving() as (server, _):
        port = server.port
    with pytest.raises(OSError, match="Connect call failed"):
        await asked(port, "/hello")
    assert server.port == 0

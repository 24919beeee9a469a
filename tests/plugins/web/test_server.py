"""The page's server, asked by browsers and by clients that mean no good."""

import asyncio
import gzip
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import anyio
import msgspec
import pytest

from metagpu.plugins import web
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.http.server import CONNECTIONS, STREAMS
from metagpu.plugins.web.server import HEADERS, PATHS, WebServer
from tests.plugins.http.rig import exchanged
from tests.rigs.waiting import until

LOOPBACK = ListenAddress("127.0.0.1", 0)
OPEN = ListenAddress("", 0)
QUICK = HttpTiming(silence=0, page_age=60.0)
VIEW = "/api/v1/view"
CHANGES = "/api/v1/changes"


@dataclass
class Source:
    """A view that counts how often it is made, and its changes."""

    made: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    async def view(self) -> Mapping[str, Any]:
        """Make the view."""
        self.made += 1
        return {"kind": "node", "made": self.made}

    async def changes(self) -> AsyncGenerator[object, None]:
        """Yield at each change."""
        while True:
            await self.changed.wait()
            self.changed = anyio.Event()
            yield None


class Tokens:
    """A check that knows one token, or nothing while the API server is away."""

    away = False

    async def run(self) -> None:
        """Hold nothing."""

    async def check(self, token: str, source: str) -> str:  # noqa: ARG002
        """Return why a token gives no access."""
        if self.away:
            raise ConnectionError("the API server is away")
        return {"good": ""}.get(token, "a token is needed")


@asynccontextmanager
async def serving(
    tokens: Tokens | None = None, timing: HttpTiming = QUICK
) -> AsyncIterator[tuple[WebServer, Source]]:
    """Serve the page until the block ends."""
    source = Source()
    address = OPEN if tokens else LOOPBACK
    server = WebServer(address, source.view, source.changes, tokens, timing)

    async def listens() -> bool:
        return server.port != 0

    async with anyio.create_task_group() as group:
        group.start_soon(server.run)
        await until(listens, deadline=30)
        yield server, source
        group.cancel_scope.cancel()


async def ask(server: WebServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask as a browser does; `host` and others replace its headers."""
    named = {"host": f"127.0.0.1:{server.port}", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    answer = await exchanged(server.port, f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
    return answer.status, answer.headers, answer.body


@dataclass
class Stream:
    """A client that follows the changes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, server: WebServer) -> "Stream":
        """Open the stream, and read its head."""
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {CHANGES} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return cls(reader, writer)

    async def head(self) -> str:
        """Return status and headers."""
        return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def change(self) -> None:
        """Wait for a change."""
        await self.reader.readuntil(b"event: change\n")
        await self.reader.readuntil(b"\n\n")


async def test_the_page_is_served_with_its_headers() -> None:
    """Each file has its type, and every response, errors too, the security headers."""
    types = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
    async with serving() as (server, _):
        for path, content in types.items():
            status, headers, body = await ask(server, path, accept_encoding="gzip")
            assert (status, headers["content-encoding"]) == (200, "gzip")
            assert headers["content-type"].startswith(content)
            assert gzip.decompress(body)
            assert headers.items() >= dict(HEADERS).items()
        for path in ("/etc/passwd", "/assets/index.html", "/../server.py"):
            status, headers, _ = await ask(server, path)
            assert status == 404
            assert headers.items() >= dict(HEADERS).items()


def test_the_page_names_all_its_files() -> None:
    """Each file of the page is served, and the browser hears of each script at once."""
    folder = files(web) / "assets"
    assert {PurePath(path).name or "index.html" for path in PATHS} == {
        file.name for file in folder.iterdir()
    }
    index = (folder / "index.html").read_text()
    assert set(re.findall(r'(?:href|src)="(\w+\.js)"', index)) == {
        path[1:] for path in PATHS if path.endswith(".js")
    }


async def test_a_view_is_made_once_until_it_changes() -> None:
    """Browsers share a view; one who heard of a change gets a view that has it."""
    async with serving() as (server, source):
        for _ in range(3):
            assert msgspec.json.decode((await ask(server, VIEW))[2])["made"] == 1
        stream = await Stream.open(server)
        assert "text/event-stream" in await stream.head()
        await stream.change()  # the state at the beginning
        source.changed.set()
        await stream.change()
        assert msgspec.json.decode((await ask(server, VIEW))[2])["made"] == 2
        stream.writer.close()


@pytest.mark.parametrize(
    "host",
    ["evil.example", "10.0.0.7:9450", "127.0.0.1.evil.example", "localhost.evil.example", "[::1"],
)
async def test_another_name_for_the_loopback_opens_nothing(host: str) -> None:
    """A site that gives its name our address (DNS rebinding) reads no page, view or stream."""
    async with serving() as (server, source):
        for path in ("/", VIEW, CHANGES):
            status, _, body = await ask(server, path, host=host)
            assert status == 403
            assert "127.0.0.1" in msgspec.json.decode(body)["message"]
        assert source.made == 0


async def test_another_site_opens_nothing() -> None:
    """A request by another site's script is refused, also one on another port of this machine."""
    async with serving() as (server, source):
        own = f"http://localhost:{server.port}"
        for origin in ("https://evil.example", "null", "http://localhost:3000", "http://["):
            assert (await ask(server, VIEW, host=own[7:], origin=origin))[0] == 403
        for site in ("cross-site", "same-site"):  # as an image, or a script that cannot read it
            for path in (VIEW, CHANGES):
                assert (await ask(server, path, sec_fetch_site=site))[0] == 403
            link = {"sec_fetch_site": site, "sec_fetch_dest": "document"}
            assert (await ask(server, "/", **link))[0] == 200
        assert source.made == 0
        assert (await ask(server, VIEW, host=own[7:], origin=own))[0] == 200
        for site in ("same-origin", "none"):
            assert (await ask(server, VIEW, sec_fetch_site=site))[0] == 200


async def test_others_need_a_token() -> None:
    """Beyond the loopback the data need a token; the page itself, which asks for it, does not."""
    tokens = Tokens()
    async with serving(tokens) as (server, source):
        for path in (VIEW, CHANGES):
            for given in ({}, {"metagpu_token": "bad"}, {"authorization": "Bearer good"}):
                status, _, body = await ask(server, path, host="gpu-1:9450", **given)
                assert (status, msgspec.json.decode(body)["message"]) == (403, "a token is needed")
        assert source.made == 0
        assert (await ask(server, "/", host="gpu-1:9450"))[0] == 200
        assert (await ask(server, VIEW, host="gpu-1:9450", metagpu_token="good"))[0] == 200  # noqa: S106
        tokens.away = True
        assert (await ask(server, VIEW, host="gpu-1:9450", metagpu_token="good"))[0] == 503  # noqa: S106


def test_an_open_address_without_a_check_of_tokens_is_a_fault() -> None:
    """The server is never built for others without a check of their tokens."""
    source = Source()
    with pytest.raises(ValueError, match="needs a check"):
        WebServer(OPEN, source.view, source.changes, None)


async def test_streams_have_a_limit_and_keep_nobody_out() -> None:
    """A stream too many is refused; the page is served beside them, and beside silent clients."""
    async with serving() as (server, _):
        streams = [await Stream.open(server) for _ in range(STREAMS)]
        for stream in streams:
            await stream.change()
        assert (await ask(server, CHANGES))[0] == 503
        silent = [
            await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(100 - len(streams))
        ]
        assert (await ask(server, VIEW))[0] == 200
        assert len(server.server._open) <= CONNECTIONS
        assert server.server._streams == STREAMS  # a crowd closes no stream

        streams[0].writer.close()

        async def freed() -> bool:
            return server.server._streams < STREAMS

        await until(freed, deadline=30)
        last = await Stream.open(server)
        assert (await last.head()).startswith("HTTP/1.1 200 ")
        for _, writer in [*silent, *((other.reader, other.writer) for other in [*streams, last])]:
            writer.close()


async def test_a_stream_ends_for_who_sends_more() -> None:
    """A client that sends more than its request loses its stream: nothing is read without end."""
    async with serving() as (server, _):
        stream = await Stream.open(server)
        await stream.change()
        stream.writer.write(b"x" * 100_000)

        async def ended() -> bool:
            return server.server._streams == 0

        await until(ended, deadline=30)
        stream.writer.close()


async def test_streams_end_with_the_server() -> None:
    """Open streams end at once when the daemon does."""
    async with serving() as (server, _):
        streams = [await Stream.open(server) for _ in range(3)]
        for stream in streams:
            await stream.change()
        began = time.monotonic()
    assert time.monotonic() - began < QUICK.response_timeout
    for stream in streams:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await stream.change()
        stream.writer.close()

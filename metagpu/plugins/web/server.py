"""The server of the page: its files, the view, and the changes of the view."""

import gzip
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.runtime.tasks import run_with_restart
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.http.messages import HttpRequest, HttpResponse, HttpStream
from metagpu.plugins.http.server import Page, PageServer, SingleFlight
from metagpu.plugins.web.access import (
    JSON,
    TokenCheck,
    foreign_site,
    refusal_of,
    status_response,
)
from metagpu.plugins.web.changes import ChangeFeed, ChangeSource

_SCRIPTS: Final = (
    *("page", "server", "input", "drawing", "filters", "node", "gpu"),
    *("reading", "reasons", "shades", "state", "words", "elements"),
)
_FILES: Final = {
    "/": "index.html",
    "/page.css": "page.css",
    "/icon.svg": "icon.svg",
    **{f"/{name}.js": f"{name}.js" for name in _SCRIPTS},
}
_CONTENT: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PATHS: Final = tuple(_FILES)


def read_page_files() -> Mapping[str, HttpResponse]:
    """Read the files of the page, by their paths; blocks."""
    folder = files(__package__) / "assets"
    return {path: _response(name, (folder / name).read_bytes()) for path, name in _FILES.items()}


def _response(name: str, body: bytes) -> HttpResponse:
    content = _CONTENT[PurePath(name).suffix]
    return HttpResponse(HTTPStatus.OK, body, content, gzip.compress(body, 9, mtime=0))


_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
)
"""The headers of all responses."""
_EVENT_STREAM: Final = "text/event-stream"

View = Callable[[], Awaitable[Mapping[str, Any]]]


class WebServer:
    """Serves the page and its data.

    On the loopback no token is asked for, but the request must be made to the loopback by name.

    Args:
        address: where to listen.
        view: makes the view, as plain data; browsers share one, until it changes.
        changes: the changes of the view, followed while a browser does.
        tokens: checks viewers' tokens; `None` for the loopback alone.

    Attributes:
        server: the HTTP server.
    """

    def __init__(
        self,
        address: ListenAddress,
        view: View,
        changes: ChangeSource,
        tokens: TokenCheck | None,
        timing: HttpTiming = HttpTiming(),  # noqa: B008 - frozen
    ) -> None:
        if tokens is None and not address.is_loopback:
            raise ValueError(f"{address} is open to others: it needs a check of tokens")
        self._tokens = tokens
        self._files: Mapping[str, HttpResponse] = {}
        self._view = SingleFlight[HttpResponse]("view", _encoded(view), timing.page_age)
        self._feed = ChangeFeed(changes, self._view.invalidate)
        pages: dict[str, Page] = {
            **{path: partial(self._read_file, path) for path in PATHS},
            "/api/v1/view": self._checked(self._read_view),
            "/api/v1/changes": self._checked(self._follow_changes),
        }
        if tokens is None:
            pages = {path: _local(page) for path, page in pages.items()}
        self.server = PageServer(address, pages, timing, name="web", headers=HEADERS)

    @property
    def port(self) -> int:
        """The port that is bound now, 0 without one."""
        return self.server.port

    async def run(self) -> None:
        """Serve until cancelled; a failure here ends nothing else."""
        self._files = await to_thread.run_sync(read_page_files)
        async with anyio.create_task_group() as group:
            group.start_soon(self._view.run)
            group.start_soon(partial(run_with_restart, self._feed.run, "changes of the page"))
            if self._tokens is not None:
                group.start_soon(partial(run_with_restart, self._tokens.run, "review of tokens"))
            group.start_soon(partial(run_with_restart, self.server.run, "page"))

    def _checked(self, page: Page) -> Page:
        """Return a page for viewers alone."""
        tokens = self._tokens
        if tokens is None:
            return page

        async def checked(request: HttpRequest) -> HttpResponse | HttpStream:
            return await refusal_of(tokens, request) or await page(request)

        return checked

    async def _read_file(self, path: str, _: HttpRequest) -> HttpResponse:
        return self._files[path]

    async def _read_view(self, _: HttpRequest) -> HttpResponse:
        response = await self._view.get()
        if response is None:
            text = "metagpu failed to make the view; its log has the details"
            return status_response(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        return response

    async def _follow_changes(self, _: HttpRequest) -> HttpStream:
        return HttpStream(self._feed.stream, _EVENT_STREAM)


def _local(page: Page) -> Page:
    """Return a page for requests to the loopback alone."""

    async def local(request: HttpRequest) -> HttpResponse | HttpStream:
        if problem := foreign_site(request):
            return status_response(HTTPStatus.FORBIDDEN, problem)
        return await page(request)

    return local


def _encoded(view: View) -> Callable[[], Awaitable[HttpResponse]]:
    """Return a maker of the encoded view; a thread encodes it."""

    async def encoded() -> HttpResponse:
        return await to_thread.run_sync(_encode, await view())

    return encoded


def _encode(view: Mapping[str, Any]) -> HttpResponse:
    """Level 1 has most of the gain at a fifth of the cost."""
    body = msgspec.json.encode(view)
    return HttpResponse(HTTPStatus.OK, body, JSON, gzip.compress(body, 1, mtime=0))

"""The files of the page, read once."""

import gzip
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from pathlib import PurePath
from typing import Final

from metagpu.plugins.http.messages import HttpResponse

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

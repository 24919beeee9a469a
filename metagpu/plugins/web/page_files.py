"""The files of the page, read once."""

import gzip
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Final

from metagpu.plugins.http.messages import HttpResponse

_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PATHS: Final = tuple(_FILES)


def read_page_files() -> Mapping[str, HttpResponse]:
    """Read the files of the page, by their paths; blocks."""
    folder = files(__package__) / "assets"
    return {
        path: _response((folder / name).read_bytes(), content)
        for path, (name, content) in _FILES.items()
    }


def _response(body: bytes, content: str) -> HttpResponse:
    return HttpResponse(HTTPStatus.OK, body, content, gzip.compress(body, 9, mtime=0))

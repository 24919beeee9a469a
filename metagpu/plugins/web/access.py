"""Access to pages: by a request's own headers, then by a token; and refusals."""

from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, Protocol
from urllib.parse import urlsplit

import msgspec

from metagpu.plugins.http.messages import HttpRequest, HttpResponse

_LOCALHOST: Final = "localhost"
_OWN: Final = ("same-origin", "none")
"""Who asks, in a browser's words: the page itself, or a person."""


def foreign_site(request: HttpRequest) -> str:
    """Return why a request comes by way of another site, an empty text if it does not.

    A site may give its own name an address of the loopback, and so make a browser ask here in its
    name: `Host` is that name then. `Origin` is the site whose script asks. A browser that asks
    without one says by `Sec-Fetch-Site` that another site asks: it cannot read a response, but
    would hold streams. A link on another site opens the page in a tab of its own.
    """
    host = request.headers.get("host", "")
    if not _names_loopback(host):
        return f"this page is served to localhost and 127.0.0.1, not to {host!r}"
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return f"this page is not served to {origin!r}"
    is_link = request.headers.get("sec-fetch-dest") == "document"
    if request.headers.get("sec-fetch-site", "none") not in _OWN and not is_link:
        return "this page is not served to other sites"
    return ""


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == _LOCALHOST or ip_address(name).is_loopback
    except ValueError:
        return False


TOKEN_HEADER: Final = "metagpu-token"  # noqa: S105 - the header's name
"""The header with a viewer's token. The API server keeps `Authorization` to itself."""
JSON: Final = "application/json"


class TokenCheck(Protocol):
    """A check of viewers' tokens."""

    async def run(self) -> None:
        """Hold what the check needs, until cancelled."""

    async def check(self, token: str, source: str) -> str:
        """Return why an address's token gives no access, an empty text for a viewer's.

        Raises:
            ConnectionError: the token could not be checked; the message says why.
        """
        ...


async def refusal_of(tokens: TokenCheck, request: HttpRequest) -> HttpResponse | None:
    """Return the response to a request that is not a viewer's, `None` for a viewer's."""
    try:
        problem = await tokens.check(request.headers.get(TOKEN_HEADER, ""), request.source)
    except ConnectionError as error:
        return status_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    # Not 401: the API server's clients would renew their own credentials.
    return status_response(HTTPStatus.FORBIDDEN, problem) if problem else None


def status_response(status: HTTPStatus, message: str) -> HttpResponse:
    """Return an error in the shape of Kubernetes' own, whose clients show the message."""
    body = {"kind": "Status", "apiVersion": "v1", "code": int(status), "message": message}
    return HttpResponse(status, msgspec.json.encode(body), JSON)

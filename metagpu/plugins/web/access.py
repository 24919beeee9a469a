"""Access by a request's own headers, before any token. Pure."""

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from metagpu.plugins.http.messages import HttpRequest

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

"""Access by a request's own headers, before any token. Pure."""

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from metagpu.plugins.metrics.http_messages import HttpRequest

_LOCALHOST: Final = "localhost"


def foreign_site(request: HttpRequest) -> str:
    """Return why a request comes by way of another site, an empty text if it does not.

    A site may give its own name an address of the loopback, and so make a browser ask here in its
    name: `Host` is that name then. `Origin` is the site whose script asks.
    """
    host = request.headers.get("host", "")
    if not _names_loopback(host):
        return f"this page is served to localhost and 127.0.0.1, not to {host!r}"
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return f"this page is not served to {origin!r}"
    return ""


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == _LOCALHOST or ip_address(name).is_loopback
    except ValueError:
        return False

"""Where monitoring may ask: an address of this machine, as an operator writes it."""

from ipaddress import ip_address
from typing import Final

import msgspec

from metagpu.core.errors import ConfigError

ANYWHERE: Final = ""
_LOCALHOST: Final = "127.0.0.1"
_MOST: Final = 65535


class Address(msgspec.Struct, frozen=True):
    """A port of one address of this machine, or of all if `host` is empty; port 0 is any free."""

    host: str
    port: int

    @property
    def is_v6(self) -> bool:
        """Whether it is of the Internet Protocol's sixth version; all addresses are of both."""
        return not self.host or ":" in self.host

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(text: str) -> Address:
    """Read `127.0.0.1:9400`, `[::1]:9400`, `localhost:9400`, or `:9400` for all addresses.

    Raises:
        ConfigError: if it is none of these.
    """
    host, colon, port = text.strip().rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host

    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > _MOST:
        raise _refused(text)
    if plain == "localhost":
        return Address(_LOCALHOST, int(port))
    if plain:
        try:
            version = ip_address(plain).version
        except ValueError:
            raise _refused(text) from None
        if (version == 6) != (plain != host):  # noqa: PLR2004 - brackets belong to IPv6 alone
            raise _refused(text)
    elif host:
        raise _refused(text)
    return Address(plain or ANYWHERE, int(port))


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is no address to serve on; write an IP address of this machine and a port, as "
        "in 127.0.0.1:9400 or [::1]:9400, or :9400 for all its addresses",
        file="--metrics",
    )

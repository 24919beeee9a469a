"""The listen address of monitoring, and the times of its connections."""

from ipaddress import ip_address
from typing import Final

import msgspec

from metagpu.core.config.errors import ConfigError, ConfigReason

ALL_ADDRESSES: Final = ""
_LOCALHOST: Final = "127.0.0.1"
_MOST: Final = 65535


class ListenAddress(msgspec.Struct, frozen=True):
    """A port of one address of this machine.

    An empty `host` means all addresses; port 0 is any free port.
    """

    host: str
    port: int

    @property
    def is_v6(self) -> bool:
        """True if the address needs an IPv6 socket; so do all addresses together."""
        return not self.host or ":" in self.host

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches the address."""
        return bool(self.host) and ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str = "--metrics") -> ListenAddress:
    """Parse an address such as `127.0.0.1:9400`, `[::1]:9400` or `localhost:9400`.

    `:9400` means all addresses.

    Raises:
        ConfigError: the text has another form.
    """
    host, colon, port = text.strip().rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host

    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > _MOST:
        raise _error(text, option)
    if plain == "localhost":
        return ListenAddress(_LOCALHOST, int(port))
    if plain:
        try:
            version = ip_address(plain).version
        except ValueError:
            raise _error(text, option) from None
        if (version == 6) != (plain != host):  # noqa: PLR2004 - brackets belong to IPv6 alone
            raise _error(text, option)
    elif host:
        raise _error(text, option)
    return ListenAddress(plain or ALL_ADDRESSES, int(port))


def _error(text: str, option: str) -> ConfigError:
    return ConfigError(
        f"invalid address {text!r}: write an IP address of this machine and a port, such as "
        "127.0.0.1:9400 or [::1]:9400, or :9400 for all addresses",
        ConfigReason.INVALID_VALUE,
        file=option,
    )


class HttpTiming(msgspec.Struct, frozen=True):
    """Times of serving, all in seconds.

    Attributes:
        page_age: requests within this time share one page.
        request_timeout: for a client to send its request.
        response_timeout: for a client to read the response: Prometheus gives up after 10 s too.
        silence: that a client which sends nothing waits in the kernel before it is accepted; 0
            accepts it at once.
        retry_period: between two attempts to bind the port.
    """

    page_age: float = 1.0
    request_timeout: float = 5.0
    response_timeout: float = 10.0
    silence: int = 5
    retry_period: float = 5.0

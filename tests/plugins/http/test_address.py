"""The address of the metrics server, as an operator writes it."""

import pytest

from metagpu.cli.metagpu import main
from metagpu.core.config.errors import ConfigError
from metagpu.plugins.http.address import ListenAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address", "written"),
    [
        ("127.0.0.1:9400", ListenAddress("127.0.0.1", 9400), "127.0.0.1:9400"),
        ("localhost:9400", ListenAddress("127.0.0.1", 9400), "127.0.0.1:9400"),
        ("[::1]:9400", ListenAddress("::1", 9400), "[::1]:9400"),
        (":9400", ListenAddress("", 9400), ":9400"),
        ("0.0.0.0:0", ListenAddress("0.0.0.0", 0), "0.0.0.0:0"),  # noqa: S104 - no socket listens here
    ],
)
def test_an_address_is_read(text: str, address: ListenAddress, written: str) -> None:
    """An address is an IP address and a port; a port alone is every address."""
    assert parse_address(text) == address
    assert str(address) == written


def test_which_protocol_an_address_is_of() -> None:
    """An IPv6 address is IPv6, an IPv4 one is not, and every address is both."""
    assert [parse_address(text).is_v6 for text in ("127.0.0.1:1", "[::1]:1", ":1")] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:-1", "127.0.0.1:65536"),
        *("node-1:9400", "::1:9400", "[127.0.0.1]:9400", "[]:9400", "127.0.0.1:\uff19\uff14", ""),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error message shows a valid address."""
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert str(caught.value) == (
        f"--metrics: invalid address {text!r}: write an IP address of this machine and a port, "
        "such as 127.0.0.1:9400 or [::1]:9400, or :9400 for all addresses"
    )


def test_a_bad_address_is_one_line_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon does not start with a bad address."""
    assert main(["run", "--simulate", "t4:1", "--metrics", "gpu-1:9400"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("metagpu: --metrics: invalid address 'gpu-1:9400'")

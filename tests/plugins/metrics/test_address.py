"""Where metrics are served, as an operator writes it."""

import pytest

from metagpu.cli import main
from metagpu.core.errors import ConfigError
from metagpu.plugins.metrics.address import Address, address_of


@pytest.mark.parametrize(
    ("text", "address", "written"),
    [
        ("127.0.0.1:9400", Address("127.0.0.1", 9400), "127.0.0.1:9400"),
        ("localhost:9400", Address("127.0.0.1", 9400), "127.0.0.1:9400"),
        ("[::1]:9400", Address("::1", 9400), "[::1]:9400"),
        (":9400", Address("", 9400), ":9400"),
        ("0.0.0.0:0", Address("0.0.0.0", 0), "0.0.0.0:0"),  # noqa: S104 - nobody listens here
    ],
)
def test_an_address_is_read(text: str, address: Address, written: str) -> None:
    """An IP address and a port; a port alone is every address."""
    assert address_of(text) == address
    assert str(address) == written


def test_which_protocol_an_address_is_of() -> None:
    """Every address is of both."""
    assert [address_of(text).is_v6 for text in ("127.0.0.1:1", "[::1]:1", ":1")] == [
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
    """The sentence says what would be one."""
    with pytest.raises(ConfigError) as caught:
        address_of(text)
    assert str(caught.value) == (
        f"--metrics: {text!r} is no address to serve on; write an IP address of this machine and "
        "a port, as in 127.0.0.1:9400 or [::1]:9400, or :9400 for all its addresses"
    )


def test_a_bad_address_is_one_line_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon does not start with it."""
    assert main(["run", "--simulate", "t4:1", "--metrics", "gpu-1:9400"]) == 1

    assert capsys.readouterr().err.startswith("metagpu: --metrics: 'gpu-1:9400' is no address to")

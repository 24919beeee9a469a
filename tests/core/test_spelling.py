"""What an operator may have meant."""

import pytest

from metagpu.core.spelling import allowed, hint

BOARDS = ["a100-40gb", "a100-80gb", "h100-80gb", "h200"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("h100", "; did you mean h100-80gb?"),
        ("a100", "; did you mean a100-40gb?"),
        ("a100_40gb", "; did you mean a100-40gb?"),
        ("h20", "; did you mean h200?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_the_nearest_name_is_asked_for(given: str, meant: str) -> None:
    """A name cut short is told before one that merely looks alike; nothing where nothing is."""
    assert hint(given, BOARDS) == meant


def test_what_is_allowed_is_all_said() -> None:
    """Whoever mistypes one name reads all of them, in the order they are given."""
    assert allowed("spred", ("spread", "binpack")) == (
        "allowed: spread, binpack; did you mean spread?"
    )

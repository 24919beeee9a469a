"""Suggestions for misspelled names."""

import pytest

from metagpu.core.config.errors import allowed_values, suggest

MODELS = ["a100-40gb", "a100-80gb", "h100-80gb", "h200"]


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
    """An abbreviated name comes before a similar one; no name gives no suggestion."""
    assert suggest(given, MODELS) == meant


def test_all_allowed_names_are_listed() -> None:
    """The message for a misspelled name lists all names in the given order."""
    assert allowed_values("spred", ("spread", "binpack")) == (
        "allowed: spread, binpack; did you mean spread?"
    )

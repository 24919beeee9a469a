"""Quantities of Kubernetes, as `8k`, `1e3`, `1.5Gi` or `500m`, and times as text."""

import re
from datetime import UTC, datetime
from fractions import Fraction
from typing import Final

_SUFFIXES: Final = {
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", 1)},
    "": Fraction(1),
}
_DIGITS: Final = 30
_QUANTITY: Final = re.compile(
    r"([+-]?(?:\d{1,30}\.?\d{0,30}|\.\d{1,30}))(?:([eE][+-]?\d{1,2})|([KMGTPE]i|[kMGTPEmun]?))",
    re.ASCII,
)
"""A number, and an exponent of ten or a suffix; no number needs more digits."""


def quantity_value(text: str) -> Fraction | None:
    """Return the amount of a Quantity, `None` for any other text."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    number, exponent, suffix = found.groups(default="")
    return Fraction(number + exponent) * _SUFFIXES[suffix]


def whole_number(amount: object) -> int | None:
    """Return the number of a Quantity of things, `None` if it counts no whole ones.

    The API server writes numbers in the shortest way: 8000 comes back as 8k.
    """
    text = str(amount)
    if text.isascii() and text.isdecimal() and len(text) <= _DIGITS:  # nearly all
        return int(text)
    value = quantity_value(text)
    return int(value) if value is not None and value >= 0 and value.denominator == 1 else None


def iso_time(at: float) -> str:
    """Return a time in seconds since the epoch as UTC in ISO 8601."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")

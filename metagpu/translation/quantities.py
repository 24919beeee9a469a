"""Whole numbers as the API server writes them: 8000 comes back as 8k."""

import re
from typing import Final

_SUFFIXES: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def whole_number(amount: object) -> int | None:
    """Return the number of an amount without a unit, `None` for any other text."""
    found = re.fullmatch(r"(\d+)([kMG]?)", str(amount))
    return int(found[1]) * _SUFFIXES[found[2]] if found else None

"""Kubernetes' quantities and versions in CEL, as maps of one key. Pure.

A function raises ValueError for what Kubernetes does not take either.
"""

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

from metagpu.core.model.quantities import quantity_value

QUANTITY: Final = "kubernetes.Quantity"
SEMVER: Final = "kubernetes.Semver"
VALUE: Final = "kubernetes"
"""The key of the map: its text is the kind, and what is the same for equal ones."""
MISMATCH: Final = "no such overload: the values have different types"

_NANO: Final = 10**9
_MOST: Final = 2**63
_BARE: Final = re.compile("^([+-]?)(?=[^0-9+-])")
"""Before a quantity without digits, as `Ki`: Kubernetes takes it for 0."""
_NUMBER: Final = r"(0|[1-9][0-9]*)"
_SEMVER: Final = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-([0-9A-Za-z.-]+))?(?:\+([0-9A-Za-z.-]+))?"
)
_IDENTIFIER: Final = re.compile(rf"{_NUMBER}|[0-9A-Za-z-]*[A-Za-z-][0-9A-Za-z-]*")

Value = Mapping[str, str]
"""A quantity or a version."""


def quantity(text: str) -> Value:
    """Return the quantity that a text writes, rounded up to 10^-9."""
    found = quantity_value(_BARE.sub(r"\g<1>0", text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity; write, for example, 40Gi or 1.5G")
    nano = math.ceil(abs(found) * _NANO)
    return _quantity(Fraction(nano if found >= 0 else -nano, _NANO))


def semver(text: str, normalize: bool = False) -> Value:  # noqa: FBT001, FBT002 - CEL's order
    """Return the version of a text; `normalize` takes `v550` and `550.127.08` too."""
    found = _SEMVER.fullmatch(_normalized(text) if normalize else text)
    identifiers = (found[4] or "").split(".") if found and found[4] else []
    builds = (found[5] or "").split(".") if found and found[5] else []
    if (
        found is None
        or not all(builds)
        or not all(map(_IDENTIFIER.fullmatch, identifiers))
        or max(map(int, found.group(1, 2, 3))) >= 2 * _MOST
    ):
        normal = _SEMVER.fullmatch(_normalized(text))
        hint = f"semver({text!r}, true)" if normal and not normalize else "MAJOR.MINOR.PATCH"
        raise ValueError(
            f"{text!r} is not a version: it needs three numbers without leading zeros; write {hint}"
        )
    return {VALUE: f"{SEMVER} {found[0].partition('+')[0]}"}


def _normalized(text: str) -> str:
    parts = [re.sub("^0+(?=[0-9])", "", part) for part in text.removeprefix("v").split(".", 2)]
    if len(parts) < len("123") and not set(parts[-1]) & {"+", "-"}:
        parts += ["0"] * (3 - len(parts))
    return ".".join(parts)


def is_valid(read: Callable[..., Value], *arguments: Any) -> bool:  # noqa: ANN401 - as `read` takes
    """Return whether a text writes a quantity or a version."""
    try:
        read(*arguments)
    except ValueError:
        return False
    return True


def compare(one: str, other: str) -> int:
    """Return -1, 0 or 1."""
    if _kind(one) != _kind(other):
        raise ValueError(MISMATCH)
    key: Callable[[str], Any] = _number if _kind(one) == QUANTITY else _precedence
    before, after = key(one), key(other)
    return int(before > after) - int(before < after)


def number_of(place: int) -> Callable[[str], int]:
    """Return the function of one number of a version."""
    return lambda text: int(_precedence(text)[place])


def _kind(text: str) -> str:
    return text.partition(" ")[0]


def _content(text: str, kind: str) -> str:
    own, _, content = text.partition(" ")
    if own != kind:
        raise ValueError(MISMATCH)
    return content


def _precedence(text: str) -> tuple[Any, ...]:
    """Return a version such that versions compare as semver.org orders them."""
    numbers, dash, before = _content(text, SEMVER).partition("-")
    parts = before.split(".")
    identifiers = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
    return (*map(int, numbers.split(".")), not dash, identifiers)


def _number(text: str) -> Fraction:
    return Fraction(_content(text, QUANTITY))


def _quantity(number: Fraction) -> Value:
    return {VALUE: f"{QUANTITY} {number}"}


def add(one: str, other: str | int) -> Value:
    """Return a sum of quantities."""
    return _quantity(_number(one) + (other if isinstance(other, int) else _number(other)))


def subtract(one: str, other: str | int) -> Value:
    """Return a difference of quantities."""
    return _quantity(_number(one) - (other if isinstance(other, int) else _number(other)))


def sign(text: str) -> int:
    """Return -1, 0 or 1."""
    number = _number(text)
    return int(number > 0) - int(number < 0)


def is_integer(text: str) -> bool:
    """Return whether a quantity is a whole number of 64 bits."""
    number = _number(text)
    return number.denominator == 1 and -_MOST <= number < _MOST


def as_integer(text: str) -> int:
    """Return a whole quantity."""
    if not is_integer(text):
        raise ValueError("the quantity is not a whole number of 64 bits")
    return int(_number(text))


def as_float(text: str) -> float:
    """Return a quantity as a number."""
    return float(_number(text))

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
"""A quantity or a version, as a text that is the same for equal ones."""


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
    return {SEMVER: found[0].partition("+")[0]}


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


def compare(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> int:
    """Return -1, 0 or 1."""
    if set(one) != set(other):
        raise ValueError(MISMATCH)
    key: Callable[[Mapping[Any, Any]], Any] = _number if QUANTITY in one else _precedence
    before, after = key(one), key(other)
    return int(before > after) - int(before < after)


def number_of(place: int) -> Callable[[Mapping[Any, Any]], int]:
    """Return the function of one number of a version."""
    return lambda value: int(_precedence(value)[place])


def _precedence(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return a version such that versions compare as semver.org orders them."""
    if SEMVER not in value:
        raise ValueError(MISMATCH)
    numbers, dash, before = str(value[SEMVER]).partition("-")
    identifiers = [
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in before.split(".")
    ]
    return (*map(int, numbers.split(".")), not dash, identifiers)


def _number(value: Mapping[Any, Any]) -> Fraction:
    if QUANTITY not in value:
        raise ValueError(MISMATCH)
    return Fraction(str(value[QUANTITY]))


def _quantity(number: Fraction) -> Value:
    return {QUANTITY: str(number)}


def add(one: Mapping[Any, Any], other: Mapping[Any, Any] | int) -> Value:
    """Return a sum of quantities."""
    return _quantity(_number(one) + (other if isinstance(other, int) else _number(other)))


def subtract(one: Mapping[Any, Any], other: Mapping[Any, Any] | int) -> Value:
    """Return a difference of quantities."""
    return _quantity(_number(one) - (other if isinstance(other, int) else _number(other)))


def sign(value: Mapping[Any, Any]) -> int:
    """Return -1, 0 or 1."""
    number = _number(value)
    return int(number > 0) - int(number < 0)


def is_integer(value: Mapping[Any, Any]) -> bool:
    """Return whether a quantity is a whole number of 64 bits."""
    number = _number(value)
    return number.denominator == 1 and -_MOST <= number < _MOST


def as_integer(value: Mapping[Any, Any]) -> int:
    """Return a whole quantity."""
    if not is_integer(value):
        raise ValueError("the quantity is not a whole number of 64 bits")
    return int(_number(value))


def as_float(value: Mapping[Any, Any]) -> float:
    """Return a quantity as a number."""
    return float(_number(value))

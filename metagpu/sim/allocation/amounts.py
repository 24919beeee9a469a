"""Amounts of capacities that requests consume, by the capacity's policy. Pure."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from metagpu.core.model.quantities import quantity_value


class AllocationError(Exception):
    """Raised for a claim or selector that the scheduler refuses; the text states why."""


Amounts = Mapping[str, Fraction]
"""An amount by the name of its capacity."""

_KIBI: Final = 1024
_UNITS: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def parse_amount(value: object) -> Fraction:
    """Parse a Quantity.

    Raises:
        AllocationError: the value is none, or has a fraction.
    """
    amount = quantity_value(str(value))
    if amount is None:
        raise AllocationError(
            f"{value!r} is not an amount; write a whole number, such as 50 or 10Gi"
        )
    return amount


def format_amount(amount: Fraction) -> str:
    """Return an amount as Kubernetes writes it, in the largest whole binary unit."""
    number, unit = math.ceil(amount), 0
    while number and number % _KIBI == 0 and unit < len(_UNITS) - 1:
        number, unit = number // _KIBI, unit + 1
    return f"{number}{_UNITS[unit]}"


def consumed_amount(requested: Fraction | None, capacity: Mapping[str, Any]) -> Fraction | None:
    """Return what a request consumes of a capacity, `None` if the policy forbids it.

    Args:
        requested: the amount in the request, `None` where it names none.
        capacity: the capacity of the device: `value`, and perhaps a `requestPolicy`.
    """
    policy = capacity.get("requestPolicy") or {}
    if requested is None:
        return parse_amount(policy["default"] if "default" in policy else capacity["value"])
    if "validValues" in policy:
        valid = map(parse_amount, policy["validValues"])  # in ascending order
        return next((fraction for fraction in valid if requested <= fraction), None)
    if limits := policy.get("validRange"):
        return _in_range(requested, limits)
    return requested


def _in_range(requested: Fraction, limits: Mapping[str, Any]) -> Fraction | None:
    """Round an amount up to the range and its steps, `None` if it is above the range."""
    least = parse_amount(limits["min"])
    found = max(requested, least)
    if "step" in limits and requested > least:
        step, start = math.ceil(parse_amount(limits["step"])), math.ceil(least)
        steps = -(-(math.ceil(requested) - start) // step)
        found = Fraction(start + steps * step)
    if "max" in limits and found > parse_amount(limits["max"]):
        return None
    return found

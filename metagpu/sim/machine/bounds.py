"""Limits of the numbers that users give to a simulated node."""

import re
from typing import Final

from metagpu.sim.machine.gpu import SimError

MAX_XID: Final = 9999
MAX_FAILURES: Final = 1_000_000
MAX_ERRORS: Final = 2**32 - 1
MAX_INSTANCE: Final = 2**32 - 2
"""The number after it means none to NVML."""
MAX_SECONDS: Final = 1000 * 3600.0
"""Seconds that something may take."""
MAX_PID: Final = 2**22
"""Linux' PID_MAX_LIMIT."""
_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""An RFC 1123 label: every object of Kubernetes may have such a name."""
_DOTTED_NAME: Final = re.compile(
    rf"(?=.{{1,253}}$){_OBJECT_NAME.pattern}(\.{_OBJECT_NAME.pattern})*"
)
"""A DNS name of such labels: that of a DeviceClass."""


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Refuse a number outside of its range.

    Raises:
        SimError: the number is out of range; the error states the range.
    """
    if not least <= value <= most:
        raise SimError(f"{name} is {value}; allowed: {least} to {most}")


def check_duration(seconds: float) -> None:
    """Refuse a duration longer than the clock can count.

    Raises:
        SimError: the duration is too long.
    """
    if seconds > MAX_SECONDS:
        raise SimError(f"{seconds:g} s is too long; allowed: {MAX_SECONDS / 3600:g}h at most")


def check_instance(gi: int | None, ci: int | None) -> None:
    """Refuse instance IDs that NVML cannot have; None is allowed.

    Raises:
        SimError: an ID is out of range.
    """
    for option, number in (("--gi", gi), ("--ci", ci)):
        if number is not None:
            check_range(option, number, 0, MAX_INSTANCE)


def check_name(about: str, name: str, *, dotted: bool = False) -> None:
    """Refuse a name that no object of Kubernetes can have; some may have dots.

    Raises:
        SimError: the name is not valid; the error states the rule.
    """
    if not (_DOTTED_NAME if dotted else _OBJECT_NAME).fullmatch(name):
        more = ", with dots between several" if dotted else ""
        raise SimError(
            f"{about} cannot be named {name!r}: 1 to 63 of a-z 0-9 -, alphanumeric at both ends"
            + more
        )

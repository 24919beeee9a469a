"""Numbers that a simulated node can be told, and those that it refuses."""

from typing import Final

from metagpu.sim.gpu import SimError

MOST_XIDS: Final = 9999
MOST_FAILURES: Final = 1_000_000
MOST_ERRORS: Final = 2**32 - 1
MOST_INSTANCES: Final = 2**32 - 2
"""The number after it means none to NVML."""
LONGEST: Final = 1000 * 3600.0
"""Seconds that something may take."""
MOST_PIDS: Final = 2**22
"""Linux' PID_MAX_LIMIT."""


def within(name: str, value: int, least: int, most: int) -> None:
    """Refuse a number outside of its bounds.

    Raises:
        SimError: if it is; says what is allowed.
    """
    if not least <= value <= most:
        raise SimError(f"{name} is {value}; allowed: {least} to {most}")


def check_time(seconds: float) -> None:
    """Refuse a time that no clock can count.

    Raises:
        SimError: if it is one.
    """
    if seconds > LONGEST:
        raise SimError(f"{seconds:g} s is too long; allowed: {LONGEST / 3600:g}h at most")


def check_instance(gi: int | None, ci: int | None) -> None:
    """Refuse numbers that no MIG instance can have; there need be none of theirs.

    Raises:
        SimError: if they are such.
    """
    for option, number in (("--gi", gi), ("--ci", ci)):
        if number is not None:
            within(option, number, 0, MOST_INSTANCES)

"""Wait for a condition instead of for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

from tests.e2e.rig.errors import DeadlineError, RigError

Found = TypeVar("Found")

PAUSE_S = 0.2


def wait_for(
    condition: str, probe: Callable[[], Found | None], *, within_s: float, pause_s: float = PAUSE_S
) -> Found:
    """Call PROBE until it returns something true, and return that.

    A `RigError` of the probe means "not yet". CONDITION completes the sentence
    "waited 30 s for ...".

    Raises:
        DeadlineError: the time is up; the text has the last answer or error.
    """
    end = time.monotonic() + within_s
    while True:
        try:
            found = probe()
            seen: object = found
        except RigError as error:
            found, seen = None, error
        if found:
            return found
        if time.monotonic() >= end:
            raise DeadlineError(f"waited {within_s:g} s for {condition}; last seen: {seen!r}")
        time.sleep(pause_s)

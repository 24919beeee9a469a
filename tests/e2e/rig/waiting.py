"""Wait for a condition instead of for a time.

A limit says when a test gives up, not how long a thing may take. How long it took is written to the
file WAITS, a line for each wait. What has a bound fails above it with STRICT alone: on a busy
machine every bound is too small now and then.

$ WAITS=/tmp/waits STRICT=1 python -m pytest tests/e2e/test_dra.py -m e2e
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.e2e.rig.errors import DeadlineError, RigError

Found = TypeVar("Found")

PAUSE_S = 0.2
WAITS = os.environ.get("WAITS")
STRICT = bool(os.environ.get("STRICT"))


def wait_for(
    condition: str, probe: Callable[[], Found | None], *, within_s: float, pause_s: float = PAUSE_S
) -> Found:
    """Call PROBE until it returns something true, and return that.

    A `RigError` of the probe means "not yet". CONDITION completes the sentence
    "waited 30 s for ...".

    Raises:
        DeadlineError: the time is up; the text has the last answer or error.
    """
    began = time.monotonic()
    end = began + within_s
    while True:
        try:
            found = probe()
            seen: object = found
        except RigError as error:
            found, seen = None, error
        if found:
            _note(f"{time.monotonic() - began:6.2f} s", condition)
            return found
        if time.monotonic() >= end:
            raise DeadlineError(f"waited {within_s:g} s for {condition}; last seen: {seen!r}")
        time.sleep(pause_s)


def took(what: str, seconds: float, *, at_most: float) -> None:
    """Note how long something took that has a bound; with STRICT the bound holds."""
    _note(f"{seconds:6.2f} s of {at_most:g}", what)
    assert seconds <= at_most or not STRICT, f"{what} took {seconds:.2f} s, at most {at_most:g}"


def _note(seconds: str, what: str) -> None:
    if WAITS:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        with Path(WAITS).open("a", encoding="utf-8") as file:
            file.write(f"{seconds}  {test}: {what}\n")

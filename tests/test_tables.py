"""What people see of a GPU, in words."""

from typing import Any

import pytest

from metagpu import tables

SOUND: dict[str, Any] = {
    "healthy": True,
    "waitsFor": None,
    "suspended": {},
    "blocked": [],
    "reason": "XID 79",
    "since": "2026-01-01T00:00:00+00:00",
}


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ({}, "healthy"),
        ({"blocked": ["instance 1g.5gb@0 is there"]}, "instance 1g.5gb@0 is there"),
        ({"suspended": {"mig": {"reason": "MIG mode is off"}}}, "MIG mode is off"),
        ({"waitsFor": "a pod"}, "a pod"),
        ({"healthy": False, "blocked": ["x"]}, "XID 79, since 2026-01-01 00:00:00 UTC"),
    ],
)
def test_health_says_what_keeps_a_gpu_from_serving(gpu: dict[str, Any], words: str) -> None:
    """A fault comes first, then who is waited for, what is not ready, and what is in the way."""
    assert tables.health({**SOUND, **gpu}).plain == words

"""Fixtures of all tests of backends."""

import pytest

from metagpu.backends.mps.backend import MpsBackend
from tests.backends.mps.rig import TIMING


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten delays that are seconds on a real node."""
    monkeypatch.setattr(MpsBackend, "timing", TIMING)

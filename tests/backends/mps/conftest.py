"""What tests of MPS have in common."""

import pytest

from metagpu.backends.mps import MpsBackend
from tests.backends.mps.rig import TIMING


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    monkeypatch.setattr(MpsBackend, "timing", TIMING)

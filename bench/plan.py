"""The plan of a run: the number of measurements, and its progress messages."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    """The plan of a run, passed to every measurement.

    Attributes:
        before: another commit's source tree, measured beside this one where that is possible.
    """

    quick: bool = False
    before: Path | None = None
    began: float = field(default_factory=time.monotonic)

    def count(self, full: int, quick: int) -> int:
        """Return the number of repetitions."""
        return quick if self.quick else full

    def report(self, text: str) -> None:
        """Print what is being measured now."""
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)

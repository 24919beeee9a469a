"""How much is measured in a run, and how it tells where it is."""

import sys
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """Passed to every measurement."""

    quick: bool = False
    began: float = field(default_factory=time.monotonic)

    def count(self, full: int, quick: int) -> int:
        """Choose how often something is done."""
        return quick if self.quick else full

    def say(self, text: str) -> None:
        """Tell a person what is being done now."""
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)

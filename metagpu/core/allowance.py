"""How often somebody may do something: so many at once, and so many a second. Has no clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """A bucket that holds `burst` and is filled at `rate` a second; full at first."""

    burst: float
    rate: float
    _spent: float = 0
    _at: float = 0

    def take(self, now: float) -> bool:
        """Take one, if one is there at this time."""
        if self.wait(now) > 0:
            return False
        self._spent += 1
        return True

    def reserve(self, now: float) -> float:
        """Take one, be it there or not; say in how many seconds it is."""
        wait = self.wait(now)
        self._spent += 1
        return wait

    def wait(self, now: float) -> float:
        """Say in how many seconds one will be there; 0 if it is."""
        self._spent = max(0.0, self._spent - (now - self._at) * self.rate)
        self._at = now
        return max(0.0, (self._spent + 1 - self.burst) / self.rate)

    def is_full(self, now: float) -> bool:
        """Say whether nothing is missing any more: then it may as well be forgotten."""
        self.wait(now)
        return self._spent == 0

"""Rate limits: a token bucket without a clock of its own."""

import msgspec


class TokenBucket(msgspec.Struct):
    """A bucket of at most `burst` tokens, refilled at `rate` a second; full at first."""

    burst: float
    rate: float
    _spent: float = 0
    _at: float = 0

    def take(self, now: float) -> bool:
        """Take a token if there is one now; return whether there was."""
        if self.wait(now) > 0:
            return False
        self._spent += 1
        return True

    def reserve(self, now: float) -> float:
        """Take the next token; return the seconds until it is there."""
        wait = self.wait(now)
        self._spent += 1
        return wait

    def wait(self, now: float) -> float:
        """Return the seconds until the next token, 0 if there is one now."""
        self._spent = max(0.0, self._spent - (now - self._at) * self.rate)
        self._at = now
        return max(0.0, (self._spent + 1 - self.burst) / self.rate)

    def is_full(self, now: float) -> bool:
        """Return whether no token is missing, as in a new bucket."""
        self.wait(now)
        return self._spent == 0

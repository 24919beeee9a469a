"""Limits of repetition: back-off, a token bucket, and repeated problems once."""

import random
from collections.abc import Hashable

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


class Backoff(msgspec.Struct):
    """The delays between the attempts of one task.

    Attributes:
        first: the delay after the first failure, in seconds.
        longest: the limit, in seconds.
        jitter: whether each delay is shortened at random, to half at most, and one that a server
            asks for lengthened by half at most: many nodes do not try again at the same moment.
    """

    first: float
    longest: float
    jitter: bool = False
    _next: float = 0.0

    def next(self, at_least: float = 0.0) -> float:
        """Return the delay after one more failure, in seconds, and double the next one."""
        delay = self._next or self.first
        self._next = min(2 * delay, self.longest)
        if self.jitter:
            delay, at_least = delay * random_between(0.5, 1), at_least * random_between(1, 1.5)
        return max(delay, at_least)

    def reset(self) -> None:
        """Return to the first delay, after a success."""
        self._next = 0.0


def random_between(low: float, high: float) -> float:
    """Return a random number between two: it spreads load, it guards nothing."""
    return random.uniform(low, high)  # noqa: S311


class LogOnce(msgspec.Struct):
    """The problem last logged for each subject: a GPU, a file, a resource."""

    _logged: dict[Hashable, str] = msgspec.field(default_factory=dict)

    def is_new(self, subject: Hashable, problem: str) -> bool:
        """Record a problem; return whether it differs from the last one of its subject."""
        if self._logged.get(subject) == problem:
            return False
        self._logged[subject] = problem
        return True

    def clear(self, subject: Hashable) -> bool:
        """Forget the problem of a subject; return whether there was one."""
        return self._logged.pop(subject, None) is not None

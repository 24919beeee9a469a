"""Exponential back-off: the delay doubles after each failure, up to a limit."""

import random

import msgspec


class Backoff(msgspec.Struct):
    """The delays between the attempts of one task.

    Attributes:
        first: the delay after the first failure, in seconds.
        longest: the limit, in seconds.
        jitter: whether each delay is shortened at random, to half at most, so that the agents of
            many nodes do not try again at the same moment.
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
            delay *= random.uniform(0.5, 1.0)  # noqa: S311 - it spreads load, it guards nothing
        return max(delay, at_least)

    def reset(self) -> None:
        """Return to the first delay, after a success."""
        self._next = 0.0

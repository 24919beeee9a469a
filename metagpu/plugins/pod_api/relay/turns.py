"""Turns: whose call goes to the daemon next."""

import socket
from collections import deque

WAITING_OF_GROUP = 16
"""Calls of one group that wait for their turn; more are refused."""


class Pace:
    """At most `burst` at once, and `rate` a second."""

    def __init__(self, burst: float, rate: float) -> None:
        self._ahead, self._each = (burst - 1) / rate, 1 / rate
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next one may go."""
        return max(0.0, self._next - now)

    def take(self, now: float) -> None:
        """Count one that goes now."""
        self._next = max(self._next, now - self._ahead) + self._each


class Turns:
    """The callers that wait, by group, and the calls under way.

    One caller of each group goes, and then the next of each.

    Args:
        pace: of all calls.
        most: calls under way at once.
        most_of_group: calls of one group under way at once; its others wait for their ends.
    """

    def __init__(self, pace: Pace, most: int, most_of_group: int) -> None:
        self._pace = pace
        self._most, self._most_of_group = most, most_of_group
        self._waiting: dict[bytes, deque[socket.socket]] = {}
        self._under_way: dict[bytes, int] = {}

    @property
    def waiting(self) -> int:
        """Number of callers that wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, group: bytes, caller: socket.socket) -> bool:
        """Put a caller into its group; return false for one too many."""
        queue = self._waiting.setdefault(group, deque())
        if len(queue) >= WAITING_OF_GROUP:
            return False
        queue.append(caller)
        return True

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next turn, `None` if only an event can bring it."""
        return None if self._next_group() is None else self._pace.wait(now)

    def take(self, now: float) -> tuple[bytes, socket.socket] | None:
        """Return the next caller with its group, under way from now on, or `None`."""
        group = self._next_group()
        if group is None or self._pace.wait(now):
            return None
        self._pace.take(now)
        queue = self._waiting.pop(group)
        caller = queue.popleft()
        if queue:
            self._waiting[group] = queue  # behind all other groups
        self._under_way[group] = self._under_way.get(group, 0) + 1
        return group, caller

    def end(self, group: bytes) -> None:
        """Count the end of a call."""
        self._under_way[group] -= 1
        if not self._under_way[group]:
            del self._under_way[group]

    def _next_group(self) -> bytes | None:
        if sum(self._under_way.values()) >= self._most:
            return None
        for group in self._waiting:
            if self._under_way.get(group, 0) < self._most_of_group:
                return group
        return None

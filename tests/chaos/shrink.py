"""The shortest story of a fault: steps are left out as long as a fault stays."""

from collections.abc import Callable, Sequence

from tests.chaos.steps import Step


def shrink(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool]) -> list[Step]:
    """Leave out ever smaller runs of steps, as in delta debugging; return what still fails.

    A schedule in real time may fail only sometimes: what passes once is kept.
    """
    left, size = list(steps), max(1, len(steps) // 2)
    while True:
        start = 0
        while start < len(left):
            shorter = [*left[:start], *left[start + size :]]
            if fails(shorter):
                left = shorter
            else:
                start += size
        if size == 1:
            return left
        size = max(1, size // 2)

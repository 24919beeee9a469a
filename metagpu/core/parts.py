"""The parts of the daemon that it should not outlive: whether they run."""

from collections.abc import Callable, Coroutine
from typing import Any


class Parts:
    """Notes which parts have ended.

    Attributes:
        ended: their names.
    """

    def __init__(self) -> None:
        self.ended: list[str] = []

    def noted(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Give the same work, whose end is noted however it comes."""

        async def run() -> None:
            try:
                await work()
            finally:
                self.ended.append(name)

        return run

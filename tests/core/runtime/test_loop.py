"""The event loop's long turns are counted, and the log says what they did."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from selectors import EpollSelector, SelectorKey
from typing import Any

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from metagpu.core.runtime import loop as loop_module
from metagpu.core.runtime.loop import LONG, WatchedLoop


class Clock:
    """Time as the loop sees it: a busy machine makes no turn longer here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = 0.0
        self.looks = 0
        monkeypatch.setattr(loop_module, "time", self)
        select = EpollSelector.select

        def wait(
            selector: EpollSelector, timeout: float | None = None
        ) -> list[tuple[SelectorKey, int]]:
            self.now += 1 if timeout is None or timeout > 0 else 0
            return select(selector, timeout)

        monkeypatch.setattr(EpollSelector, "select", wait)

    def monotonic(self) -> float:
        """Return the time in seconds."""
        self.looks += 1
        return self.now

    def thread_time(self) -> float:
        """Return the seconds of a processor that the loop's thread has used."""
        return self.cpu

    def block(self, busy: float) -> None:
        """Make a turn last for 80 ms, with a look of the timer and then a part that is `busy`."""
        self.now += 0.03
        looks = self.looks
        while self.looks == looks:
            time.sleep(0.001)
        self.now, self.cpu = self.now + 0.05, self.cpu + 0.05 * busy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that the test moves."""
    return Clock(monkeypatch)


def watched(work: Callable[[], Coroutine[Any, Any, None]]) -> tuple[int, Sequence[EventDict]]:
    """Run a work on a watched loop; return the long turns, and what was logged."""
    with capture_logs() as logs, asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(work())
        loop = runner.get_loop()
        assert isinstance(loop, WatchedLoop)
        return loop.long_turns, logs


@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_a_long_turn_is_counted_and_named(clock: Clock, busy: float) -> None:
    """The log has its time, its part of the processor, and the functions that it was in."""

    async def work() -> None:
        asyncio.get_running_loop().call_soon(clock.block, busy)
        await asyncio.sleep(0.01)

    turns, [line] = watched(work)
    assert turns == 1
    assert (line["event"], line["log_level"], line["turns"]) == ("event loop blocked", "warning", 1)
    assert (line["lasted"], line["busy"]) == ("80 ms", f"{busy:.0%}")
    assert f"{__name__}.Clock.block:" in line["stack"]


def test_a_line_a_minute_at_most(clock: Clock) -> None:
    """A second long turn within a minute is counted; the next line counts it too."""

    async def work() -> None:
        for wait in (0, 0, 60, 0):
            await asyncio.sleep(0.001)
            clock.now += wait
            clock.block(0)

    turns, logs = watched(work)
    assert (turns, [line["turns"] for line in logs]) == (4, [1, 2])


def test_a_loop_that_waits_is_not_blocked(clock: Clock) -> None:
    """Neither a wait nor many short turns in a row are long."""

    async def work() -> None:
        await asyncio.sleep(0.001)
        for _ in range(100):
            clock.now += LONG / 50
            await asyncio.sleep(0)

    assert watched(work) == (0, [])

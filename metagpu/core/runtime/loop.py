"""An event loop that counts its long turns, and logs what they did.

The calls of the kubelet wait as long as a turn lasts.
"""

import asyncio
import math
import signal
import time
from selectors import EpollSelector, SelectorKey
from types import FrameType
from typing import Final

import structlog

LONG: Final = 0.05
"""Seconds; a turn that lasts longer is long."""
_LOOK: Final = LONG / 2
"""Seconds from one look at a turn to the next: a long turn lasts for two of them."""
_QUIET: Final = 60.0
"""Seconds from one line of the log to the next."""

log = structlog.get_logger()


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that counts its long turns, and logs the worst of a minute.

    A turn lasts from one wait for events to the next. The kernel's timer, SIGALRM, interrupts a
    turn that lasts, so only the main thread can have this loop. Each wait costs 2 µs more, which no
    call of the kubelet shows. A thread that looks 40 times a second adds 2 ‰ of a core at rest.
    """

    def __init__(self) -> None:
        self._watch = _Watch()
        super().__init__(self._watch)

    @property
    def long_turns(self) -> int:
        """Return how many turns were long so far."""
        return self._watch.count


def long_turns() -> int:
    """Return the long turns of the running loop so far, 0 if nobody watches it."""
    loop = asyncio.get_running_loop()
    return loop.long_turns if isinstance(loop, WatchedLoop) else 0


class _Watch(EpollSelector):
    """The selector of a watched loop: it knows when a turn begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._began = time.monotonic()  # or infinity, while the loop waits
        self._looked, self._cpu, self._stack = -math.inf, 0.0, ""
        self._worst = 0.0, 0.0, ""
        self._logged, self._quiet_until = 0, -math.inf
        self._handler = signal.signal(signal.SIGALRM, self._look)
        # The kernel may give the signal to another thread, whose call of the driver is to go on.
        signal.siginterrupt(signal.SIGALRM, False)  # noqa: FBT003 - its only form
        signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Wait for events."""
        if (lasted := time.monotonic() - self._began) > LONG:
            self._add(lasted)
        if timeout is not None and timeout <= 0:
            ready = super().select(timeout)  # the timer goes on
        else:
            self._began = math.inf
            signal.setitimer(signal.ITIMER_REAL, 0)
            ready = super().select(timeout)
            signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
        self._began = time.monotonic()
        return ready

    def close(self) -> None:
        """End the watch."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)
        super().close()

    def _look(self, _: int, frame: FrameType | None) -> None:
        """Record what a turn does that lasts."""
        now = time.monotonic()
        if now - self._began >= _LOOK and self._looked < self._began:
            self._looked, self._cpu, self._stack = now, time.thread_time(), _names(frame)

    def _add(self, lasted: float) -> None:
        """Count a long turn; log the worst since the last line."""
        now = time.monotonic()
        self.count += 1
        if lasted > self._worst[0]:
            busy, seen = time.thread_time() - self._cpu, self._looked > self._began
            self._worst = lasted, busy / (now - self._looked), self._stack if seen else ""
        if now >= self._quiet_until:
            lasted, busy, stack = self._worst
            log.warning(
                "event loop blocked",
                lasted=f"{1000 * lasted:.0f} ms",
                busy=f"{busy:.0%}",
                stack=stack,
                turns=self.count - self._logged,
            )
            self._worst = 0.0, 0.0, ""
            self._logged, self._quiet_until = self.count, now + _QUIET


def _names(frame: FrameType | None) -> str:
    """Return the functions that a turn is in, innermost first: metagpu's, if any."""
    names = []
    while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:  # noqa: SLF001
        module = frame.f_globals.get("__name__", "")
        names.append(f"{module}.{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join([name for name in names if name.startswith("metagpu.")] or names)

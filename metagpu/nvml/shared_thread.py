"""Short works of many callers in one thread; one that takes long keeps it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

TURN: Final = 0.02
"""Seconds that a work may delay others: thrice what NVML takes for an H200's values."""
_MOST_THREADS: Final = 64
"""More than the GPUs of a node: each that hangs keeps one, in each session of NVML."""
ResultT = TypeVar("ResultT")


class Job(Generic[ResultT]):
    """A work, and the future of its result in the loop of its caller."""

    def __init__(self, work: Callable[[], ResultT], loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[ResultT] = loop.create_future()
        self._work = work
        self._set: Callable[[], None]

    def do(self) -> None:
        """Do the work, in a thread."""
        try:
            self._set = partial(self.future.set_result, self._work())
        except BaseException as error:  # noqa: BLE001 - the caller's
            self._set = partial(self.future.set_exception, error)

    def fail(self, error: Exception) -> None:
        """Set a failure before the work has begun, in the loop."""
        if not self.future.done():
            self.future.set_exception(error)

    def deliver(self) -> None:
        """Set the result of the future, in the loop."""
        if not self.future.done():  # done: the caller has left
            self._set()


class _Round:
    """The works that one thread does, one after the other, until none waits.

    Attributes:
        done: works whose results the loop has not seen.
        began: when the present work began, by `time.monotonic`; `None` between two works.
        replaced: whether another thread does the works that wait.
        look: the next look at it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.done = deque[Job[Any]]()
        self.began: float | None = None
        self.replaced = False
        self.look: asyncio.TimerHandle | None = None

    def deliver(self) -> None:
        """Deliver the results so far."""
        while self.done:
            self.done.popleft().deliver()


class SharedThread:
    """Does short works of an event loop's callers in one thread, in their order.

    A change of threads costs as much processor time as several of NVML's calls: works that come
    together cost one, there and back. A work that takes longer than a turn keeps its thread, and
    another thread does those that wait.
    """

    def __init__(self, turn: float = TURN) -> None:
        self._turn = turn
        self._waiting = deque[Job[Any]]()
        self._round: _Round | None = None
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "NVML")

    def submit(self, work: Callable[[], ResultT]) -> Job[ResultT]:
        """Queue a work: it is done soon, after all that wait."""
        loop = asyncio.get_running_loop()
        job = Job(work, loop)
        self._waiting.append(job)
        if self._round is None:
            self._round = _Round(loop)
            # Not at once: works that come in the same turn of the loop share the thread's start.
            loop.call_soon(self._start, self._round)
        return job

    def drop(self, job: Job[Any]) -> bool:
        """Take a work back; return whether no thread has begun it, or will."""
        with suppress(ValueError):
            self._waiting.remove(job)
            return True
        return False

    def _start(self, started: _Round) -> None:
        try:
            self._threads.submit(self._do_all, started)
        except RuntimeError as error:  # the system has no thread left
            started.replaced = True  # the pool may run it with a later one
            self._round = None
            for job in list(self._waiting):  # a replaced thread may take one meanwhile
                job.fail(error)
            return
        started.look = started.loop.call_later(self._turn, self._look, started)

    def _do_all(self, own: _Round) -> None:
        """Do the works that wait, in a thread."""
        while not own.replaced:
            try:
                job = self._waiting.popleft()
            except IndexError:
                break
            own.began = time.monotonic()
            job.do()
            own.began = None
            own.done.append(job)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            own.loop.call_soon_threadsafe(self._finish, own)

    def _look(self, at: _Round) -> None:
        """Deliver what is done, and replace a thread whose work takes long."""
        began = at.began
        if began is not None and time.monotonic() - began >= self._turn:
            at.replaced = True  # before the delivery: a work that it misses is the thread's last
            self._go_on()
        else:
            at.look = at.loop.call_later(self._turn, self._look, at)
        at.deliver()

    def _finish(self, ended: _Round) -> None:
        if ended.look is not None:
            ended.look.cancel()
        if self._round is ended:
            self._go_on()
        ended.deliver()

    def _go_on(self) -> None:
        """Start a thread for the works that wait, if there are any."""
        self._round = None
        if self._waiting:
            self._round = _Round(asyncio.get_running_loop())
            self._start(self._round)

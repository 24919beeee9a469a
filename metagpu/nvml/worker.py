"""Calls of NVML in threads, one for each GPU and one for short calls.

A call may never return.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable
from metagpu.nvml.errors import to_driver_error

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


OthersWork: TypeAlias = Callable[["NvmlWorker"], Awaitable[bool]]


class NvmlWorker:
    """Runs the calls about a GPU, the events, or all of NVML, one thread at a time.

    A call that hangs blocks its own worker alone, and costs at most one thread. Short calls share
    a thread with those of other workers.

    Attributes:
        name: the subject's name in messages.
    """

    def __init__(
        self,
        name: str,
        *,
        whole: bool = False,
        others_work: OthersWork | None = None,
        shared: SharedThread | None = None,
    ) -> None:
        """Create a worker without a thread.

        Args:
            name: the subject's name in messages.
            whole: whether the subject is NVML as a whole.
            others_work: returns whether NVML works for other subjects than this worker's.
            shared: does the short calls of several workers; `None` for a thread of its own.
        """
        self.name = name
        self._whole = whole
        self._others_work = others_work
        self._shared = shared
        # Without a turn of the loop for a lock that is free: a scrape has some 20 calls.
        self._lock = anyio.Lock(fast_acquire=True)
        self._limiter = anyio.CapacityLimiter(1)
        self._idle = threading.Event()
        self._idle.set()
        self._until = 0.0
        self._timed_out = False

    @property
    def is_idle(self) -> bool:
        """True while no thread of this worker is inside NVML."""
        return self._idle.is_set()

    @property
    def is_overdue(self) -> bool:
        """True while a thread of this worker is inside NVML after its deadline."""
        return self._timed_out and not self.is_idle

    async def call(
        self,
        work: Callable[[], ResultT],
        deadline: float,
        interrupt: Callable[[], None] | None = None,
        *,
        short: bool = False,
    ) -> ResultT:
        """Run `work` in a thread, for at most `deadline` seconds.

        A cancelled caller leaves at once, and its thread stays inside NVML. The next call waits for
        that thread, no longer than the first caller would have.

        Args:
            work: the calls, in one function.
            deadline: seconds for it.
            interrupt: called at a cancellation, and may end the thread's call.
            short: whether NVML answers within some milliseconds, unless it hangs.

        Raises:
            DriverTimeout: at the deadline, and at once while an overdue call still runs;
                `DriverUnavailable` for a call about NVML as a whole.
            DriverUnavailable: NVML says that it does not work, and works for no other subject.
            DriverError: NVML failed, or its answer is invalid.
        """
        try:
            return await self.call_alone(work, deadline, interrupt, short=short)
        except DriverUnavailable as failure:
            if self._others_work is None or not await self._others_work(self):
                raise
            raise DriverError(f"{self.name}: {failure}") from failure

    async def call_alone(
        self,
        work: Callable[[], ResultT],
        deadline: float,
        interrupt: Callable[[], None] | None = None,
        *,
        short: bool = False,
    ) -> ResultT:
        """Run `work` as `call` does, and believe what NVML says about itself."""
        timeout_error = DriverUnavailable if self._whole else DriverTimeout

        async with self._lock:
            now = anyio.current_time()
            if not await self.wait_idle(min(self._until - now, deadline)):
                raise timeout_error(f"{self.name}: an earlier NVML call has not returned yet")

            self._until, self._timed_out = anyio.current_time() + deadline, False
            with anyio.CancelScope(deadline=self._until):
                try:
                    return await self._in_thread(partial(self._work, work), short=short)
                except anyio.get_cancelled_exc_class():
                    if interrupt is not None:
                        interrupt()
                    raise
            self._timed_out = True
            raise timeout_error(f"{self.name}: no answer from NVML within {deadline:.3g} s")

    async def wait_idle(self, deadline: float) -> bool:
        """Wait at most `deadline` seconds for an abandoned thread; return if it ended."""
        if not self.is_idle and deadline > 0:
            with anyio.move_on_after(deadline):
                await anyio.to_thread.run_sync(
                    self._idle.wait, deadline, limiter=self._limiter, abandon_on_cancel=True
                )
        return self.is_idle

    async def _in_thread(self, work: Callable[[], ResultT], *, short: bool) -> ResultT:
        """Run `work` in a thread; a cancelled caller leaves at once."""
        if not short or self._shared is None:
            return await anyio.to_thread.run_sync(
                work, abandon_on_cancel=True, limiter=self._limiter
            )
        self._idle.clear()  # from now on the thread may begin with it at any moment
        job = self._shared.submit(work)
        try:
            return await job.future
        finally:
            if self._shared.drop(job):
                self._idle.set()

    def _work(self, work: Callable[[], ResultT]) -> ResultT:
        self._idle.clear()

        try:
            return work()
        except DriverError:
            raise
        except Exception as failure:
            # pynvml and our code fail on invalid answers: no GPU's answer may end the daemon.
            raise to_driver_error(failure, self.name, whole=self._whole) from failure
        finally:
            self._idle.set()

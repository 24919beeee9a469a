"""Calls of NVML in threads: they may never return."""

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias, TypeVar

import anyio
import anyio.to_thread

from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable
from metagpu.nvml.errors import to_driver_error
from metagpu.nvml.shared_thread import SharedThread

ResultT = TypeVar("ResultT")
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

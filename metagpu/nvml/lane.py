"""Worker threads for calls that may never come back."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable
from metagpu.nvml.codes import error_for

ResultT = TypeVar("ResultT")


class Lane:
    """What NVML is asked about by one thread at a time: a GPU, the events, or NVML as a whole.

    A call that hangs keeps its own lane busy and nobody else's, and costs one thread at most.

    Attributes:
        name: how messages name it.
    """

    def __init__(self, name: str, *, whole: bool = False) -> None:
        self.name = name
        self._whole = whole
        self._turn = anyio.Lock()
        self._limiter = anyio.CapacityLimiter(1)
        self._idle = threading.Event()
        self._idle.set()

    @property
    def idle(self) -> bool:
        """Whether no thread is inside NVML for this lane."""
        return self._idle.is_set()

    async def call(
        self,
        work: Callable[[], ResultT],
        deadline: float,
        interrupt: Callable[[], None] | None = None,
    ) -> ResultT:
        """Run `work` in a thread, for at most `deadline` seconds.

        Being cancelled waits for the thread, or the deadline: nobody should take NVML's objects
        away from under a call. `interrupt` is called then, and may bring the thread back sooner.

        Raises:
            DriverTimeout: at the deadline, and at once while an earlier call is still out;
                `DriverUnavailable` when the call was about NVML as a whole.
            DriverError: as NVML failed, or answered what nobody can read.
        """
        late = DriverUnavailable if self._whole else DriverTimeout

        async with self._turn:
            if not self.idle:
                raise late(f"{self.name}: an earlier NVML call has not come back yet")

            async with _if_cancelled(interrupt):
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + deadline):
                    return await anyio.to_thread.run_sync(
                        self._work, work, abandon_on_cancel=True, limiter=self._limiter
                    )
            raise late(f"{self.name}: no answer from NVML within {deadline:.3g} s")

    async def settled(self, patience: float) -> bool:
        """Wait up to `patience` seconds for a thread that was left alone; tell if it came back."""
        return self.idle or await anyio.to_thread.run_sync(
            self._idle.wait, patience, limiter=self._limiter
        )

    def _work(self, work: Callable[[], ResultT]) -> ResultT:
        self._idle.clear()

        try:
            return work()
        except DriverError:
            raise
        except Exception as failure:
            # pynvml and we stumble over odd answers: no GPU's may end the daemon.
            raise error_for(failure, self.name, whole=self._whole) from failure
        finally:
            self._idle.set()


@asynccontextmanager
async def _if_cancelled(interrupt: Callable[[], None] | None) -> AsyncIterator[None]:
    """Call `interrupt` when the block is cancelled, which may be shielded from that itself."""
    if interrupt is None:
        yield
        return

    failure: DriverError | None = None
    over = False

    async def heed() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if not over:
                interrupt()

    async with anyio.create_task_group() as group:
        group.start_soon(heed)
        try:
            yield
        except DriverError as error:
            failure = error  # as it is, not in a group
        over = True
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure

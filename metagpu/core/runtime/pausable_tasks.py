"""Tasks that can be stopped and started again while the daemon runs."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio


class PausableTasks:
    """A group of tasks; it runs unless it is paused."""

    def __init__(self, tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        self._tasks = tasks
        self._paused = self._idle = False
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Run the tasks until cancelled; each has ended at the return.

        A task that fails ends the others, and its error is raised.
        """
        while True:
            self._set_idle(idle=False)
            async with anyio.create_task_group() as group:
                for task in self._tasks:
                    group.start_soon(task)
                while not self._paused:
                    await self._changed.wait()
                group.cancel_scope.cancel()
            self._set_idle(idle=True)
            while self._paused:
                await self._changed.wait()

    async def pause(self) -> None:
        """End the tasks, and wait until they have ended."""
        self._paused = True
        self._notify()
        while not self._idle:
            await self._changed.wait()

    def resume(self) -> None:
        """Start the tasks again."""
        self._paused = False
        self._notify()

    def _set_idle(self, *, idle: bool) -> None:
        self._idle = idle
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

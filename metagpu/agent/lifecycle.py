"""The life of a daemon: it prepares, takes its node, serves, withdraws, ends."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import anyio

from metagpu.agent.exchange import Exchange
from metagpu.agent.fault_note_file import FaultNoteFile
from metagpu.core.runtime.tasks import Work


class Lifecycle:
    """Runs the tasks of an agent, each from its part of the daemon's life on.

    Args:
        preparing: change nothing of the node before this daemon has it. The first of them counts
            events: none may be missed.
        health: watches the GPUs; begins before the node is taken too, and outlasts a withdrawal.
        guests: do for the node what the kubelet can do without; a withdrawal ends them.
        kubelet: serve the kubelet, until the end.
    """

    def __init__(
        self,
        exchange: Exchange,
        fault_note_file: FaultNoteFile,
        *,
        preparing: Sequence[Work],
        health: Work,
        guests: Sequence[Work],
        kubelet: Sequence[Work],
    ) -> None:
        self._exchange = exchange
        self._note = fault_note_file
        self._preparing = preparing
        self._health = health
        self._guests = guests
        self._kubelet = kubelet
        self._withdrawn, self._guests_ended = anyio.Event(), anyio.Event()

    async def run(
        self, beside: Callable[[], AbstractAsyncContextManager[object]], *, waits: bool
    ) -> None:
        """Prepare, take the node, and serve it until cancelled; the locks fall last.

        Args:
            beside: what runs around all tasks.
            waits: whether to wait for the end of another daemon, which is an error otherwise.
        """
        async with AsyncExitStack() as held:
            if not waits:
                await self._exchange.take(held)
            async with beside(), anyio.create_task_group() as main:
                async with anyio.create_task_group() as guests:
                    guests.start_soon(self._end_guests, guests.cancel_scope)
                    for task in self._preparing:
                        guests.start_soon(task)
                    main.start_soon(self._health)
                    if waits:
                        await self._exchange.wait_and_take(held)
                        await self._note.load()  # the last word of the daemon before
                    for task in (self._exchange.yield_to_ready, *self._guests):
                        guests.start_soon(task)
                    for task in (*self._kubelet, self._exchange.lock.run):
                        main.start_soon(task)
                self._guests_ended.set()
                await anyio.sleep_forever()

    async def withdraw(self) -> None:
        """Serve the pods on their way, and end all but what the kubelet needs."""
        await self._exchange.withdraw()
        if self._exchange.taken.is_set():
            self._withdrawn.set()
            await self._guests_ended.wait()
            await self._note.save()

    async def serve_node(self) -> None:
        """Serve the node without its locks, as nobody else can have it; until cancelled."""
        self._exchange.taken.set()
        guests = self._exchange.yield_to_ready, *self._guests
        async with anyio.create_task_group() as group:
            for task in (*self._preparing, self._health, *guests, *self._kubelet):
                group.start_soon(task)

    async def _end_guests(self, guests: anyio.CancelScope) -> None:
        await self._withdrawn.wait()
        guests.cancel()

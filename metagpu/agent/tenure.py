"""One daemon's time on the node: it gets the node, holds it, and gives it up.

The daemon with the lock of the run folder and the lock of the kubelet's folder has the node.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

import anyio
import structlog

from metagpu.agent.exchange import COMMAND, ExchangeTiming
from metagpu.agent.hand_over import Duties, HandOver
from metagpu.agent.paths import AgentPaths
from metagpu.agent.predecessor import Predecessor, connect_predecessor
from metagpu.agent.takeover import Takeover
from metagpu.agent.timing import AgentTiming
from metagpu.core.errors import AnotherDaemon, TakeoverFailed
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.runtime.tasks import PausableTasks, Work
from metagpu.plugins.control.socket import CommandHandler, control_server
from metagpu.plugins.kubelet.call_gate import CallGate
from metagpu.plugins.kubelet.folder_lock import FolderLock

log = structlog.get_logger()


class TenureEnd(StrEnum):
    """The end of a tenure.

    - stopped: by a signal, or an error.
    - handed_over: another daemon has the node.
    - failed: the node could not be taken over; another daemon has it still.
    """

    STOPPED = "stopped"
    HANDED_OVER = "handed over"
    FAILED = "failed"


@dataclass
class Tenure:
    """Runs the tasks of a daemon while it has the node.

    Attributes:
        run_dir: the folder of the control socket.
        lock: the lock of the kubelet's folder.
        commands: the commands on the control socket, by name.
        hand_over: gives the node to another daemon.
        timing: delays and deadlines.
        probes: answers the kubelet's probes while the daemon waits for the node.
        end: why the tenure ended.
        over: set at the end.
    """

    run_dir: Path
    lock: FolderLock
    commands: Callable[[], dict[str, CommandHandler]]
    hand_over: HandOver
    timing: ExchangeTiming
    probes: Work = anyio.sleep_forever
    end: TenureEnd = TenureEnd.STOPPED
    over: anyio.Event = field(default_factory=anyio.Event)

    async def run(
        self,
        tasks: Sequence[Work],
        after: PausableTasks,
        takeover: Takeover | None,
        *,
        asks_after: float | None = 0.0,
        beside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """Get the node, and run all tasks until another daemon takes it over.

        Args:
            tasks: those that may run beside another daemon, as they change nothing.
            after: those that need the node.
            takeover: takes over from another daemon; without it, another one is an error.
            asks_after: seconds to the first attempt to take over; `None` for no attempt.
            beside: what runs around the tasks then, as a simulated cluster does.

        Raises:
            AnotherDaemon: another daemon has the node.
            TakeoverFailed: the daemon that gave the node away keeps its locks.
        """
        async with AsyncExitStack() as stack:
            another: AnotherDaemon | None = None
            try:
                await self._hold(stack)
            except AnotherDaemon as other:
                another = other
            serve = partial(self._serve, stack, tasks, after, beside)
            if another is None:
                if takeover is not None:
                    await takeover.grant_at_once()
                await serve()
            elif takeover is None:
                raise another
            else:
                probes = PausableTasks((self._answer_probes,))
                async with anyio.create_task_group() as probing:
                    probing.start_soon(probes.run)
                    predecessor = await self._wait_node(stack, another, asks_after)
                    if predecessor is None:
                        await takeover.grant_at_once()
                        await probes.pause()  # the tasks need their port, here and below
                        await serve()
                    else:
                        for task in tasks:
                            probing.start_soon(task)
                        await self._take_over(stack, predecessor, takeover)
                        await probes.pause()
                        await self._serve(stack, (), after)

    async def _serve(
        self,
        stack: AsyncExitStack,
        tasks: Sequence[Work],
        after: PausableTasks,
        beside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """Run the tasks until another daemon has the node, and then until cancelled."""
        async with beside(), anyio.create_task_group() as group:
            for task in (after.run, *tasks):  # first the one that counts events: all of them
                group.start_soon(task)
            await self._keep_until_handed_over(stack)

    async def _take_over(
        self, stack: AsyncExitStack, predecessor: Predecessor, takeover: Takeover
    ) -> None:
        """Get the node and its locks; a failure is the end of the tenure.

        Raises:
            TakeoverFailed: the daemon that gave the node away keeps its locks.
        """
        if not await self._succeed(predecessor, takeover):
            self._end(TenureEnd.FAILED)
            await anyio.sleep_forever()
        await self._hold_soon(stack)
        log.info("node taken over")  # not before commands are answered

    async def _keep_until_handed_over(self, stack: AsyncExitStack) -> None:
        """Keep the locks until another daemon has the node; then wait to be cancelled."""
        async with anyio.create_task_group() as locking:
            locking.start_soon(self.lock.run)
            await self.hand_over.done.wait()
            locking.cancel_scope.cancel()
        await stack.aclose()  # the new daemon waits for the locks; nothing takes them again
        await self.hand_over.gate.wait_answered()  # here signals are heard
        self._end(TenureEnd.HANDED_OVER)
        await anyio.sleep_forever()

    def _end(self, end: TenureEnd) -> None:
        self.end = end
        self.over.set()

    async def _hold(self, stack: AsyncExitStack) -> None:
        """Take both locks and serve the control socket until the stack is closed.

        Raises:
            AnotherDaemon: another daemon has one of the locks.
            MetagpuError: the control socket cannot be created.
        """
        conversations = {COMMAND: self.hand_over.converse}
        async with AsyncExitStack() as attempt:
            server = control_server(self.run_dir, self.commands(), conversations)
            await attempt.enter_async_context(server)
            await attempt.enter_async_context(self.lock.held())
            stack.push_async_exit(attempt.pop_all())

    async def _answer_probes(self) -> None:
        await anyio.sleep(self.timing.probes)
        await self.probes()

    async def _wait_node(
        self, stack: AsyncExitStack, other: AnotherDaemon, asks_after: float | None
    ) -> Predecessor | None:
        """Wait until the node is free, or the daemon that has it hands it over.

        A daemon that does not answer is not killed: its own supervisor does that, which knows what
        it started; a lock does not say whose process holds it in a container.
        """
        logged, reason = LogOnce(), str(other)
        asks_at = math.inf if asks_after is None else anyio.current_time() + asks_after
        while True:
            if anyio.current_time() >= asks_at:
                try:
                    return await stack.enter_async_context(
                        connect_predecessor(self.run_dir, self.timing)
                    )
                except TakeoverFailed as error:
                    reason = str(error)
            if logged.is_new(self.run_dir, reason):
                log.warning("waiting for the node", reason=reason, until="the other daemon ends")
            await anyio.sleep(self.timing.retry)
            try:
                await self._hold(stack)
            except AnotherDaemon:
                continue
            return None

    async def _succeed(self, predecessor: Predecessor, takeover: Takeover) -> bool:
        """Take over; return whether the node is this daemon's."""
        failure = "the old daemon has ended, or has given the exchange up"
        taken = False

        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await predecessor.wait_gone()
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                await takeover.run(predecessor)
                taken = True
            except TakeoverFailed as error:
                failure = str(error)
            group.cancel_scope.cancel()

        if not taken:
            log.error("takeover failed", reason=failure, effect="the other daemon goes on")
        return taken

    async def _hold_soon(self, stack: AsyncExitStack) -> None:
        """Take the locks that the old daemon is about to release.

        Raises:
            TakeoverFailed: it does not.
        """
        with anyio.move_on_after(self.timing.answer):
            while True:
                try:
                    await self._hold(stack)
                except AnotherDaemon:
                    await anyio.sleep(self.timing.poll)
                else:
                    return
        raise TakeoverFailed("another daemon has the locks of the node, and this one the kubelet")


def build_tenure(
    paths: AgentPaths,
    commands: Callable[[], dict[str, CommandHandler]],
    gate: CallGate,
    duties: Duties,
    timing: AgentTiming,
    *,
    probes: Work = anyio.sleep_forever,
) -> Tenure:
    """Build the tenure of a daemon whose `gate` holds the kubelet's calls."""
    lock = FolderLock(paths.kubelet_dir, timing.kubelet.watch_period)
    hand_over = HandOver(gate, duties, timing.kubelet.list_end, timing.exchange)
    return Tenure(paths.run_dir, lock, commands, hand_over, timing.exchange, probes)

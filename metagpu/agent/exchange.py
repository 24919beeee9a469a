"""The exchange of daemons: prepare, withdraw, take.

A new daemon prepares and waits, the old one withdraws and ends, and the new one takes the node.

The daemon with the lock of the run folder and the lock of the kubelet's folder has the node. No
daemon gives a lock to another one: the one that ends releases both, and takes nothing back.
"""

import fcntl
import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread

from metagpu import __version__
from metagpu.agent.fault_note_file import FaultNoteFile
from metagpu.agent.preparation import Preparation
from metagpu.agent.timing import ExchangeTiming
from metagpu.core.errors import AnotherDaemon
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.runtime.tasks import Work
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.events import DaemonNotReady
from metagpu.core.state.facts import NodeWithdrawn
from metagpu.core.state.registry import Registry
from metagpu.plugins.control.socket import CommandHandler, control_server, is_locked
from metagpu.plugins.kubelet.folder_lock import FolderLock

STANDBY_FILE: Final = "standby.json"
_SIZE_LIMIT: Final = 65536
"""Bytes that are read."""


class Standby(msgspec.Struct, frozen=True):
    """A daemon that waits for the node.

    Attributes:
        problems: why it is not ready to take the node; none if it is.
    """

    version: str = ""
    problems: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """True if it takes the node as soon as nobody has it."""
        return not self.problems


class StandbyFile:
    """Shows a daemon that waits, as long as its file is locked.

    The kernel unlocks it at any end of the process. The file is a help, never a need: a daemon that
    cannot write it takes the node as well, and the old one stops idle MPS daemons.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STANDBY_FILE
        self._file: int | None = None
        self._shown: Standby | None = None

    def show(self, standby: Standby) -> None:
        """Write a state, unless another daemon that waits has the file. Blocks."""
        if self._file is not None and not self._is_at_path(self._file):
            self.close()  # somebody has removed the run folder
        if self._file is None:
            self._file = self._open()
        if self._file is None or standby == self._shown:
            return
        content = msgspec.json.encode(standby)
        self._shown = None
        try:
            # Empty if the disk is full: a daemon without a state counts as one that is not ready.
            os.ftruncate(self._file, 0)
            if os.pwrite(self._file, content, 0) == len(content):
                self._shown = standby
        except OSError:
            pass  # the next call tries again

    def close(self) -> None:
        """Unlock the file: this daemon waits no more."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._shown = None

    def _open(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            file = os.open(self._path, flags, 0o600)
        except OSError:
            return None  # the control socket in the same folder reports it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)  # its text is an earlier daemon's
        except OSError:
            os.close(file)
            return None
        return file

    def _is_at_path(self, file: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(self._path.stat(), os.fstat(file))
        return False


def read_standby(folder: Path) -> Standby | None:
    """Return the daemon that waits for the node of a run folder, `None` without one."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(folder / STANDBY_FILE, flags)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _decode(os.pread(file, _SIZE_LIMIT, 0))
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def _decode(content: bytes) -> Standby:
    try:
        return msgspec.json.decode(content, type=Standby)
    except msgspec.MsgspecError:
        return Standby(problems=("it has just started",))


log = structlog.get_logger()


@dataclass
class Exchange:
    """Gets the node, holds it, and gives it up.

    Attributes:
        run_dir: the folder of the control socket.
        lock: the lock of the kubelet's folder.
        commands: the commands on the control socket, by name.
        preparation: finds what keeps this daemon from being ready to take the node.
        taken: set once this daemon has the node.
        ready: set once the daemon before this one may end; the service manager hears of it.
        over: set when it gives the node to a daemon that is ready, as it has nothing to serve.
        is_open: whether the Node, as read last, shows shares to which the scheduler binds pods.
    """

    run_dir: Path
    lock: FolderLock
    commands: Callable[[], dict[str, CommandHandler]]
    preparation: Preparation
    registry: Registry
    call_stats: KubeletCallStats
    timing: ExchangeTiming
    taken: anyio.Event
    ready: anyio.Event
    over: anyio.Event = field(default_factory=anyio.Event)
    is_open: Callable[[], bool] = lambda: False
    _logged: LogOnce = field(default_factory=LogOnce)
    _unready_since: float | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what keeps this daemon from being ready to take the node."""
        return self.preparation.problems

    async def take(self, held: AsyncExitStack) -> None:
        """Get the node at once; the stack gives it up when it closes.

        Raises:
            AnotherDaemon: another daemon has it.
            MetagpuError: the control socket cannot be created.
        """
        try:
            await self._hold(held)
        except AnotherDaemon:
            await anyio.sleep(self.timing.poll)  # another one may have looked whether it is free
            await self._hold(held)
        self.taken.set()

    async def wait_and_take(self, held: AsyncExitStack) -> None:
        """Get the node as soon as this daemon is ready for it and nobody has it.

        A daemon that is not ready takes the node only where nobody else does for a while: it can
        report its problems then.
        """
        free_since: float | None = None
        looked = -math.inf
        with closing(StandbyFile(self.run_dir)) as file:
            while not self.taken.is_set():
                if self.problems or anyio.current_time() - looked >= self.timing.look:
                    await self._update()
                    await to_thread.run_sync(file.show, Standby(__version__, self.problems))
                    looked = anyio.current_time()
                now = anyio.current_time()  # a look may have lasted
                if not self.problems or is_locked(self.run_dir):
                    free_since = None
                elif free_since is None:
                    free_since = now
                alone = free_since is not None and now - free_since >= self.timing.alone
                if not self.problems or alone:
                    try:
                        await self._hold(held)
                    except AnotherDaemon as other:
                        self._log_waiting(str(other))
                        if not self.problems:
                            self.ready.set()
                    else:
                        self.taken.set()
                        break
                # With jitter: several that wait must not try in step.
                period = self.timing.look if self.problems else self.timing.poll
                await anyio.sleep(period * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        log.info("node taken", ready=not self.problems)

    async def yield_to_ready(self) -> None:
        """Leave the node to a daemon that is ready, until this one serves.

        Nobody misses what it has not offered yet. Returns once it serves.
        """
        while True:
            await self._update()
            if not self.problems or self.registry.snapshot.offers:
                return
            standby = read_standby(self.run_dir)
            if standby is not None and standby.ready:
                log.warning("node given to a daemon that is ready", reason=self.problems[0])
                self.over.set()
                return
            await anyio.sleep(self.timing.look)

    async def withdraw(self) -> None:
        """Keep new pods away, and serve those that are on their way.

        The scheduler hears it by the Node's amounts, which fall to 0. The kubelet may raise
        them: then the last pods are waited for once more. Without an API server nobody can tell the
        scheduler: the present calls are answered, and to serve longer would protect no pod.
        """
        if not self.taken.is_set():
            return
        standby, timing = read_standby(self.run_dir), self.timing
        hands_over = standby is not None and standby.ready
        self.registry.apply(NodeWithdrawn(hands_over))
        began = quiet = anyio.current_time()
        with anyio.move_on_after(timing.most) as waiting:
            snapshot = self.registry.snapshot
            tells = snapshot.pods.listed and bool(snapshot.offers)
            while self._admits() or (tells and anyio.current_time() < quiet + timing.least):
                await anyio.sleep(timing.poll)
                if self._admits() or (tells and self.is_open()):
                    quiet = anyio.current_time()
                quiet = max(quiet, self._last_grant())
        log.info(
            "node withdrawn",
            after=f"{anyio.current_time() - began:.2f}s",
            hands_over=hands_over,
            pods_on_their_way=waiting.cancelled_caught,
        )

    def _last_grant(self) -> float:
        """Return the time of the last lease that began: its pod may be admitted already."""
        leases = (
            lease
            for state in self.registry.snapshot.gpus.values()
            for lease in state.leases.values()
        )
        return max((lease.since for lease in leases), default=0.0)

    def _admits(self) -> bool:
        """Return whether pods that need this daemon are on their way."""
        if self.call_stats.in_flight:
            return True
        snapshot = self.registry.snapshot
        return not snapshot.offers.keys().isdisjoint(snapshot.pods.arriving) or any(
            pod.arriving and pod.claims for pod in snapshot.pods.by_uid.values()
        )

    async def _update(self) -> None:
        """Look at what keeps this daemon from being ready, and report it once it lasts."""
        await self.preparation.look()
        now = anyio.current_time()
        if not self.problems:
            self._unready_since = None
            if self._logged.clear("not ready"):
                log.info("daemon ready")
            return
        if self._unready_since is None:
            self._unready_since = now
        lasts = now - self._unready_since >= self.timing.report
        reason = _joined(self.problems)
        if lasts and self._logged.is_new("not ready", reason):
            log.error("daemon not ready", reason=reason, effect="it takes nothing over")
            self.registry.events.publish(DaemonNotReady(reason))

    def _log_waiting(self, reason: str) -> None:
        if self._logged.is_new(self.run_dir, reason):
            log.info("waiting for the node", reason=reason, until="the other daemon ends")

    async def _hold(self, held: AsyncExitStack) -> None:
        """Take both locks and serve the control socket until the stack is closed.

        Raises:
            AnotherDaemon: another daemon has one of the locks.
            MetagpuError: the control socket cannot be created.
        """
        async with AsyncExitStack() as attempt:
            await attempt.enter_async_context(control_server(self.run_dir, self.commands()))
            await attempt.enter_async_context(self.lock.held())
            held.push_async_exit(attempt.pop_all())


def _joined(problems: Sequence[str]) -> str:
    return "; ".join(problems)


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
                        # The old daemon's last note; the end of this one must not write over it.
                        with anyio.CancelScope(shield=True):
                            await self._note.load()
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

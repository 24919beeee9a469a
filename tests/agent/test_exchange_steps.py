"""Steps of one daemon at the exchange, at moments that processes seldom meet."""

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace

from metagpu.agent import exchange as module
from metagpu.agent.exchange import Exchange, Lifecycle, Standby, StandbyFile
from metagpu.agent.timing import ExchangeTiming
from metagpu.core.errors import AnotherDaemon
from metagpu.core.model.pods import KnownPod
from metagpu.core.runtime.tasks import Work
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.events import DaemonNotReady
from metagpu.core.state.facts import GpusFound, PodsListed, SharesClaimed
from metagpu.core.state.registry import Registry
from metagpu.plugins.control.socket import is_locked
from metagpu.plugins.kubelet.folder_lock import FolderLock
from tests.rigs.build import METAGPU, gpu, layout_of
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip


@dataclass
class Looks:
    """A preparation whose looks find one thing after another; the last one ends the test."""

    steps: list[Any]
    ended: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    problems: tuple[str, ...] = ("it has just started",)

    async def look(self) -> None:
        """Take the next step, which says what is found."""
        if not self.steps:
            self.ended.cancel()
            await anyio.sleep_forever()
        self.problems = self.steps.pop(0)()


def unready() -> tuple[str, ...]:
    """Find a problem."""
    return ("the driver: it does not answer",)


def ready() -> tuple[str, ...]:
    """Find nothing."""
    return ()


def exchange(folder: Path, looks: Looks, timing: ExchangeTiming) -> Exchange:
    """Return the exchange of a daemon, in a folder that is its run folder and its kubelet's."""
    return Exchange(
        folder,
        FolderLock(folder, 3600.0),
        dict,
        cast("Any", looks),
        Registry(),
        KubeletCallStats(),
        timing,
        anyio.Event(),
        anyio.Event(),
    )


async def test_the_time_alone_begins_anew_after_each_readiness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that fails later does not take the node at once, also after a look that lasts."""
    later, clock = 0.0, anyio.current_time
    monkeypatch.setattr(anyio, "current_time", lambda: clock() + later)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def unready_alone() -> tuple[str, ...]:
        nonlocal later
        later = 7200.0
        os.close(other)  # the other daemon has crashed
        return unready()

    looks = Looks([unready, unready, ready, ready, unready_alone, unready, unready])
    live_exchange = exchange(tmp_path, looks, ExchangeTiming(poll=0.001, look=0.001, alone=3600.0))
    async with AsyncExitStack() as held:
        with looks.ended:
            await live_exchange.wait_and_take(held)
    assert looks.steps == []
    assert not live_exchange.taken.is_set()


@dataclass
class Note:
    """A file of faults whose reading takes until a test says so."""

    reading: anyio.Event = field(default_factory=anyio.Event)
    go_on: anyio.Event = field(default_factory=anyio.Event)
    done: list[str] = field(default_factory=list)

    async def load(self) -> None:
        """Read what the old daemon has written."""
        self.reading.set()
        await self.go_on.wait()
        self.done.append("read")

    async def save(self) -> None:
        """Write what this daemon knows."""
        self.done.append("written")


async def test_an_end_writes_over_no_note_that_is_not_read(tmp_path: Path) -> None:
    """A SIGTERM right after the node is taken keeps the faults that the old daemon knew."""
    live_exchange = exchange(tmp_path, Looks([lambda: ()]), ExchangeTiming(look=3600.0))
    note = Note()
    life = Lifecycle(
        live_exchange,
        cast("Any", note),
        preparing=(),
        health=anyio.sleep_forever,
        guests=(),
        kubelet=(),
    )

    async with anyio.create_task_group() as group:
        group.start_soon(partial(life.run, nullcontext, waits=True))
        with anyio.fail_after(30):
            await note.reading.wait()
            group.start_soon(life.withdraw)
            await anyio.wait_all_tasks_blocked()
            note.go_on.set()
            await life._guests_ended.wait()
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert note.done == ["read", "written"]


async def test_the_last_pods_are_waited_for_after_each_raise_of_the_amounts(tmp_path: Path) -> None:
    """A kubelet that writes its own amounts lets pods in: the withdrawal lasts until they are 0."""
    daemon = exchange(tmp_path, Looks([]), ExchangeTiming(poll=0.001, least=60.0, most=3600.0))
    daemon.registry.apply(GpusFound((gpu(0),), at=0))
    daemon.registry.apply(layout_of(gpu(0)).offer_fact)
    daemon.registry.apply(PodsListed((), 0.0))
    daemon.taken.set()
    asked, shown = anyio.Event(), [True]

    def is_open() -> bool:
        asked.set()
        return shown[0]

    daemon.is_open, ended = is_open, anyio.Event()

    async def withdraw() -> None:
        await daemon.withdraw()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(withdraw)
        for _ in range(3):
            skip(61)
            asked = anyio.Event()
            with anyio.fail_after(30):
                await asked.wait()
        assert not ended.is_set()
        shown[0] = False
        granted = SharesClaimed(layout_of(gpu(0)).shares[:1], anyio.current_time() + 30)
        daemon.registry.apply(granted)
        skip(61)
        asked = anyio.Event()
        with anyio.fail_after(30):
            await asked.wait()
        assert not ended.is_set(), "the pod of the last grant may not be admitted yet"
        skip(61)
        with anyio.fail_after(30):
            await ended.wait()


ARRIVING = KnownPod("u", "team", "a", requests={METAGPU: 1}, arriving=True)
CLAIMING = replace(ARRIVING, requests={}, claims={"main": frozenset({("gpu", "")})})


@pytest.mark.parametrize(
    ("pods", "least", "calls", "waits"),
    [
        ((), 0.0, 0, False),
        ((), 0.0, 1, True),
        ((ARRIVING,), 0.0, 0, True),
        ((replace(ARRIVING, requests={"cpu": 1}),), 0.0, 0, False),
        ((CLAIMING,), 0.0, 0, True),
        ((replace(CLAIMING, arriving=False),), 0.0, 0, False),
        ((), 3600.0, 0, True),  # the scheduler may have bound a pod that nobody shows yet
        (None, 3600.0, 0, False),
    ],
)
async def test_pods_on_their_way_are_served(
    tmp_path: Path, pods: tuple[KnownPod, ...] | None, least: float, calls: int, *, waits: bool
) -> None:
    """A withdrawal waits for calls, and for pods that need this daemon, but not for ever."""
    daemon = exchange(tmp_path, Looks([]), ExchangeTiming(poll=0.001, least=least, most=0.05))
    daemon.registry.apply(GpusFound((gpu(0),), at=0))
    daemon.registry.apply(layout_of(gpu(0)).offer_fact)
    if pods is not None:
        daemon.registry.apply(PodsListed(pods, 0.0))
    daemon.call_stats.of_resource(METAGPU).in_flight = calls
    daemon.taken.set()
    with capture_module_logs(module) as logs:
        await daemon.withdraw()
    assert [entry["pods_on_their_way"] for entry in logs] == [waits]


@pytest.mark.parametrize("problems", [None, unready(), ready()])
async def test_the_node_is_kept_as_it_is_for_a_daemon_that_is_ready(
    tmp_path: Path, problems: tuple[str, ...] | None
) -> None:
    """One that waits and is not ready takes nothing over; without the node nothing is withdrawn."""
    daemon = exchange(tmp_path, Looks([]), ExchangeTiming())
    await daemon.withdraw()
    before = daemon.registry.snapshot
    daemon.taken.set()
    with closing(StandbyFile(tmp_path)) as file:
        if problems is not None:
            await to_thread.run_sync(file.show, Standby("v2", problems))
        await daemon.withdraw()
    now = daemon.registry.snapshot
    assert (before.withdrawn, now.withdrawn) == (False, True)
    assert now.hands_over == (problems == ())


@pytest.mark.parametrize(
    ("offers", "other", "looks", "gives"),
    [
        (False, None, 3, False),
        (False, unready(), 3, False),
        (False, (), 1, True),
        (True, (), 1, False),
    ],
)
async def test_a_daemon_that_serves_nothing_yields(
    tmp_path: Path, other: tuple[str, ...] | None, looks: int, *, offers: bool, gives: bool
) -> None:
    """The node goes to one that is ready; a daemon with offers has pods to serve."""
    found = Looks([unready, unready, ready])
    daemon = exchange(tmp_path, found, ExchangeTiming(look=0.001))
    if offers:
        daemon.registry.apply(GpusFound((gpu(0),), at=0))
        daemon.registry.apply(layout_of(gpu(0)).offer_fact)
    with closing(StandbyFile(tmp_path)) as file, found.ended:
        if other is not None:
            await to_thread.run_sync(file.show, Standby("v2", other))
        await daemon.yield_to_ready()
    assert (3 - len(found.steps), daemon.over.is_set()) == (looks, gives)


async def test_a_daemon_that_stays_unready_is_reported_once(tmp_path: Path) -> None:
    """A problem that lasts is an Event, and each other one after it; what passes is none."""
    other = ("the kubelet: run as root",)
    steps = [unready, ready, unready, unready, unready, lambda: other, ready, unready]
    daemon = exchange(tmp_path, Looks(list(steps)), ExchangeTiming(report=60.0))
    reported = list[object]()
    with daemon.registry.events.subscribe(DaemonNotReady) as events:
        for _ in steps:
            await daemon._update()
            reported.append([getattr(event, "reason", event) for event in events._waiting])
            events._waiting.clear()
            skip(40)
    assert reported == [[], [], [], [], [unready()[0]], [other[0]], [], []]


@pytest.mark.parametrize("looks", [1, 2])
async def test_a_look_at_the_lock_is_no_other_daemon(tmp_path: Path, looks: int) -> None:
    """A lock that is free a moment later is tried again; a daemon that stays is an error."""
    daemon = exchange(tmp_path, Looks([]), ExchangeTiming(poll=0.001))
    left = looks

    @asynccontextmanager
    async def held() -> AsyncIterator[None]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise AnotherDaemon("another metagpu serves the kubelet")
        yield

    daemon.lock.held = held  # type: ignore[method-assign]
    async with AsyncExitStack() as stack:
        with pytest.raises(AnotherDaemon) if looks > 1 else nullcontext():
            await daemon.take(stack)
        assert daemon.taken.is_set() == is_locked(tmp_path) == (looks == 1)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_withdrawal_ends_what_the_kubelet_does_without(
    tmp_path: Path, *, waits: bool
) -> None:
    """The daemon has the node until its very end, and notes faults once it has read the note."""
    daemon, note = exchange(tmp_path, Looks([ready] * 9), ExchangeTiming(poll=0.001)), Note()
    note.go_on.set()
    runs = set[str]()

    def work(name: str) -> Work:
        async def run() -> None:
            runs.add(name)
            try:
                await anyio.sleep_forever()
            finally:
                runs.remove(name)

        return run

    life = Lifecycle(
        daemon,
        cast("Any", note),
        preparing=(work("preparing"),),
        health=work("health"),
        guests=(work("guest"),),
        kubelet=(work("kubelet"),),
    )
    async with anyio.create_task_group() as group:
        group.start_soon(partial(life.run, nullcontext, waits=waits))
        await becomes(lambda: runs == {"preparing", "health", "guest", "kubelet"})
        with anyio.fail_after(30):
            await life.withdraw()
        assert runs == {"health", "kubelet"}
        assert is_locked(tmp_path)
        group.cancel_scope.cancel()
    assert not is_locked(tmp_path)
    assert note.done == ["read", "written"][not waits :]


async def test_a_daemon_that_is_ready_says_so_while_it_waits(tmp_path: Path) -> None:
    """The service manager ends the old daemon then, and the new one takes the node."""
    daemon = exchange(tmp_path, Looks([ready]), ExchangeTiming(poll=0.001, look=3600.0))
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    async with AsyncExitStack() as held, anyio.create_task_group() as group:
        group.start_soon(daemon.wait_and_take, held)
        with anyio.fail_after(30):
            await daemon.ready.wait()
            assert not daemon.taken.is_set()
            os.close(other)
            await daemon.taken.wait()


async def test_a_daemon_alone_takes_the_node_to_report_its_problems(tmp_path: Path) -> None:
    """A node where nobody else comes is better served by a daemon that says what is wrong."""
    looks = Looks([unready] * 3)
    daemon = exchange(tmp_path, looks, ExchangeTiming(look=0.001, alone=0.0))
    async with AsyncExitStack() as held:
        with anyio.fail_after(30), looks.ended:
            await daemon.wait_and_take(held)
        assert daemon.taken.is_set()
    assert not daemon.ready.is_set()

"""Steps of one daemon at the exchange, at moments that processes seldom meet."""

import fcntl
import os
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from metagpu.agent.exchange import Exchange, Lifecycle
from metagpu.agent.timing import ExchangeTiming
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import GpusFound, PodsListed
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.folder_lock import FolderLock
from tests.rigs.build import gpu, layout_of
from tests.rigs.waiting import skip


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

    def ready() -> tuple[str, ...]:
        return ()

    def unready() -> tuple[str, ...]:
        return ("the driver: it does not answer",)

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
        skip(61)
        with anyio.fail_after(30):
            await ended.wait()

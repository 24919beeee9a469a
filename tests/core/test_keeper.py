"""Backends keep their GPUs while the layout says so, and no longer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
from msgspec.structs import replace

from metagpu.backends.fraction import FractionBackend
from metagpu.core import keeper as keeper_module
from metagpu.core.backend import Backend
from metagpu.core.facts import GpusFound
from metagpu.core.gpu import Gpu
from metagpu.core.keeper import Keeper
from metagpu.core.layout import Cut, Layout
from metagpu.core.registry import Registry
from metagpu.core.served import ServedGpu
from metagpu.nvml import Nvml
from metagpu.sim.tools import simulated_companions
from tests.build import METAGPU, gpu, laid_out, pool
from tests.heard import heard
from tests.recorded_tools import RecordedTools
from tests.served import in_care

A, B = gpu(0), gpu(1)
TOOLS = RecordedTools()


@dataclass
class Diary:
    """What a backend was told to keep and to leave, in order."""

    lines: list[str] = field(default_factory=list)
    slow: anyio.Event = field(default_factory=anyio.Event)
    fails: int = 0
    returns: bool = False

    async def serve(self, backend: Backend, served: ServedGpu) -> None:
        """Stand in for a backend's own."""
        assert isinstance(backend, FractionBackend)
        assert served.tools is TOOLS
        assert served.backend == "fraction"
        said = f"{served.gpu.index}/{backend.options.shares_per_gpu}"
        self.lines.append(f"keep {said}")
        if self.fails:
            self.fails -= 1
            raise ZeroDivisionError
        if self.returns:
            return
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self.slow.wait()
            self.lines.append(f"leave {said}")


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Diary:
    """Let fractions keep a diary of what they are told."""
    made = Diary()
    made.slow.set()

    async def serve(self: FractionBackend, served: ServedGpu) -> None:
        await made.serve(self, served)

    monkeypatch.setattr(FractionBackend, "serve", serve)
    return made


def layout(*gpus: Gpu, shares: int = 10) -> Layout:
    """Lay fractions over GPUs."""
    return laid_out(*gpus, text=pool(f"sharesPerGpu: {shares}"))


@asynccontextmanager
async def keeping(*gpus: Gpu) -> AsyncIterator[Keeper]:
    """Keep a layout while the block lasts."""
    registry = Registry()
    registry.apply(GpusFound((A, B), at=0))
    keeper = Keeper(registry, Nvml(), TOOLS, simulated_companions())
    keeper.keep(layout(*gpus))

    async with anyio.create_task_group() as group:
        group.start_soon(keeper.run)
        await anyio.wait_all_tasks_blocked()
        yield keeper
        group.cancel_scope.cancel()


async def test_every_gpu_is_kept_until_the_end(diary: Diary) -> None:
    """A backend is called once for each GPU that it cuts, and left when the daemon stops."""
    async with keeping(A, B):
        assert diary.lines == ["keep 0/10", "keep 1/10"]

    assert sorted(diary.lines[2:]) == ["leave 0/10", "leave 1/10"]


async def test_a_layout_that_says_the_same_disturbs_nobody(diary: Diary) -> None:
    """A reload that changes nothing of a GPU leaves it alone, whatever came beside it."""
    async with keeping(A) as keeper:
        keeper.keep(layout(A))
        await anyio.wait_all_tasks_blocked()
        keeper.keep(layout(replace(A, numa_node=1), B))
        await anyio.wait_all_tasks_blocked()

        assert diary.lines == ["keep 0/10", "keep 1/10"]


async def test_other_options_wait_for_the_old_ones_end(diary: Diary) -> None:
    """Two ways of keeping one GPU are never at work together."""
    async with keeping(A, B) as keeper:
        diary.lines.clear()
        diary.slow = anyio.Event()
        keeper.keep(layout(A, shares=5))
        await anyio.wait_all_tasks_blocked()

        assert diary.lines == []

        diary.slow.set()
        await anyio.wait_all_tasks_blocked()

        assert sorted(diary.lines[:2]) == ["leave 0/10", "leave 1/10"]
        assert diary.lines[2:] == ["keep 0/5"]


async def test_the_latest_layout_counts(diary: Diary) -> None:
    """What was said while others ended is followed, and nothing in between."""
    async with keeping(A) as keeper:
        diary.lines.clear()
        diary.slow = anyio.Event()
        keeper.keep(layout(A, shares=5))
        await anyio.wait_all_tasks_blocked()
        keeper.keep(layout(A, shares=7))
        diary.slow.set()
        await anyio.wait_all_tasks_blocked()

        assert diary.lines[0] == "leave 0/10"
        assert diary.lines[-1] == "keep 0/7"


async def test_a_backend_that_fails_is_told_and_called_again(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error hurts nobody else, and the backend gets another chance after a while."""
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0)
    diary.fails = 2

    with heard(keeper_module) as logs:
        async with keeping(A, B):
            assert sorted(diary.lines) == ["keep 0/10", "keep 0/10", "keep 1/10", "keep 1/10"]

    assert [line["event"] for line in logs] == ["a backend failed to keep its GPU"] * 2


async def test_a_backend_need_not_stay(diary: Diary) -> None:
    """A backend that has nothing to undo returns, and is called anew only for something new."""
    diary.returns = True

    async with keeping(A) as keeper:
        keeper.keep(layout(A))
        await anyio.wait_all_tasks_blocked()
        keeper.keep(layout(A, shares=5))
        await anyio.wait_all_tasks_blocked()

        assert diary.lines == ["keep 0/10", "keep 0/5"]


async def test_a_backend_need_not_keep_anything() -> None:
    """By default a GPU is left as it is."""
    async with in_care(pool()) as care:
        assert care.state().suspended == {}
        assert care.state().cleans == frozenset()


def test_a_layout_says_who_cuts_what() -> None:
    """For each GPU the backends of its pool stand with their options; for others nobody."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - name: a\n    gpus: {index: 0}\n    backends:\n"
        "      - {backend: fraction}\n      - {backend: timeslice, replicas: 2}\n"
    )
    made = laid_out(A, B, text=text)

    assert [(cut.gpu, cut.options.backend, cut.backend.name) for cut in made.cuts] == [
        (A, "fraction", "fraction"),
        (A, "timeslice", "timeslice"),
    ]
    assert isinstance(made.cuts[0], Cut)
    assert made.cuts[0].backend is made.backends[METAGPU]

"""Backends serve their GPUs while the layout assigns them, and no longer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
from msgspec.structs import replace

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.contracts.backend import Backend, GpuContext
from metagpu.core.layout import backend_runner
from metagpu.core.layout.backend_runner import RESTARTS, BackendRunner
from metagpu.core.layout.layout import BackendAssignment, Layout
from metagpu.core.model.gpu import Gpu
from metagpu.core.runtime.tasks import RestartTiming
from metagpu.core.state.facts import GpusFound, NodeWithdrawn
from metagpu.core.state.registry import Registry
from metagpu.host.linux import LinuxHost
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.programs import sim_daemons
from metagpu.testing.node import RecordedPrograms
from tests.rigs.build import BACKENDS, METAGPU, ManagedFraction, gpu, layout_of, pool
from tests.rigs.gpu_context import run_backends
from tests.rigs.logs import capture_module_logs

A, B = gpu(0), gpu(1)
TOOLS = RecordedPrograms()


@dataclass
class CallLog:
    """The calls of `serve` and their ends, in order.

    Attributes:
        slow: set once a call may end.
        fails: the number of calls that still fail.
        returns: whether calls return at once.
        handed_over: of each ended call, whether another daemon has its GPU next.
    """

    lines: list[str] = field(default_factory=list)
    slow: anyio.Event = field(default_factory=anyio.Event)
    fails: int = 0
    returns: bool = False
    handed_over: list[bool] = field(default_factory=list)

    async def serve(self, backend: Backend, context: GpuContext) -> None:
        """Record a call, and act as the test wants."""
        assert isinstance(backend, FractionBackend)
        assert context.programs is TOOLS
        assert context.backend == "fraction"
        name = f"{context.gpu.index}/{backend.options.shares_per_gpu}"
        self.lines.append(f"serve {name}")
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
            self.lines.append(f"end {name}")
            self.handed_over.append(context.hands_over)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> CallLog:
    """Record the calls of `serve` of the backend `fraction`."""
    log = CallLog()
    log.slow.set()

    async def serve(self: ManagedFraction, context: GpuContext) -> None:
        await log.serve(self, context)

    monkeypatch.setattr(ManagedFraction, "serve", serve)
    monkeypatch.setitem(BACKENDS, "fraction", ManagedFraction)
    return log


def layout(*gpus: Gpu, shares: int = 10) -> Layout:
    """Offer fractions of GPUs."""
    return layout_of(*gpus, text=pool(f"sharesPerGpu: {shares}"))


@asynccontextmanager
async def running(*gpus: Gpu, timing: RestartTiming = RESTARTS) -> AsyncIterator[BackendRunner]:
    """Run a layout while the block lasts."""
    registry = Registry()
    registry.apply(GpusFound((A, B), at=0))
    runner = BackendRunner(registry, NvmlDriver(), TOOLS, sim_daemons(), LinuxHost(), timing=timing)
    runner.apply(layout(*gpus))

    async with anyio.create_task_group() as group:
        group.start_soon(runner.run)
        await anyio.wait_all_tasks_blocked()
        yield runner
        group.cancel_scope.cancel()


async def test_every_gpu_is_served_until_the_end(calls: CallLog) -> None:
    """A backend serves each of its GPUs once, until the agent stops."""
    async with running(A, B):
        assert sorted(calls.lines) == ["serve 0/10", "serve 1/10"]

    assert sorted(calls.lines[2:]) == ["end 0/10", "end 1/10"]


async def test_every_gpu_is_served_again_by_the_next_run(calls: CallLog) -> None:
    """A run after one that ended, as after a fault, begins with each GPU of the layout."""
    async with running(A) as runner:
        pass
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run)
        await anyio.wait_all_tasks_blocked()
        assert calls.lines == ["serve 0/10", "end 0/10", "serve 0/10"]
        group.cancel_scope.cancel()


async def test_an_equal_layout_restarts_no_backend(calls: CallLog) -> None:
    """A reload that changes nothing of a GPU does not call its backend again."""
    async with running(A) as runner:
        runner.apply(layout(A))
        await anyio.wait_all_tasks_blocked()
        runner.apply(layout(replace(A, numa_node=1), B))
        await anyio.wait_all_tasks_blocked()

        assert calls.lines == ["serve 0/10", "serve 1/10"]


async def test_other_options_wait_for_the_old_ones_end(calls: CallLog) -> None:
    """Two calls of `serve` never have one GPU at the same time."""
    async with running(A, B) as runner:
        calls.lines.clear()
        calls.slow = anyio.Event()
        runner.apply(layout(A, shares=5))
        await anyio.wait_all_tasks_blocked()

        assert calls.lines == []

        calls.slow.set()
        await anyio.wait_all_tasks_blocked()

        assert sorted(calls.lines[:2]) == ["end 0/10", "end 1/10"]
        assert calls.lines[2:] == ["serve 0/5"]


async def test_the_latest_layout_counts(calls: CallLog) -> None:
    """Layouts that are replaced while a backend ends are skipped."""
    async with running(A) as runner:
        calls.lines.clear()
        calls.slow = anyio.Event()
        runner.apply(layout(A, shares=5))
        await anyio.wait_all_tasks_blocked()
        runner.apply(layout(A, shares=7))
        calls.slow.set()
        await anyio.wait_all_tasks_blocked()

        assert calls.lines[0] == "end 0/10"
        assert calls.lines[-1] == "serve 0/7"


async def test_a_failed_backend_is_logged_and_called_again(calls: CallLog) -> None:
    """An error of a backend is logged, stops no other one, and is followed by another call."""
    calls.fails = 2

    with capture_module_logs(backend_runner) as logs:
        async with running(A, B, timing=RestartTiming(first_delay=0)):
            assert len(calls.lines) == 4  # whichever of them fails, or both
            assert {*calls.lines} == {"serve 0/10", "serve 1/10"}

    assert [line["event"] for line in logs] == ["backend failed"] * 2


async def test_a_backend_need_not_stay(calls: CallLog) -> None:
    """A backend that has nothing to undo returns, and is called again only for something new."""
    calls.returns = True

    async with running(A) as runner:
        runner.apply(layout(A))
        await anyio.wait_all_tasks_blocked()
        runner.apply(layout(A, shares=5))
        await anyio.wait_all_tasks_blocked()

        assert calls.lines == ["serve 0/10", "serve 0/5"]


async def test_a_backend_need_not_serve() -> None:
    """The default `serve` leaves a GPU as it is."""
    async with run_backends(pool()) as rig:
        assert rig.state().suspended == {}
        assert rig.state().cleanup.backends == frozenset()


def test_a_layout_assigns_backends_to_gpus() -> None:
    """A layout has the backends with their options for each GPU of a pool, for others none."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - name: a\n    gpus: {index: 0}\n    backends:\n"
        "      - {backend: fraction}\n      - {backend: timeslice, replicas: 2}\n"
    )
    applied = layout_of(A, B, text=text)

    assert [
        (assignment.gpu, assignment.options.backend, assignment.backend.name)
        for assignment in applied.backend_assignments
    ] == [
        (A, "fraction", "fraction"),
        (A, "timeslice", "timeslice"),
    ]
    assert isinstance(applied.backend_assignments[0], BackendAssignment)
    assert applied.backend_assignments[0].backend is applied.backends[METAGPU]


async def test_a_backend_knows_at_its_end_whether_another_daemon_waits(calls: CallLog) -> None:
    """A backend leaves its GPU as it is then."""
    async with running(A, B) as runner:
        runner._registry.apply(NodeWithdrawn(hands_over=True))
    assert calls.handed_over == [True, True]

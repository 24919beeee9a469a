"""The GpuContext: what a backend may report and do about its GPU."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from metagpu.core.availability.reasons import availability_of, count_free
from metagpu.core.contracts.backend import GpuContext
from metagpu.core.contracts.driver import ComputeMode
from metagpu.core.errors import DriverError
from metagpu.core.layout import backend_runner
from metagpu.core.layout.backend_runner import RESTARTS
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import ResourceName
from metagpu.core.runtime.tasks import RestartTiming
from metagpu.sim.machine.gpu import SimProcess
from tests.rigs.build import BACKENDS, METAGPU, ManagedFraction, pool
from tests.rigs.gpu_context import BackendRig, run_backends
from tests.rigs.logs import capture_module_logs

MIXED = pool().rstrip() + "\n      - {backend: timeslice, replicas: 4}\n"
TIMESLICE = MIXED.replace("- {backend: fraction, sharesPerGpu: 10}\n      ", "")


@dataclass
class ServeCalls:
    """The backend `fraction` with setup and cleanup, as a test wants them.

    Attributes:
        contexts: the context of each call of `serve`, in order.
        ended: the contexts of the calls that were cancelled.
        failure: raised by every serve that begins.
    """

    contexts: list[GpuContext] = field(default_factory=list)
    ended: list[GpuContext] = field(default_factory=list)
    failure: Exception | None = None
    returns: bool = False
    leaving: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, context: GpuContext) -> None:
        """Act as the test wants."""
        self.contexts.append(context)
        if self.failure is not None:
            raise self.failure
        if self.returns:
            return
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self.leaving.wait()
            self.ended.append(context)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> ServeCalls:
    """Record the calls of `serve`; give the backend `fraction` setup and cleanup."""
    serve_calls = ServeCalls()
    serve_calls.leaving.set()

    async def serve(_: ManagedFraction, context: GpuContext) -> None:
        await serve_calls.serve(context)

    monkeypatch.setattr(ManagedFraction, "serve", serve)
    monkeypatch.setattr(ManagedFraction, "needs_setup", True)
    monkeypatch.setattr(ManagedFraction, "needs_cleanup", True)
    monkeypatch.setitem(BACKENDS, "fraction", ManagedFraction)
    return serve_calls


@asynccontextmanager
async def dirty(
    calls: ServeCalls, text: str = MIXED, timing: RestartTiming = RESTARTS
) -> AsyncIterator[tuple[BackendRig, GpuContext]]:
    """Leave a GPU whose last lease has just ended to its backend, while the block lasts."""
    async with run_backends(text, gpu_models="t4:1", timing=timing) as rig:
        [context] = calls.contexts
        context.resume()
        part = rig.share("fraction")
        rig.claim(part)
        rig.release(part)
        yield rig, context


# --- readiness ------------------------------------------------------------------------------------


async def test_there_is_no_moment_before_it_is_ready(calls: ServeCalls) -> None:
    """A backend that needs setup is suspended by the same fact that offers its shares."""
    async with run_backends(MIXED.replace("sharesPerGpu: 10", "sharesPerGpu: 5")) as rig:
        for context in calls.contexts:
            context.resume()
        assert rig.state().suspended == {}

        with rig.registry.events.subscribe() as subscription:
            rig.apply(MIXED)
            assert list(rig.state().suspended) == ["fraction"]
            events = subscription.__aiter__()
            kinds = [type(await anext(events)).__name__ for _ in range(3)]
        assert kinds == ["BackendAttached", "BackendAttached", "SharesOffered"]


async def test_a_gpu_that_stays_as_it_is_stays_ready(calls: ServeCalls) -> None:
    """A layout that leaves a GPU and its options alone suspends no backend."""
    async with run_backends(MIXED) as rig:
        for context in calls.contexts:
            context.resume()
        rig.apply(MIXED.replace("replicas: 4", "replicas: 5"))
        await rig.settled()

        assert rig.state().suspended == {}
        assert len(calls.contexts) == 2


async def test_a_backend_reports_that_it_is_not_ready(calls: ServeCalls) -> None:
    """A backend may suspend and resume often; its own shares alone become Unhealthy."""
    async with run_backends(MIXED, gpu_models="t4:1") as rig:
        [context] = calls.contexts
        context.resume()
        assert availability_of(rig.state()).unlisted == frozenset()

        context.suspend("its daemon died")
        assert rig.state().suspended["fraction"].reason == "its daemon died"
        assert count_free(rig.state(), METAGPU) == 0
        assert {
            share.id
            for share in rig.state().shares
            if share.id in availability_of(rig.state()).unlisted
        } == {share.id for share in rig.state().shares if share.backend == "fraction"}


async def test_reports_of_a_replaced_serve_have_no_effect(calls: ServeCalls) -> None:
    """Reports of an old `serve` after a change of options have no effect on the new one."""
    async with run_backends(MIXED, gpu_models="t4:1") as rig:
        [old] = calls.contexts
        old.resume()
        calls.leaving = anyio.Event()
        rig.apply(MIXED.replace("sharesPerGpu: 10", "sharesPerGpu: 5"))
        await rig.settled()
        old.resume()

        assert list(rig.state().suspended) == ["fraction"]
        assert len(calls.contexts) == 1

        calls.leaving.set()
        await rig.settled()
        old.suspend("gone")
        [_, new] = calls.contexts
        new.resume()
        assert rig.state().suspended == {}
        old.suspend("gone")
        assert rig.state().suspended == {}
        assert not old.cleanup_done(0)


async def test_a_failure_suspends_until_it_is_fixed(calls: ServeCalls) -> None:
    """Shares of a failed backend are not on offer, and the status has the reason."""
    calls.failure = ZeroDivisionError("no daemon")

    with capture_module_logs(backend_runner):
        async with run_backends(MIXED, gpu_models="t4:1") as rig:
            reason = rig.state().suspended["fraction"].reason

    assert reason == "the backend failed (ZeroDivisionError: no daemon); next attempt in 1 s"


async def test_a_backend_with_setup_and_cleanup_may_not_return(calls: ServeCalls) -> None:
    """A backend with cleanup that returns is called again: no other one would clean the GPU."""
    calls.returns = True

    with capture_module_logs(backend_runner) as logs:
        async with run_backends(MIXED, gpu_models="t4:1") as rig:
            reason = rig.state().suspended["fraction"].reason

    assert reason == "the backend returned early; next attempt in 1 s"
    assert "backend returned early" in [line["event"] for line in logs]


# --- cleaning -------------------------------------------------------------------------------------


async def test_a_backend_learns_that_its_gpu_needs_cleanup(calls: ServeCalls) -> None:
    """A backend can wait for its last lease to end, and reports when its GPU is clean."""
    async with run_backends(MIXED, gpu_models="t4:1") as rig, anyio.create_task_group() as group:
        [context] = calls.contexts
        context.resume()
        part = rig.share("fraction")
        heard_at: list[float | None] = []

        async def wait() -> None:
            state = await context.wait_until(lambda state: "fraction" in state.cleanup.since)
            assert state is rig.state()
            heard_at.append(context.cleanup_due_since)

        group.start_soon(wait)
        rig.claim(part)
        assert context.leased
        await rig.settled()
        assert heard_at == []
        rig.release(part)
        await rig.settled()

        assert heard_at == [context.cleanup_due_since]
        assert count_free(rig.state(), ResourceName("nvidia.com/gpu.shared")) == 0
        assert context.cleanup_due_since is not None
        assert context.cleanup_done(context.cleanup_due_since)
        assert rig.state().owner is None
        assert not context.cleanup_done(heard_at[0] or 0)


async def test_a_removed_backend_cleans_its_gpu_first(calls: ServeCalls) -> None:
    """A backend that leaves the layout owns its GPU until the GPU is clean."""
    async with dirty(calls) as (rig, context):
        rig.apply(TIMESLICE)
        await rig.settled()
        assert calls.ended == []
        assert rig.state().owner == "fraction"
        assert availability_of(rig.state()).unlisted == {share.id for share in rig.state().shares}

        assert context.cleanup_due_since is not None
        context.cleanup_done(context.cleanup_due_since)
        await rig.settled()
        assert calls.ended == [context]
        assert rig.state().owner is None
        assert rig.state().cleanup.backends == frozenset()


async def test_a_removed_backend_waits_for_its_pods(calls: ServeCalls) -> None:
    """While pods hold its shares, a backend that left the layout still serves the GPU."""
    async with run_backends(MIXED, gpu_models="t4:1") as rig:
        [context] = calls.contexts
        context.resume()
        part = rig.share("fraction")
        rig.claim(part)
        rig.apply(TIMESLICE)
        await rig.settled()
        assert calls.ended == []

        rig.release(part)
        assert rig.state().owner == "fraction"
        context.cleanup_done(rig.state().cleanup.since["fraction"])
        await rig.settled()
        assert calls.ended == [context]


async def test_a_backend_that_comes_back_goes_on(calls: ServeCalls) -> None:
    """A layout that is taken back during a cleanup calls no backend again."""
    async with dirty(calls) as (rig, context):
        rig.apply(TIMESLICE)
        await rig.settled()
        rig.apply(MIXED)
        await rig.settled()
        assert context.cleanup_due_since is not None
        context.cleanup_done(context.cleanup_due_since)
        await rig.settled()

        assert calls.contexts == [context]
        assert calls.ended == []
        assert rig.state().owner is None
        assert rig.state().suspended == {}


async def test_other_options_take_a_dirty_gpu_over(calls: ServeCalls) -> None:
    """A `serve` that replaces another finds the GPU as it was left, and cleans it."""
    async with dirty(calls) as (rig, old):
        rig.apply(MIXED.replace("sharesPerGpu: 10", "sharesPerGpu: 5"))
        await rig.settled()
        [_, new] = calls.contexts
        assert calls.ended == [old]
        assert new.cleanup_due_since is not None
        assert new.cleanup_done(new.cleanup_due_since)


async def test_a_removed_backend_leaves_an_idle_gpu_at_once(calls: ServeCalls) -> None:
    """A backend has nothing to clean on a GPU that it did not own."""
    async with run_backends(MIXED, gpu_models="t4:1") as rig:
        rig.apply(TIMESLICE)
        await rig.settled()

        assert len(calls.ended) == 1
        assert rig.state().suspended == {}
        assert rig.state().cleanup.backends == frozenset()


async def test_a_removed_backend_that_fails_at_cleanup_releases_its_gpu(
    calls: ServeCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed cleanup of a removed backend does not keep the GPU for ever."""
    failing = anyio.Event()

    async def serve(_: ManagedFraction, context: GpuContext) -> None:
        calls.contexts.append(context)
        await failing.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(ManagedFraction, "serve", serve)
    with capture_module_logs(backend_runner):
        async with dirty(calls) as (rig, _):
            rig.apply(TIMESLICE)
            await rig.settled()
            assert rig.state().owner == "fraction"
            failing.set()
            await rig.settled()

            assert rig.state().owner is None
            assert availability_of(rig.state()).unlisted == frozenset()
            assert len(calls.contexts) == 1


async def test_a_backend_that_fails_at_cleanup_is_called_again(
    calls: ServeCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configured backend owns its GPU until its cleanup succeeds."""
    timing = RestartTiming(first_delay=0)
    failing = anyio.Event()

    async def serve(_: ManagedFraction, context: GpuContext) -> None:
        calls.contexts.append(context)
        if len(calls.contexts) > 1:
            await anyio.sleep_forever()
        await failing.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(ManagedFraction, "serve", serve)
    with capture_module_logs(backend_runner):
        async with dirty(calls, timing=timing) as (rig, _):
            failing.set()
            await rig.settled()

            assert rig.state().owner == "fraction"
            [_, again] = calls.contexts
            assert again.cleanup_due_since is not None
            again.cleanup_done(again.cleanup_due_since)
            assert rig.state().owner is None


# --- NVML -----------------------------------------------------------------------------------------


async def test_a_backend_reads_its_gpus_processes_and_mode(calls: ServeCalls) -> None:
    """A backend reads its GPU's processes, and reads and sets the compute mode."""
    async with run_backends(MIXED) as rig:
        context = next(
            gpu_context for gpu_context in calls.contexts if gpu_context.state.gpu.index == 1
        )
        rig.node.start_process(rig.node.gpu(1), SimProcess(11, 512 * MIB))

        assert [process.pid for process in await context.processes()] == [11]
        assert await context.compute_mode() is ComputeMode.DEFAULT
        await context.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        assert rig.node.gpu(1).compute_mode is ComputeMode.EXCLUSIVE_PROCESS
        assert rig.node.gpu(0).compute_mode is ComputeMode.DEFAULT

        rig.node.root = False
        with pytest.raises(DriverError, match="only root may"):
            await context.set_compute_mode(ComputeMode.DEFAULT)

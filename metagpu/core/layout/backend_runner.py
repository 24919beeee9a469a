"""The runner of `ManagesGpu.serve`, for each GPU and backend of the layout."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final, TypeVar

import anyio
import msgspec
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import LeavesOnNode, ManagesGpu
from metagpu.core.contracts.driver import ComputeMode, Driver, GpuProcess, MigDriver
from metagpu.core.contracts.host import HostProcesses
from metagpu.core.contracts.programs import Daemons, Programs
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import BackendAssignment, Layout
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import UNKNOWN_BACKEND, ProvisionedState
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.core.runtime.tasks import RestartTiming
from metagpu.core.state.facts import (
    BackendAttached,
    BackendDetached,
    BackendResumed,
    BackendSuspended,
    CleanupFinished,
    InstanceRecovered,
    ProvisioningReported,
)
from metagpu.core.state.registry import Registry

log = structlog.get_logger()

ValueT = TypeVar("ValueT")

RESTARTS: Final = RestartTiming(longest_delay=60.0, steady=60.0)
"""A backend that failed is called again after these; one that served longer is steady."""


class _Run(msgspec.Struct, eq=False):
    """One call of `ManagesGpu.serve`, running or ended.

    Attributes:
        dismissed: the call is to end, or has ended; its reports have no effect any more.
        draining: the layout has dropped the assignment, and a task waits until the backend does
            not own the GPU any more.
        left: the layout never had the assignment: an earlier daemon's pods may need it.
    """

    assignment: BackendAssignment
    scope: anyio.CancelScope = msgspec.field(default_factory=anyio.CancelScope)
    ended: anyio.Event = msgspec.field(default_factory=anyio.Event)
    dismissed: bool = False
    draining: bool = False
    left: bool = False

    @property
    def backend(self) -> str:
        return self.assignment.backend.name


class _RunContext(msgspec.Struct, frozen=True):
    """The `GpuContext` of a run."""

    programs: Programs
    daemons: Daemons
    _run: _Run
    _registry: Registry
    _driver: Driver
    _host: HostProcesses
    _clock: Callable[[], float]

    @property
    def gpu(self) -> Gpu:
        return self._run.assignment.gpu

    @property
    def backend(self) -> str:
        return self._run.backend

    @property
    def state(self) -> GpuState:
        return self._registry.snapshot.gpus[self.gpu.id]

    @property
    def leased(self) -> bool:
        return _may_be_held(self.state, self.backend)

    @property
    def cleanup_due_since(self) -> float | None:
        return self.state.cleanup.since.get(self.backend)

    @property
    def hands_over(self) -> bool:
        return self._registry.snapshot.hands_over

    async def wait_until(self, is_so: Callable[[GpuState], bool]) -> GpuState:
        return await _wait_until(self._registry, self.gpu, is_so)

    def suspend(self, reason: str, *, reset: bool = False) -> None:
        if not self._run.dismissed:
            fact = BackendSuspended(self.gpu.id, self.backend, reason, self._clock(), reset)
            if self._registry.apply(fact):
                log.warning("gpu suspended", gpu=str(self.gpu), backend=self.backend, reason=reason)

    def resume(self) -> None:
        if not self._run.dismissed:
            fact = BackendResumed(self.gpu.id, self.backend, self._clock())
            if self._registry.apply(fact):
                log.info("gpu ready", gpu=str(self.gpu), backend=self.backend)

    def cleanup_done(self, since: float) -> bool:
        if self._run.dismissed:
            return False
        fact = CleanupFinished(self.gpu.id, self.backend, since, self._clock())
        if done := self._registry.apply(fact):
            log.info("gpu cleaned up", gpu=str(self.gpu), backend=self.backend)
        return done

    @property
    def mig(self) -> MigDriver:
        return self._driver.mig

    def report(self, provisioned: ProvisionedState) -> None:
        if not self._run.dismissed:
            self._registry.apply(
                ProvisioningReported(self.gpu.id, self.backend, provisioned, self._clock())
            )

    def instance_removed(self, device: str) -> None:
        fact = InstanceRecovered(self.gpu.id, device, "it was removed", self._clock())
        if self._registry.apply(fact):
            log.info("faulty mig instance removed", gpu=str(self.gpu), device=device)

    async def processes(self) -> Sequence[GpuProcess]:
        return await self._driver.processes(self.gpu.id)

    async def stopping_processes(self) -> Collection[int]:
        pods = await _first(self._registry, lambda snapshot: snapshot.pods.stopping or None)
        pids = {process.pid for process in await self.processes()}
        found = (await self._host.identify(pids)).values()
        return [who.pid for who in found if who.container and who.container.pod_uid in pods]

    async def compute_mode(self) -> ComputeMode | None:
        return await self._driver.compute_mode(self.gpu.id)

    async def set_compute_mode(self, mode: ComputeMode) -> None:
        await self._driver.set_compute_mode(self.gpu.id, mode)


class BackendRunner:
    """Attaches backends to their GPUs as the layout has them, and runs `serve`."""

    def __init__(
        self,
        registry: Registry,
        driver: Driver,
        programs: Programs,
        daemons: Daemons,
        host: HostProcesses,
        *,
        clock: Callable[[], float] = time.time,
        timing: RestartTiming = RESTARTS,
    ) -> None:
        self._registry = registry
        self._driver = driver
        self._programs = programs
        self._daemons = daemons
        self._host = host
        self._clock = clock
        self._timing = timing
        self._assignments: tuple[BackendAssignment, ...] = ()
        self._left: Sequence[BackendAssignment] = ()
        self._runs: list[_Run] = []
        self._changed = anyio.Event()

    def apply(self, layout: Layout) -> None:
        """Put a layout in force and on offer; return at once.

        A backend that sets a GPU up first is suspended before its shares are on offer.
        """
        self._assignments = layout.backend_assignments

        for run in self._runs:
            run.dismissed |= not self._continues(run)
        for assignment in layout.backend_assignments:
            present = (begun for begun in self._runs if not begun.dismissed)
            if not any(_same(begun.assignment, assignment) for begun in present):
                self._attach(assignment)

        self._registry.apply(layout.offer_fact)
        self._changed.set()

    def adopt(self, left: Sequence[BackendAssignment]) -> None:
        """Serve what an earlier daemon left on GPUs whose layout lacks the backend."""
        self._left = left

    async def run(self) -> None:
        """Follow the layout until cancelled; each `serve` has ended at the return."""
        self._runs.clear()  # those of an earlier run, which a fault ended
        async with anyio.create_task_group() as group:
            while True:
                self._changed = anyio.Event()
                await self._follow_layout(group)
                await self._changed.wait()

    def _attach(self, assignment: BackendAssignment) -> None:
        backend = assignment.backend
        fact = BackendAttached(
            assignment.gpu.id,
            backend.name,
            _needs_setup(backend),
            _needs_cleanup(backend),
            self._clock(),
        )
        self._registry.apply(fact)

    def _in_force(self, run: _Run) -> bool:
        return not run.left and any(_same(run.assignment, each) for each in self._assignments)

    def _has_successor(self, run: _Run) -> bool:
        """Return whether the layout has this backend on this GPU, with any options."""
        key = run.assignment.gpu.id, run.backend
        return any(
            (assignment.gpu.id, assignment.backend.name) == key for assignment in self._assignments
        )

    def _continues(self, run: _Run) -> bool:
        """Return whether a run goes on: it is in force, or its GPU needs cleanup."""
        if self._in_force(run):
            return True
        if run.left:
            return not self._has_successor(run)
        if not _needs_cleanup(run.assignment.backend):
            return False
        state = self._registry.snapshot.gpus[run.assignment.gpu.id]
        return state.used_by(run.backend) and not self._has_successor(run)

    async def _follow_layout(self, group: TaskGroup) -> None:
        while leaving := [begun for begun in self._runs if begun.dismissed]:
            for run in leaving:
                run.scope.cancel()
            for run in leaving:
                await run.ended.wait()  # two runs must not change one GPU
                self._runs.remove(run)
                if not self._has_successor(run):
                    gone = BackendDetached(run.assignment.gpu.id, run.backend, self._clock())
                    self._registry.apply(gone)

        present = [begun.assignment for begun in self._runs]
        new = [
            _Run(assignment)
            for assignment in self._assignments
            if not any(_same(assignment, begun) for begun in present)
        ]
        left = [_Run(assignment, left=True) for assignment in self._left]
        new += [run for run in left if not self._has_successor(run)]
        self._left = ()
        self._runs += new
        for run in new:
            group.start_soon(self._serve, run)

        for run in self._runs:
            if not run.draining and not self._in_force(run):
                run.draining = True
                group.start_soon(self._drain, run)

    async def _drain(self, run: _Run) -> None:
        """Dismiss a run once its backend owns the GPU no more, unless in force again."""

        def is_free(state: GpuState) -> bool:
            held = run.left and _may_be_held(state, run.backend)
            return not (held or state.used_by(run.backend))

        await _wait_until(self._registry, run.assignment.gpu, is_free)

        run.draining = False
        if not self._in_force(run):
            self._dismiss(run)

    def _dismiss(self, run: _Run) -> None:
        run.dismissed = True
        self._changed.set()

    async def _serve(self, run: _Run) -> None:
        own = self._registry, self._driver, self._host, self._clock
        context = _RunContext(self._programs, self._daemons, run, *own)
        backend, timing = run.assignment.backend, self._timing
        backoff = Backoff(timing.first_delay, timing.longest_delay)

        try:
            with run.scope:
                while True:
                    started = anyio.current_time()
                    failure = await _serve_once(backend, context)
                    if failure is None:
                        return
                    if not self._in_force(run):
                        self._dismiss(run)  # no backend will clean the GPU: others may have it
                        return

                    if anyio.current_time() - started > timing.steady:
                        backoff.reset()
                    delay = backoff.next()
                    if _needs_setup(backend):
                        context.suspend(f"{failure}; next attempt in {delay:g} s")
                    await anyio.sleep(delay)
        finally:
            run.ended.set()


async def _serve_once(backend: Backend, context: _RunContext) -> str | None:
    """Call `serve`; return the failure, or `None` if the backend has no more to do."""
    if not isinstance(backend, ManagesGpu):
        return None
    try:
        await backend.serve(context)
    except Exception as error:
        log.exception("backend failed", gpu=str(context.gpu), backend=backend.name)
        return f"the backend failed ({type(error).__name__}: {error})"

    if not (backend.needs_setup or backend.needs_cleanup):
        return None
    log.error("backend returned early", gpu=str(context.gpu), backend=backend.name)
    return "the backend returned early"


async def find_left(
    backends: Mapping[str, type[Backend]], gpus: Iterable[Gpu], run_dir: str, daemons: Daemons
) -> list[BackendAssignment]:
    """Find the GPUs that pods of an earlier daemon may still need a backend for.

    The folder of a backend has its name. Without it, the backend need not be loaded.
    """
    injection, found = Injection(run_dir=run_dir), list[BackendAssignment]()
    for name in backends:
        if not await to_thread.run_sync(Path(run_dir, name).is_dir):
            continue
        if issubclass(kind := backends[name], LeavesOnNode):
            options = kind.options_type(backend=name)
            for gpu in gpus:
                if await kind.is_left_on(gpu, run_dir, daemons):
                    backend = kind.configured(options, injection)
                    found.append(BackendAssignment(gpu, options, backend))
    return found


def _may_be_held(state: GpuState, backend: str) -> bool:
    """Return whether a container holds, or may hold, a share of a backend."""
    held = {lease.share.backend for lease in state.leases.values()}
    return bool(state.kubelet.unknown_leases) or not held.isdisjoint((backend, UNKNOWN_BACKEND))


def _needs_setup(backend: Backend) -> bool:
    return isinstance(backend, ManagesGpu) and backend.needs_setup


def _needs_cleanup(backend: Backend) -> bool:
    return isinstance(backend, ManagesGpu) and backend.needs_cleanup


async def _wait_until(registry: Registry, gpu: Gpu, is_so: Callable[[GpuState], bool]) -> GpuState:
    def view(snapshot: Snapshot) -> GpuState | None:
        state = snapshot.gpus[gpu.id]
        return state if is_so(state) else None

    return await _first(registry, view)


async def _first(registry: Registry, view: Callable[[Snapshot], ValueT | None]) -> ValueT:
    """Wait until a view of the registry has a value."""
    async with aclosing(registry.watch(view)) as values:
        async for value in values:
            if value is not None:
                return value
    raise AssertionError("a registry is watched for ever")


def _same(one: BackendAssignment, other: BackendAssignment) -> bool:
    return one.gpu.id == other.gpu.id and one.options == other.options

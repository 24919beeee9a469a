"""Lets backends keep their GPUs as they need them, for as long as the layout says so."""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from metagpu.core.backend import Backend
from metagpu.core.companions import Companions
from metagpu.core.driver import ComputeMode, Driver, GpuProcess, MigDriver
from metagpu.core.facts import (
    BackendResumed,
    BackendSuspended,
    GpuKept,
    GpuLeft,
    GpuReturned,
    InstanceRecovered,
    StockTold,
)
from metagpu.core.gpu import Gpu
from metagpu.core.layout import Cut, Layout
from metagpu.core.model import Stock
from metagpu.core.registry import Registry
from metagpu.core.snapshot import GpuState, Snapshot
from metagpu.core.tools import Tools

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds before a backend that failed is called again: the first time, doubled up to the last."""

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Kept:
    """A `Backend.serve` that was begun, be it over or not.

    Attributes:
        dismissed: it is to end, or has ended; what it says is not heard any more.
        drained: its cut is gone, and somebody waits for the GPU not to be its own any more.
    """

    cut: Cut
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    dismissed: bool = False
    drained: bool = False

    @property
    def backend(self) -> str:
        return self.cut.backend.name


class _Served(msgspec.Struct, frozen=True):
    """The `core.served.ServedGpu` of a serve."""

    tools: Tools
    companions: Companions
    _kept: _Kept
    _registry: Registry
    _driver: Driver
    _clock: Callable[[], float]

    @property
    def gpu(self) -> Gpu:
        return self._kept.cut.gpu

    @property
    def backend(self) -> str:
        return self._kept.backend

    @property
    def state(self) -> GpuState:
        return self._registry.snapshot.gpus[self.gpu.id]

    @property
    def leased(self) -> bool:
        return any(i.share.backend == self.backend for i in self.state.leases.values())

    @property
    def since_last_lease(self) -> float | None:
        return self.state.cleaning.get(self.backend)

    async def until(self, is_so: Callable[[GpuState], bool]) -> GpuState:
        return await _until(self._registry, self.gpu, is_so)

    def suspend(self, reason: str, *, reset: bool = False) -> None:
        if not self._kept.dismissed:
            fact = BackendSuspended(self.gpu.id, self.backend, reason, self._clock(), reset)
            if self._registry.apply(fact):
                log.warning("GPU suspended", gpu=str(self.gpu), backend=self.backend, reason=reason)

    def resume(self) -> None:
        if not self._kept.dismissed:
            fact = BackendResumed(self.gpu.id, self.backend, self._clock())
            if self._registry.apply(fact):
                log.info("GPU ready", gpu=str(self.gpu), backend=self.backend)

    def returned(self, since: float) -> bool:
        if self._kept.dismissed:
            return False
        fact = GpuReturned(self.gpu.id, self.backend, since, self._clock())
        if done := self._registry.apply(fact):
            log.info("GPU cleaned", gpu=str(self.gpu), backend=self.backend)
        return done

    @property
    def mig(self) -> MigDriver:
        return self._driver.mig

    def tell(self, stock: Stock) -> None:
        if not self._kept.dismissed:
            self._registry.apply(StockTold(self.gpu.id, self.backend, stock, self._clock()))

    def removed(self, device: str) -> None:
        fact = InstanceRecovered(self.gpu.id, device, "it was removed", self._clock())
        if self._registry.apply(fact):
            log.info("MIG instance with a fault removed", gpu=str(self.gpu), device=device)

    async def processes(self) -> Sequence[GpuProcess]:
        return await self._driver.processes(self.gpu.id)

    async def compute_mode(self) -> ComputeMode | None:
        return await self._driver.compute_mode(self.gpu.id)

    async def set_compute_mode(self, mode: ComputeMode) -> None:
        await self._driver.set_compute_mode(self.gpu.id, mode)


class Keeper:
    """Runs `Backend.serve` for every GPU and backend of the layout that is in force."""

    def __init__(
        self,
        registry: Registry,
        driver: Driver,
        tools: Tools,
        companions: Companions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._driver = driver
        self._tools = tools
        self._companions = companions
        self._clock = clock
        self._cuts: tuple[Cut, ...] = ()
        self._kept: list[_Kept] = []
        self._changed = anyio.Event()

    def keep(self, layout: Layout) -> None:
        """Let this layout be in force, and on offer; returns at once.

        What a backend has to make ready first is suspended before it is on offer.
        """
        self._cuts = layout.cuts

        for it in self._kept:
            it.dismissed |= not self._stays(it)
        for cut in layout.cuts:
            if not any(_same(it.cut, cut) for it in self._kept if not it.dismissed):
                kind, now = type(cut.backend), self._clock()
                fact = GpuKept(cut.gpu.id, kind.name, kind.readies, kind.cleans, now)
                self._registry.apply(fact)

        self._registry.apply(layout.offered)
        self._changed.set()

    async def run(self) -> None:
        """Follow the layout until cancelled; what was begun has ended when this returns."""
        async with anyio.create_task_group() as group:
            while True:
                self._changed = anyio.Event()
                await self._follow(group)
                await self._changed.wait()

    def _in_force(self, it: _Kept) -> bool:
        return any(_same(it.cut, cut) for cut in self._cuts)

    def _followed(self, it: _Kept) -> bool:
        """Tell whether the layout has the same backend on the same GPU, be it otherwise."""
        key = it.cut.gpu.id, it.backend
        return any((cut.gpu.id, cut.backend.name) == key for cut in self._cuts)

    def _stays(self, it: _Kept) -> bool:
        """Tell whether a serve goes on: its cut is in force, or it has a GPU that it must clean."""
        if self._in_force(it):
            return True
        state = self._registry.snapshot.gpus[it.cut.gpu.id]
        return it.cut.backend.cleans and state.used_by(it.backend) and not self._followed(it)

    async def _follow(self, group: TaskGroup) -> None:
        while leaving := [it for it in self._kept if it.dismissed]:
            for it in leaving:
                it.scope.cancel()
            for it in leaving:
                await it.ended.wait()  # two of them would pull at one GPU
                self._kept.remove(it)
                if not self._followed(it):
                    gone = GpuLeft(it.cut.gpu.id, it.backend, self._clock())
                    self._registry.apply(gone)

        for it in self._kept:
            if not it.drained and not self._in_force(it):
                it.drained = True
                group.start_soon(self._drain, it)

        held = [it.cut for it in self._kept]
        new = [_Kept(cut) for cut in self._cuts if not any(_same(cut, other) for other in held)]
        self._kept += new
        for it in new:
            group.start_soon(self._serve, it)

    async def _drain(self, it: _Kept) -> None:
        """End a serve whose cut is gone once the GPU is not its own, unless the cut comes back."""
        await _until(self._registry, it.cut.gpu, lambda state: not state.used_by(it.backend))

        it.drained = False
        if not self._in_force(it):
            self._dismiss(it)

    def _dismiss(self, it: _Kept) -> None:
        it.dismissed = True
        self._changed.set()

    async def _serve(self, it: _Kept) -> None:
        served = _Served(
            self._tools, self._companions, it, self._registry, self._driver, self._clock
        )
        backend, pause = it.cut.backend, FIRST_PAUSE

        try:
            with it.scope:
                while True:
                    begun = anyio.current_time()
                    failure = await _failure(backend, served)
                    if failure is None:
                        return
                    if not self._in_force(it):
                        self._dismiss(it)  # nobody else will clean the GPU: others may have it
                        return

                    lasted = anyio.current_time() - begun
                    pause = FIRST_PAUSE if lasted > LONGEST_PAUSE else pause
                    if backend.readies:
                        served.suspend(f"{failure}; it is tried again in {pause:g} s")
                    await anyio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            it.ended.set()


async def _failure(backend: Backend, served: _Served) -> str | None:
    """Let a backend keep its GPU; say what went wrong if it ends before its time."""
    try:
        await backend.serve(served)
    except Exception as error:
        log.exception("a backend failed to keep its GPU", gpu=str(served.gpu), backend=backend.name)
        return f"it failed ({type(error).__name__}: {error})"

    if not (backend.readies or backend.cleans):
        return None
    log.error("a backend left its GPU alone", gpu=str(served.gpu), backend=backend.name)
    return "it left the GPU alone"


async def _until(registry: Registry, gpu: Gpu, is_so: Callable[[GpuState], bool]) -> GpuState:
    def view(now: Snapshot) -> GpuState | None:
        state = now.gpus[gpu.id]
        return state if is_so(state) else None

    async with aclosing(registry.watch(view)) as states:
        async for state in states:
            if state is not None:
                return state
    raise AssertionError("a registry is watched for ever")


def _same(one: Cut, other: Cut) -> bool:
    return one.gpu.id == other.gpu.id and one.options == other.options

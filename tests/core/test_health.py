"""The health watch on a driver that is told what to answer: what is told, and how often."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import cast

import anyio
import pytest

from metagpu.core import fault_news, health
from metagpu.core.config import Health
from metagpu.core.driver import (
    ComputeMode,
    Condition,
    DriverEvent,
    EccError,
    GpuProcess,
    MigDriver,
    RecoveryAction,
    RecoveryActionChanged,
    RemappedRows,
    Survey,
    Xid,
)
from metagpu.core.errors import DriverTimeout, DriverUnavailable, GpuLost, MetagpuError
from metagpu.core.facts import GpuRecovered, StockTold
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.health import HealthWatch
from metagpu.core.model import Fault, Made, ShareId, Stock
from metagpu.core.news import MemoryErrorHeard, XidHeard
from metagpu.core.registry import Registry
from metagpu.core.xid import Severity
from tests.build import gpu
from tests.heard import heard

Answer = Sequence[DriverEvent] | DriverTimeout


@dataclass
class Told:
    """A driver of one GPU that gives these events, then none; `asked` is set at their end.

    `found` is what a check finds, nothing wrong if `None`; `gpus` what NVML lists.
    """

    answers: list[Answer] = field(default_factory=list)
    during_check: Callable[[], Awaitable[None]] | None = None
    asked: anyio.Event = field(default_factory=anyio.Event)
    found: Condition | GpuLost | None = None
    gpus: tuple[Gpu, ...] = (gpu(0),)
    mig: MigDriver = field(init=False)

    @property
    def overdue(self) -> Sequence[str]:
        """Nothing hangs."""
        return ()

    def session(self) -> AbstractAsyncContextManager[None]:
        """Open nothing."""
        return nullcontext()

    async def survey(self) -> Survey:
        """Find the one GPU."""
        return Survey(self.gpus)

    async def condition(self, gpu: GpuId) -> Condition:  # noqa: ARG002
        """Find nothing wrong, or what a test wants."""
        if self.during_check is not None:
            await self.during_check()
        if isinstance(self.found, GpuLost):
            raise self.found
        if self.found is not None:
            return self.found
        return Condition(memory_used=0, recovery_action=RecoveryAction.NONE)

    async def processes(self, gpu: GpuId) -> Sequence[GpuProcess]:  # noqa: ARG002
        """Find none."""
        return ()

    async def utilisation(self, gpu: GpuId) -> Mapping[int, int] | None:  # noqa: ARG002
        """Say nothing."""
        return None

    async def limit_memory(self, gpu: GpuId, cgroup: str, limit: int | None) -> None:
        """Limit nothing."""

    async def memory_limit(self, gpu: GpuId, cgroup: str) -> int | None:  # noqa: ARG002
        """Say that nothing is limited."""
        return None

    async def compute_mode(self, gpu: GpuId) -> ComputeMode | None:  # noqa: ARG002
        """Say that anyone may."""
        return ComputeMode.DEFAULT

    async def set_compute_mode(self, gpu: GpuId, mode: ComputeMode) -> None:
        """Set nothing."""

    async def events(self) -> Sequence[DriverEvent]:
        """Give the next answer."""
        if not self.answers:
            self.asked.set()
            await anyio.sleep_forever()
        answer = self.answers.pop(0)
        if isinstance(answer, DriverTimeout):
            raise answer
        return answer


class Mute:
    """An NVML that says nothing of MIG."""

    async def mode(self, gpu: GpuId) -> None:
        """Hang."""
        raise DriverTimeout(f"GPU {gpu} hangs")


async def news(*answers: Answer, log_of: ModuleType = health) -> list[dict[str, object]]:
    """Let a watch hear all this; give what a module logged of it."""
    driver = Told(list(answers))
    watch = HealthWatch(driver, Registry())

    with heard(log_of) as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(watch.run)
            with anyio.fail_after(30):
                await driver.asked.wait()
            group.cancel_scope.cancel()
    return [dict(entry) for entry in logs]


async def test_a_lack_of_events_is_told_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVML that goes on failing costs one line; once it worked, the next failure is news."""
    monkeypatch.setattr(health, "BACK_OFF", 0.0)
    hangs, other = DriverTimeout("hangs"), DriverTimeout("other")

    logs = await news(hangs, hangs, other, hangs, [], hangs)

    assert [entry["error"] for entry in logs] == ["hangs", "other", "hangs"]


async def test_what_is_said_twice_at_once_is_told_once() -> None:
    """NVML may tell the same in several ways; another time it is news again."""
    changed = RecoveryActionChanged(gpu(0).id)
    logs = await news([changed, Xid(gpu(0).id, 154), changed], [changed], log_of=fault_news)

    assert [entry["news"] for entry in logs] == [
        "the recovery action changed",
        "XID 154: GPU recovery action changed",
        "the recovery action changed",
    ]


async def test_a_device_that_nvml_cannot_find_is_the_gpu() -> None:
    """A contained fault of nobody knows which instance takes all of the GPU out."""
    driver = Told([[Xid(gpu(0).id, 94, 3, 0)]])
    driver.mig = cast("MigDriver", Mute())
    watch = HealthWatch(driver, Registry(), Health(xids={94: Severity.FATAL}))

    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        with anyio.fail_after(30):
            async for state in watch.registry.watch(lambda now: now.gpus.get(gpu(0).id)):
                if state is not None and not state.verdict.healthy:
                    break
        group.cancel_scope.cancel()
    assert state is not None
    assert state.verdict.reason == "XID 94: contained memory error"
    assert not state.faults


async def test_a_fault_is_not_forgotten_with_an_nvml_that_goes() -> None:
    """While it is asked which device it was, NVML may go as a whole: then it was the GPU."""

    class Gone(Mute):
        async def mode(self, gpu: GpuId) -> None:  # noqa: ARG002
            raise DriverUnavailable("NVML is gone")

    driver = Told()
    driver.mig = cast("MigDriver", Gone())
    watch = HealthWatch(driver, Registry(), Health(xids={94: Severity.FATAL}))
    await watch.survey()
    [due] = watch._hear(Xid(gpu(0).id, 94, 3, 0))
    with pytest.raises(DriverUnavailable):
        await watch._check(due)
    assert watch.registry.snapshot.gpus[due].verdict.fault is Fault.XID


async def test_a_new_fault_of_a_device_during_its_acknowledgement_is_kept() -> None:
    """An operator's word about a MIG device is about the faults before it too."""
    driver = Told()
    watch = HealthWatch(driver, Registry(), Health(xids={94: Severity.FATAL}))
    await watch.survey()
    made = Stock({ShareId(f"{gpu(0).id}::2g.10gb@0"): Made("MIG-x", 3, 0)})
    watch.registry.apply(StockTold(gpu(0).id, "mig", made, at=0))
    watch._hear(Xid(gpu(0).id, 94, 3, 0))

    async def fault() -> None:
        watch._hear(Xid(gpu(0).id, 94, 3, 0))

    driver.during_check = fault
    with pytest.raises(MetagpuError, match="had a new fault during its check"):
        await watch.acknowledge(gpu(0).id, "MIG-x")
    assert watch.registry.snapshot.gpus[gpu(0).id].faults

    driver.during_check = None
    await watch.acknowledge(gpu(0).id, "MIG-x")
    assert not watch.registry.snapshot.gpus[gpu(0).id].faults


async def test_a_fault_during_an_acknowledgement_is_kept() -> None:
    """An operator's word is about the faults before it: a new one keeps the GPU out."""
    driver = Told()
    watch = HealthWatch(driver, Registry())
    await watch.survey()
    watch._hear(Xid(gpu(0).id, 79))

    async def fault() -> None:
        watch._hear(Xid(gpu(0).id, 95))

    driver.during_check = fault
    with pytest.raises(MetagpuError, match="had a new fault during its check"):
        await watch.acknowledge(gpu(0).id)
    assert not watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy

    driver.during_check = None
    await watch.acknowledge(gpu(0).id)
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy


@pytest.mark.parametrize("every", [True, False], ids=["all GPUs", "one GPU"])
async def test_what_was_read_before_an_acknowledgement_takes_nothing_out(*, every: bool) -> None:
    """A look that began before a GPU was mended ends after its return, and changes nothing."""
    driver = Told(found=GpuLost("gone"))
    watch = HealthWatch(driver, Registry())
    await watch.survey()

    async def mend() -> None:
        driver.during_check, driver.found = None, None
        await watch.acknowledge(gpu(0).id)
        driver.found = GpuLost("gone")  # as it was read before

    driver.during_check = mend
    await (watch.survey() if every else watch._check(gpu(0).id))
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy

    await watch.survey()
    assert not watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy


@pytest.mark.parametrize(
    ("event", "fault"),
    [(Xid(gpu(0).id, 79), Fault.XID), (EccError(gpu(0).id, double_bit=True), Fault.MEMORY)],
)
async def test_a_fault_has_its_kind(event: DriverEvent, fault: Fault) -> None:
    """What is heard says which; the first stands while the GPU is out."""
    watch = HealthWatch(Told(), Registry())
    await watch.survey()
    watch._hear(event)
    watch._hear(Xid(gpu(0).id, 95))

    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.fault is fault


@pytest.mark.parametrize(
    ("condition", "fault"),
    [
        (Condition(0, RecoveryAction.GPU_RESET), Fault.RECOVERY_ACTION),
        (Condition(0, remapped_rows=RemappedRows(0, 0, pending=False, failed=True)), Fault.MEMORY),
        (GpuLost("gone"), Fault.NO_ANSWER),
    ],
)
async def test_what_a_check_finds_has_its_kind(
    condition: Condition | GpuLost, fault: Fault
) -> None:
    """As NVML says it, or does not answer."""
    driver = Told(found=condition)
    watch = HealthWatch(driver, Registry())
    await watch.survey()
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.fault is fault

    driver.found, driver.gpus = None, ()
    watch.registry.apply(GpuRecovered(gpu(0).id, "mended", at=1))
    await watch.survey()
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.fault is Fault.NOT_LISTED


async def test_what_nvml_tells_is_news() -> None:
    """Each XID and memory error, be it fatal or not, and also where the GPU is not known."""
    watch = HealthWatch(Told(), Registry(), clock=lambda: 7.0)
    events: list[DriverEvent] = [
        Xid(gpu(0).id, 31),
        Xid(None, 79),
        EccError(gpu(0).id, double_bit=False),
        RecoveryActionChanged(gpu(0).id),
    ]

    with watch.registry.news.subscribe() as news:
        for event in events:
            watch._hear(event)
        told = list(news._waiting)
    assert told == [
        XidHeard(gpu(0).id, 31, at=7.0),
        XidHeard(None, 79, at=7.0),
        MemoryErrorHeard(gpu(0).id, corrected=True, at=7.0),
    ]

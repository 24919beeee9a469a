"""The health watch on a driver with given answers: its log events and bus events."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import cast

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.config.config import HealthConfig
from metagpu.core.config.units import Duration
from metagpu.core.contracts.driver import (
    DriverEvent,
    EccError,
    GpuCondition,
    MigDriver,
    RecoveryAction,
    RecoveryActionChanged,
    RemappedRows,
    Survey,
    UnreadableGpu,
    Xid,
)
from metagpu.core.errors import (
    DriverReplaced,
    DriverTimeout,
    DriverUnavailable,
    GpuLost,
    MetagpuError,
)
from metagpu.core.health import verdicts as fault_news
from metagpu.core.health import watch as health
from metagpu.core.health.verdicts import FaultNote, NotedFault
from metagpu.core.health.watch import HealthTiming, HealthWatch
from metagpu.core.model.gpu import Connection, Gpu, GpuId
from metagpu.core.model.mig import ComputeInstance, MigInstance, MigMode, Placement
from metagpu.core.model.shares import (
    Fault,
    HardwareDevice,
    ProvisionedState,
    Recovery,
    ShareId,
)
from metagpu.core.model.snapshot import Versions
from metagpu.core.model.xid_severity import Severity
from metagpu.core.state.events import MemoryErrorReported, XidReported
from metagpu.core.state.facts import GpuRecovered, InstanceFaulted, ProvisioningReported
from metagpu.core.state.registry import Registry
from tests.rigs.build import gpu, topology
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip

Answer = Sequence[DriverEvent] | DriverTimeout | DriverUnavailable


@dataclass
class ScriptedDriver:
    """A driver of one GPU that returns these events, then none; `asked` is set at their end.

    `found` is what a check finds, nothing wrong if `None`; `gpus` what NVML lists. `closed` is why
    NVML cannot be opened.
    """

    answers: list[Answer] = field(default_factory=list)
    during_check: Callable[[], Awaitable[None]] | None = None
    asked: anyio.Event = field(default_factory=anyio.Event)
    found: GpuCondition | GpuLost | None = None
    gpus: tuple[Gpu, ...] = (gpu(0),)
    rest: Survey = field(default_factory=lambda: Survey(()))
    unheard: Mapping[GpuId, str] = field(default_factory=dict)
    renewed: anyio.Event = field(default_factory=anyio.Event)
    closed: Callable[[], DriverUnavailable | None] = lambda: None
    mig: MigDriver = field(init=False)

    def session(self) -> AbstractAsyncContextManager[None]:
        """Open NVML, if the test has it open."""
        if (error := self.closed()) is not None:
            raise error
        return nullcontext()

    async def survey(self) -> Survey:
        """Return the GPUs and the rest of the survey."""
        return replace(self.rest, gpus=self.gpus)

    async def condition(self, gpu: GpuId) -> GpuCondition:  # noqa: ARG002
        """Return the condition of the test."""
        if self.during_check is not None:
            await self.during_check()
        if isinstance(self.found, GpuLost):
            raise self.found
        if self.found is not None:
            return self.found
        return GpuCondition(memory_used=0, recovery_action=RecoveryAction.NONE)

    async def renew_events(self) -> None:
        """Set `renewed`."""
        self.renewed.set()

    async def events(self) -> Sequence[DriverEvent]:
        """Return the next answer."""
        if not self.answers:
            self.asked.set()
            await anyio.sleep_forever()
        answer = self.answers.pop(0)
        if isinstance(answer, DriverTimeout | DriverUnavailable):
            raise answer
        return answer


class HangingMigDriver:
    """A MIG driver whose calls hang."""

    async def mode(self, gpu: GpuId) -> None:
        """Hang."""
        raise DriverTimeout(f"GPU {gpu} hangs")


@asynccontextmanager
async def running(watch: HealthWatch) -> AsyncIterator[None]:
    """Run a watch during a block."""
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        with anyio.fail_after(30):
            yield
        group.cancel_scope.cancel()


async def logged_events(*answers: Answer, log_of: ModuleType = health) -> list[dict[str, object]]:
    """Run a watch over these answers; return the log events of a module."""
    driver = ScriptedDriver(list(answers))
    timing = HealthTiming(event_retry=0.0)
    watch = HealthWatch(driver, Registry(), timing=timing)

    with capture_module_logs(log_of) as logs:
        async with running(watch):
            await driver.asked.wait()
    return [dict(entry) for entry in logs]


async def test_a_lack_of_events_is_logged_once_for_each_reason() -> None:
    """A failure of NVML is logged once; after a success the next failure is logged again."""
    hangs, other = DriverTimeout("hangs"), DriverTimeout("other")

    logs = await logged_events(hangs, hangs, other, hangs, [], hangs)

    assert [entry["error"] for entry in logs] == ["hangs", "other", "hangs"]


async def test_a_duplicate_event_is_reported_once() -> None:
    """A duplicate of an NVML event is reported once; a later event is reported again."""
    changed = RecoveryActionChanged(gpu(0).id)
    logs = await logged_events(
        [changed, Xid(gpu(0).id, 154), changed], [changed], log_of=fault_news
    )

    assert [entry["description"] for entry in logs] == [
        "the recovery action changed",
        "XID 154: GPU recovery action changed",
        "the recovery action changed",
    ]


async def test_a_device_that_nvml_cannot_find_is_the_gpu() -> None:
    """A contained fault of an unknown instance takes the whole GPU out of service."""
    driver = ScriptedDriver([[Xid(gpu(0).id, 94, 3, 0)]], gpus=(replace(gpu(0), mig_enabled=True),))
    driver.mig = cast("MigDriver", HangingMigDriver())
    watch = HealthWatch(driver, Registry(), lambda: HealthConfig(xids={94: Severity.FATAL}))

    async with running(watch):
        async for state in watch.registry.watch(lambda now: now.gpus.get(gpu(0).id)):
            if state is not None and not state.verdict.healthy:
                break
    assert state is not None
    assert state.verdict.reason == "XID 94: contained memory error"
    assert not state.mig_faults


@pytest.mark.parametrize(
    ("compute_instance", "mode", "faulty"),
    [
        (None, MigMode(enabled=True, pending=True), {"MIG-a", "MIG-b"}),
        (1, MigMode(enabled=True, pending=True), {"MIG-b"}),
        (2, MigMode(enabled=True, pending=True), set()),  # NVML reports no uuid
        (1, MigMode(enabled=False, pending=True), None),
        (1, None, None),
    ],
)
async def test_a_device_that_no_backend_has_reported_is_found(
    compute_instance: int | None, mode: MigMode | None, faulty: set[str] | None
) -> None:
    """A contained fault takes the devices of its instance out, and the GPU where it has none."""

    class Divided:
        async def mode(self, gpu: GpuId) -> MigMode | None:  # noqa: ARG002
            return mode

        async def instances(self, gpu: GpuId) -> tuple[MigInstance, ...]:  # noqa: ARG002
            computes = ComputeInstance(0, "MIG-a"), ComputeInstance(1, "MIG-b"), ComputeInstance(2)
            other = MigInstance(4, 19, Placement(4, 1), (ComputeInstance(1, "MIG-c"),))
            return MigInstance(3, 19, Placement(0, 1), computes), other

    driver, one = ScriptedDriver(gpus=(replace(gpu(0), mig_enabled=True),)), gpu(0).id
    driver.mig = cast("MigDriver", Divided())
    watch = HealthWatch(driver, Registry(), lambda: HealthConfig(xids={94: Severity.FATAL}))
    await watch.survey()
    [due] = watch._handle_event(Xid(one, 94, 3, compute_instance))
    await watch._check(due)

    state = watch.registry.snapshot.gpus[one]
    assert state.mig_faults.keys() == (faulty or set())
    assert state.verdict.healthy == (faulty is not None)


async def test_a_fault_is_not_forgotten_with_an_nvml_that_goes() -> None:
    """A fault is of the GPU when NVML fails while the watch asks for the device."""

    class Gone(HangingMigDriver):
        async def mode(self, gpu: GpuId) -> None:  # noqa: ARG002
            raise DriverUnavailable("NVML is gone")

    driver = ScriptedDriver(gpus=(replace(gpu(0), mig_enabled=True),))
    driver.mig = cast("MigDriver", Gone())
    watch = HealthWatch(driver, Registry(), lambda: HealthConfig(xids={94: Severity.FATAL}))
    await watch.survey()
    [due] = watch._handle_event(Xid(gpu(0).id, 94, 3, 0))
    with pytest.raises(DriverUnavailable):
        await watch._check(due)
    assert watch.registry.snapshot.gpus[due].verdict.fault is Fault.XID


async def test_an_acknowledgement_without_a_fault_names_the_gpu_once() -> None:
    """A GPU has its index and its uuid in the message, as in other messages."""
    watch = HealthWatch(ScriptedDriver(), Registry(), HealthConfig)
    await watch.survey()

    with pytest.raises(MetagpuError) as caught:
        await watch.acknowledge(gpu(0).id)
    assert str(caught.value) == (
        f"GPU 0 ({gpu(0).id}) is in service; there is nothing to acknowledge"
    )


async def test_a_new_fault_of_a_device_during_its_acknowledgement_is_kept() -> None:
    """An acknowledgement of a MIG device covers earlier faults alone."""
    driver = ScriptedDriver()
    watch = HealthWatch(driver, Registry(), lambda: HealthConfig(xids={94: Severity.FATAL}))
    await watch.survey()
    made = ProvisionedState({ShareId(f"{gpu(0).id}::2g.10gb@0"): HardwareDevice("MIG-x", 3, 0)})
    watch.registry.apply(ProvisioningReported(gpu(0).id, "mig", made, at=0))
    watch._handle_event(Xid(gpu(0).id, 94, 3, 0))

    async def fault() -> None:
        watch._handle_event(Xid(gpu(0).id, 94, 3, 0))

    driver.during_check = fault
    with pytest.raises(MetagpuError, match="had a new fault during its check"):
        await watch.acknowledge(gpu(0).id, "MIG-x")
    assert watch.registry.snapshot.gpus[gpu(0).id].mig_faults

    driver.during_check = None
    await watch.acknowledge(gpu(0).id, "MIG-x")
    assert not watch.registry.snapshot.gpus[gpu(0).id].mig_faults


async def test_a_removed_device_is_faulty_until_its_backend_knows() -> None:
    """A share does not return to service with a device that NVML does not list any more."""

    class Empty(HangingMigDriver):
        async def instances(self, gpu: GpuId) -> tuple[MigInstance, ...]:  # noqa: ARG002
            return ()

    one, driver = gpu(0).id, ScriptedDriver()
    driver.mig = cast("MigDriver", Empty())
    watch = HealthWatch(driver, Registry(), HealthConfig)
    await watch.survey()
    made = ProvisionedState({ShareId(f"{one}::2g.10gb@0"): HardwareDevice("MIG-x", 3, 0)})
    watch.registry.apply(ProvisioningReported(one, "mig", made, at=0))
    watch.registry.apply(InstanceFaulted(one, "MIG-x", "XID 94", at=1))

    await watch.mig.recover_removed()
    assert watch.registry.snapshot.gpus[one].mig_faults

    watch.registry.apply(ProvisioningReported(one, "mig", ProvisionedState(), at=2))
    await watch.mig.recover_removed()
    assert not watch.registry.snapshot.gpus[one].mig_faults


async def test_a_fault_during_an_acknowledgement_is_kept() -> None:
    """An acknowledgement covers earlier faults alone: a new fault stays."""
    driver = ScriptedDriver()
    watch = HealthWatch(driver, Registry())
    await watch.survey()
    watch._handle_event(Xid(gpu(0).id, 79))

    async def fault() -> None:
        assert driver.renewed.is_set(), "an XID after the check would not be heard"
        watch._handle_event(Xid(gpu(0).id, 95))

    driver.during_check = fault
    with pytest.raises(MetagpuError, match="had a new fault during its check"):
        await watch.acknowledge(gpu(0).id)
    assert not watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy

    driver.during_check = None
    await watch.acknowledge(gpu(0).id)
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy


@pytest.mark.parametrize("every", [True, False], ids=["all GPUs", "one GPU"])
async def test_what_was_read_before_an_acknowledgement_takes_nothing_out(*, every: bool) -> None:
    """A check that began before a GPU was fixed and ends after its return changes nothing."""
    driver = ScriptedDriver(found=GpuLost("gone"))
    watch = HealthWatch(driver, Registry())
    await watch.survey()

    async def acknowledge() -> None:
        driver.during_check, driver.found = None, None
        await watch.acknowledge(gpu(0).id)
        driver.found = GpuLost("gone")  # as it was read before

    driver.during_check = acknowledge
    await (watch.survey() if every else watch._check(gpu(0).id))
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy

    await watch.survey()
    assert not watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy


@pytest.mark.parametrize(
    ("event", "fault"),
    [(Xid(gpu(0).id, 79), Fault.XID), (EccError(gpu(0).id, double_bit=True), Fault.MEMORY)],
)
async def test_a_fault_has_its_kind(event: DriverEvent, fault: Fault) -> None:
    """The event gives the kind of a fault; the first kind stays while the GPU is out of service."""
    watch = HealthWatch(ScriptedDriver(), Registry())
    await watch.survey()
    watch._handle_event(event)
    watch._handle_event(Xid(gpu(0).id, 95))

    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.fault is fault


@pytest.mark.parametrize(
    ("condition", "fault", "reason"),
    [
        (
            GpuCondition(0, RecoveryAction.GPU_RESET),
            Fault.RECOVERY_ACTION,
            "NVML asks for a recovery action: GPU reset",
        ),
        (
            GpuCondition(0, remapped_rows=RemappedRows(0, 0, pending=False, failed=True)),
            Fault.MEMORY,
            "a memory row could not be remapped",
        ),
        (GpuLost(f"GPU 0 ({gpu(0).id}): gone"), Fault.NO_ANSWER, "gone"),
    ],
)
async def test_what_a_check_finds_has_its_kind(
    condition: GpuCondition | GpuLost, fault: Fault, reason: str
) -> None:
    """A failed check has the kind of NVML's answer, or of no answer, and names no GPU."""
    driver = ScriptedDriver(found=condition)
    watch = HealthWatch(driver, Registry())
    await watch.survey()
    verdict = watch.registry.snapshot.gpus[gpu(0).id].verdict
    assert (verdict.fault, verdict.reason) == (fault, reason)

    driver.found, driver.gpus = None, ()
    watch.registry.apply(GpuRecovered(gpu(0).id, "recovered", at=1))
    await watch.survey()
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.fault is Fault.NOT_LISTED


async def test_an_instance_of_a_gpu_without_mig_means_nothing() -> None:
    """Without MIG mode a fatal XID is the GPU's, whatever instance the event names."""
    watch = HealthWatch(
        ScriptedDriver(), Registry(), lambda: HealthConfig(xids={94: Severity.FATAL})
    )
    await watch.survey()
    watch._handle_event(Xid(gpu(0).id, 94, 0, 0))

    assert (
        watch.registry.snapshot.gpus[gpu(0).id].verdict.reason == "XID 94: contained memory error"
    )


async def test_an_unheard_gpu_is_known_until_it_is_heard_again() -> None:
    """The registry has why a GPU's XIDs are not heard, and since when."""
    driver, times = ScriptedDriver(unheard={gpu(0).id: "refused"}), iter(range(1, 99))
    watch = HealthWatch(driver, Registry(), clock=lambda: float(next(times)))
    await watch.survey()
    before = watch.registry.snapshot.gpus[gpu(0).id].unheard
    driver.unheard = {gpu(0).id: "refused again"}
    await watch.survey()
    after = watch.registry.snapshot.gpus[gpu(0).id].unheard
    assert before is not None
    assert after == replace(before, reason="refused again")

    driver.unheard = {}
    await watch.survey()
    assert watch.registry.snapshot.gpus[gpu(0).id].unheard is None


async def test_a_reset_that_nothing_reports_ends_no_registration_for_long() -> None:
    """Each look at all GPUs finds new ones, and registers for the events of healthy ones too."""
    driver = ScriptedDriver()
    watch = HealthWatch(driver, Registry(), lambda: HealthConfig(rescan_period=Duration(3600)))

    async with running(watch):
        await driver.asked.wait()
        await anyio.wait_all_tasks_blocked()
        assert not driver.renewed.is_set()
        driver.gpus = (gpu(0), gpu(1))
        watch._survey_due.set()
        await driver.renewed.wait()
    assert watch.registry.snapshot.gpus.keys() == {gpu(0).id, gpu(1).id}


async def test_an_unheard_gpu_is_checked_more_often() -> None:
    """A GPU in service whose XIDs are not heard is checked without waiting for a survey."""
    driver = ScriptedDriver(unheard={gpu(0).id: "refused"}, gpus=(gpu(0), gpu(1)))
    timing = HealthTiming(unheard_check=0.01)
    watch = HealthWatch(driver, Registry(), timing=timing)

    async with running(watch):
        await watch.surveyed.wait()
        driver.found = GpuCondition(0, RecoveryAction.GPU_RESET)
        async for state in watch.registry.watch(lambda now: now.gpus[gpu(0).id]):
            if not state.verdict.healthy:
                break
    assert state.verdict.fault is Fault.RECOVERY_ACTION
    assert watch.registry.snapshot.gpus[gpu(1).id].verdict.healthy


async def test_no_xid_is_missed_while_a_gpu_recovers() -> None:
    """A reset ends the registration for events: with the first passed check and the last it is new.

    A failed check may be of another reset.
    """
    watch = HealthWatch(driver := ScriptedDriver(), Registry())
    await watch.survey()
    watch._handle_event(Xid(gpu(0).id, 79))

    renewed = []
    for found, quiet in [(None, 60), (None, 60), (GpuLost("gone"), 60), (None, 60), (None, 0)]:
        driver.renewed, driver.found = anyio.Event(), found
        await watch._recheck(gpu(0).id, quiet)
        renewed.append(driver.renewed.is_set())
    assert renewed == [True, False, False, True, True]
    assert watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy


async def test_a_gpu_that_recovers_says_when_it_returns() -> None:
    """While its checks pass, a GPU has the time of its return; a failed check takes it back."""
    driver, quiet = ScriptedDriver(), 60.0
    watch = HealthWatch(driver, Registry(), clock=lambda: 1000.0)
    await watch.survey()
    watch._handle_event(Xid(gpu(0).id, 79))

    def recovery() -> Recovery | None:
        return watch.registry.snapshot.gpus[gpu(0).id].verdict.recovery

    assert recovery() is None
    await watch._recheck(gpu(0).id, quiet)
    assert (first := recovery()) is not None
    assert first.returns_at == pytest.approx(1060, abs=1)
    await watch._recheck(gpu(0).id, quiet)
    assert recovery() is first

    driver.found = GpuLost("gone")
    await watch._recheck(gpu(0).id, quiet)
    assert recovery() is None

    driver.found = None
    await watch._recheck(gpu(0).id, quiet)
    watch._handle_event(Xid(gpu(0).id, 79))
    assert recovery() is None


async def test_a_gpu_that_waits_for_an_operator_says_so() -> None:
    """Without recovery actions passed checks name no time of return, where proof is needed."""
    times = iter(range(7, 99))
    driver = ScriptedDriver(found=GpuLost("gone"))
    watch = HealthWatch(driver, Registry(), clock=lambda: float(next(times)))
    await watch.survey()
    driver.found = GpuCondition(0)
    with capture_module_logs(fault_news) as logs:
        await watch._recheck(gpu(0).id, 60.0)
        recovery = watch.registry.snapshot.gpus[gpu(0).id].verdict.recovery
        assert recovery is not None
        assert recovery.returns_at is not None

        watch._handle_event(Xid(gpu(0).id, 95))
        found = []
        for _ in range(2):
            await watch._recheck(gpu(0).id, 60.0)
            found.append(watch.registry.snapshot.gpus[gpu(0).id].verdict.recovery)
    assert found[0] is not None
    assert found == [Recovery(found[0].since)] * 2
    assert [entry["event"] for entry in logs].count("gpu waits for an operator") == 1


async def test_each_nvml_event_is_published() -> None:
    """Each XID and memory error is published, fatal or not, also of an unknown GPU."""
    watch = HealthWatch(ScriptedDriver(), Registry(), clock=lambda: 7.0)
    events: list[DriverEvent] = [
        Xid(gpu(0).id, 31),
        Xid(None, 79),
        EccError(gpu(0).id, double_bit=False),
        RecoveryActionChanged(gpu(0).id),
    ]

    with watch.registry.events.subscribe() as subscription:
        for event in events:
            watch._handle_event(event)
        published = list(subscription._waiting)
    assert published == [
        XidReported(gpu(0).id, 31, at=7.0),
        XidReported(None, 79, at=7.0),
        MemoryErrorReported(gpu(0).id, corrected=True, at=7.0),
    ]


async def test_a_gpu_that_surveys_miss_does_not_flap() -> None:
    """A GPU that a survey did not find stays out although its checks pass, until one finds it."""
    driver = ScriptedDriver()
    watch = HealthWatch(driver, Registry())
    await watch.survey()
    [found], driver.gpus = driver.gpus, ()
    await watch.survey()

    for _ in range(3):
        await watch._recheck(found.id, quiet=0.0)
        assert not watch.registry.snapshot.gpus[found.id].verdict.healthy
    assert watch._survey_due.is_set()

    driver.gpus = (found,)
    await watch.survey()
    await watch._recheck(found.id, quiet=0.0)
    assert watch.registry.snapshot.gpus[found.id].verdict.healthy


async def test_a_survey_enters_all_that_nvml_tells() -> None:
    """Versions, topology and unreadable GPUs are known; a GPU that was read before has a fault."""
    both = (gpu(0), gpu(1))
    driver = ScriptedDriver(gpus=both)
    watch = HealthWatch(driver, Registry())
    await watch.survey()
    connected = topology(both, lambda *_: Connection(nvlinks=4))
    lost = UnreadableGpu(1, f"GPU 1 ({gpu(1).id}): is lost", gpu(1).id)
    driver.gpus = (gpu(0),)
    driver.rest = Survey((), (lost, UnreadableGpu(2, "no power")), "570.1", (12, 8), connected)
    await watch.survey()

    now = watch.registry.snapshot
    assert (now.versions, now.topology) == (Versions("570.1", (12, 8)), connected)
    assert {index: each.reason for index, each in now.unreadable_gpus.items()} == {2: "no power"}
    assert [state.verdict.reason for state in now.gpus.values()] == ["", "is lost"]


async def test_all_gpus_are_out_of_service_while_nvml_is_gone() -> None:
    """NVML is opened again until it opens; each reason is logged once, and shown."""
    reasons = [*["unloaded"] * 3, "no library"]
    driver = ScriptedDriver([[], DriverUnavailable("unloaded")])
    timing = HealthTiming(retry=0.0)
    watch = HealthWatch(driver, Registry(), lambda: HealthConfig(Duration(0)), timing=timing)
    shown = list[str]()

    def closed() -> DriverUnavailable | None:
        shown.extend(state.verdict.reason for state in watch.registry.snapshot.gpus.values())
        return DriverUnavailable(reasons.pop(0)) if shown and reasons else None

    driver.closed = closed
    with capture_module_logs(health) as logs:
        async with running(watch):
            await driver.asked.wait()
            assert watch.registry.snapshot.gpus[gpu(0).id].verdict.fault is Fault.DRIVER
            assert not watch.unusable
            await becomes(lambda: watch.registry.snapshot.gpus[gpu(0).id].verdict.healthy)
    assert shown == [*["unloaded"] * 4, "no library"]
    assert [entry["error"] for entry in logs] == ["unloaded", "no library"]


REPLACED, GONE = DriverReplaced("it does not fit"), DriverUnavailable("no driver")


@pytest.mark.parametrize("failures", [[REPLACED] * 3, [REPLACED, GONE, *[REPLACED] * 3]])
async def test_a_daemon_ends_whose_library_has_not_fitted_for_a_minute(
    failures: list[DriverUnavailable],
) -> None:
    """A new process loads another library; another problem in between is no reason to end."""
    watch = HealthWatch(driver := ScriptedDriver(), Registry(), timing=HealthTiming(retry=0.0))

    def closed() -> DriverUnavailable | None:
        skip(31)
        return failures.pop(0) if failures else None

    driver.closed = closed
    with anyio.fail_after(3600), pytest.raises(DriverReplaced):
        await watch.run()
    assert failures == []

    """The watch keeps what it knew of a GPU that NVML does not list yet, until NVML does."""
    """What it knew of a GPU that NVML does not list yet is kept until NVML does."""
    notes = [NotedFault(gpu(n).id, "XID 79", 1, Fault.XID, needs_proof=True) for n in range(2)]
    watch = HealthWatch(driver := ScriptedDriver(), Registry())
    await watch.survey()
    watch.adopt(FaultNote(tuple(notes)))
    assert watch.note == FaultNote(tuple(notes))

    driver.gpus = (gpu(0), gpu(1))
    await watch.survey()
    assert [state.verdict.reason for state in watch.registry.snapshot.gpus.values()] == [
        "XID 79",
        "XID 79",
    ]
    assert watch.noted == FaultNote()


async def test_a_gpu_that_is_not_heard_any_more_is_known_at_once() -> None:
    """After each wait for events, also one that fails, the registry has which GPUs are heard."""
    driver = ScriptedDriver([DriverTimeout("hangs"), []])
    watch = HealthWatch(driver, Registry(), timing=HealthTiming(event_retry=0.0))
    heard = list[bool]()

    async def events() -> Sequence[DriverEvent]:
        heard.append(watch.registry.snapshot.gpus[gpu(0).id].unheard is None)
        driver.unheard = {} if driver.unheard else {gpu(0).id: "refused"}
        return await ScriptedDriver.events(driver)

    driver.events = events  # type: ignore[method-assign]
    async with running(watch):
        await driver.asked.wait()
    assert heard == [True, False, True]

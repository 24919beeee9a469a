"""The health watch: events and checks of GPUs become verdicts in the registry.

A GPU goes out of service after a fatal XID or an uncorrected memory error, when NVML asks for a
recovery action, or when the GPU does not answer. A GPU comes back only when NVML asks for no action
and the device check has passed for a quiet period, or when an operator acknowledges it. A driver
that reports no recovery action proves nothing after a fatal XID: only an operator, or a reboot,
brings such a GPU back. A restart of the daemon does not: it gets the note of the one before.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec
import structlog

from metagpu.core.config.config import HealthConfig
from metagpu.core.contracts.driver import (
    DriverEvent,
    HealthDriver,
    Survey,
    Xid,
)
from metagpu.core.errors import DriverError, DriverReplaced, DriverUnavailable, NotAcknowledged
from metagpu.core.health.fault_assessment import (
    MigInstanceRef,
    deduplicated,
    find_problem,
    judge_condition,
    judge_event,
    read_condition,
    reason_beside,
)
from metagpu.core.health.verdicts import FaultLog, FaultNote, GpuVerdicts, MigHealth, take_note
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Fault
from metagpu.core.model.snapshot import Versions
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.core.state.facts import (
    DriverRead,
    GpuFaultExplained,
    GpuHeard,
    GpusFound,
    GpuUnheard,
    TopologyRead,
    UnreadableGpusFound,
)
from metagpu.core.state.registry import Registry


class HealthTiming(msgspec.Struct, frozen=True):
    """Delays of the health watch, in seconds.

    Attributes:
        retry: between two attempts to open an NVML that is unavailable.
        event_retry: after NVML failed to wait for events, so that a faulty NVML costs no CPU.
        replaced: of failures because the loaded library does not fit the driver, after which the
            daemon ends: its successor loads the library of then.
        unread_rescan: to the first new look at GPUs that could not be read, and
            `unread_rescan_longest` to later ones.
        unheard_check: between two checks of GPUs whose XIDs NVML does not deliver.
    """

    retry: float = 5.0
    event_retry: float = 1.0
    replaced: float = 60.0
    unread_rescan: float = 0.5
    unread_rescan_longest: float = 60.0
    unheard_check: float = 5.0


DEFAULT_TIMING: Final = HealthTiming()


log = structlog.get_logger()


@dataclass
class HealthWatch:
    """The owner of the registry's GPUs and of the verdicts on them.

    Attributes:
        settings: returns the configured rules.
        surveyed: set once NVML has been read for the first time.
        noted: faults and cordons from before the start, of GPUs that NVML has not listed yet.
        unusable: why NVML as a whole cannot be used now; empty while it can be used.
    """

    driver: HealthDriver
    registry: Registry
    settings: Callable[[], HealthConfig] = HealthConfig
    clock: Callable[[], float] = time.time
    timing: HealthTiming = DEFAULT_TIMING
    surveyed: anyio.Event = field(default_factory=anyio.Event)
    unusable: str = "NVML has not been read yet"
    noted: FaultNote = field(default_factory=FaultNote)
    verdicts: GpuVerdicts = field(init=False)
    mig: MigHealth = field(init=False)
    fault_log: FaultLog = field(init=False)
    _unlisted: frozenset[GpuId] = frozenset()
    _survey_due: anyio.Event = field(default_factory=anyio.Event)
    _unattributed: dict[GpuId, list[tuple[MigInstanceRef, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.verdicts = GpuVerdicts(self.registry, self.clock)
        self.mig = MigHealth(self.driver, self.registry, self.clock)
        self.fault_log = FaultLog(self.registry.events, self.clock)

    async def run(self) -> None:
        """Watch until cancelled; open NVML again when it is missing or lost.

        Raises:
            DriverReplaced: the loaded library has not fitted the driver for a minute.
        """
        replaced_since: float | None = None
        while True:
            error: BaseException
            try:
                async with self.driver.session():
                    self.unusable, replaced_since = "", None
                    await self._session()
            except* DriverUnavailable as group:
                error = _first(group)
                reason = str(error)
                if reason != self.unusable:
                    self.unusable = reason
                    retry = f"{self.timing.retry:g}s"
                    log.error("nvml unavailable", error=reason, retry=retry)
                for gpu in self.registry.snapshot.gpus:
                    self.verdicts.fault(gpu, reason, Fault.DRIVER)
                    self.registry.apply(GpuFaultExplained(gpu, reason))
            if not isinstance(error, DriverReplaced):
                replaced_since = None
            elif replaced_since is None:
                replaced_since = anyio.current_time()
            elif anyio.current_time() - replaced_since >= self.timing.replaced:
                raise error
            await anyio.sleep(self.timing.retry)

    async def acknowledge(self, gpu: GpuId, device: str | None = None) -> None:
        """Take a GPU back into service for an operator, if the device check passes.

        The GPU's MIG devices come back too, whether the GPU itself was out of service or not; with
        `device`, that MIG device alone.

        Raises:
            MetagpuError: nothing is out of service, NVML still asks for a recovery action, or the
                GPU had a new fault meanwhile.
            DriverError: the GPU fails the check.
        """
        state = self.registry.snapshot.gpus[gpu]
        if state.verdict.healthy and not state.mig_faults:
            raise NotAcknowledged(f"GPU {state.gpu} is in service; there is nothing to acknowledge")

        recovery, before = self.verdicts.recovering.get(gpu), self.mig.fault_count[gpu]
        # Before the check: what happens after it must be heard.
        await self.driver.renew_events()
        problem = judge_condition(await self.driver.condition(gpu))
        if problem is not None:
            raise NotAcknowledged(f"GPU {state.gpu} cannot come back: {problem}")
        new = self.verdicts.recovering.get(gpu, recovery) is not recovery
        if new or self.mig.fault_count[gpu] != before:
            raise NotAcknowledged(
                f"GPU {state.gpu} had a new fault during its check; read the daemon's log, and "
                "acknowledge it again when the fault is fixed"
            )
        self.mig.acknowledge(gpu, device)
        if device is None:
            self.verdicts.recovered(gpu, "acknowledged by an operator")

    @property
    def note(self) -> FaultNote:
        """The present faults and cordons, for the daemon after this one."""
        return take_note(self.registry.snapshot).joined(self.noted)

    def adopt(self, last: FaultNote, written: float = 0.0) -> None:
        """Continue with the faults and cordons that the earlier daemon wrote."""
        known = self.registry.snapshot.gpus.keys()
        self.verdicts.adopt(last.of(known), written)
        self.noted = last.of(known, but=True)

    async def _session(self) -> None:
        await self.survey()
        self.surveyed.set()

        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_events)
            group.start_soon(self._rescan)
            group.start_soon(self._recheck_unhealthy)
            group.start_soon(self._check_unheard)

    async def survey(self) -> None:
        """Read all GPUs once, inside a session of the driver, and assess their conditions."""
        recoveries = self.verdicts.recoveries.copy()
        survey = await self.driver.survey()
        faults: dict[GpuId, tuple[str, Fault]] = {}

        async def check(gpu: GpuId) -> None:
            recoveries[gpu] = self.verdicts.recoveries[gpu]
            problem = await find_problem(self.driver, gpu)
            if problem is not None:
                faults[gpu] = problem

        async with anyio.create_task_group() as group:
            for found in survey.gpus:
                group.start_soon(check, found.id)

        # Without a pause in between: a GPU that is new and faulty is never seen healthy.
        self.registry.apply(GpusFound(survey.gpus, self.clock()))
        listed = {gpu.id for gpu in survey.gpus}
        noted, self.noted = self.noted.of(listed), self.noted.of(listed, but=True)
        self.verdicts.restore(noted)
        self.registry.apply(TopologyRead(survey.topology))
        self.registry.apply(DriverRead(Versions(survey.driver_version, survey.cuda_version)))
        # A known GPU goes out of service below.
        unknown = {
            unreadable_gpu.index: unreadable_gpu.reason
            for unreadable_gpu in survey.unreadable
            if unreadable_gpu.gpu is None
        }
        if self.registry.apply(UnreadableGpusFound(unknown, self.clock())):
            for index, reason in unknown.items():
                log.warning("gpu unreadable", index=index, reason=reason)
        missing = {gpu: (reason, Fault.NOT_LISTED) for gpu, reason in self._missing(survey)}
        self._unlisted = frozenset(missing)
        for gpu, problem in {**faults, **missing}.items():
            if self.verdicts.recoveries[gpu] == recoveries[gpu]:  # not recovered since the check
                self.verdicts.fault(gpu, *problem)
        self._report_unheard()

    def _missing(self, survey: Survey) -> list[tuple[GpuId, str]]:
        """Return known GPUs that NVML does not list: their ids stay listed, unhealthy."""
        listed = {gpu.id for gpu in survey.gpus}
        reasons = {
            gpu.gpu: reason_beside(gpu.gpu, gpu.reason)
            for gpu in survey.unreadable
            if gpu.gpu is not None
        }

        return [
            (gpu, reasons.get(gpu, "NVML does not list it any more"))
            for gpu in self.registry.snapshot.gpus
            if gpu not in listed
        ]

    async def _watch_events(self) -> None:
        logged = set[str]()

        async with anyio.create_task_group() as checks:
            while True:
                try:
                    events = await self.driver.events()
                except DriverUnavailable:
                    raise
                except DriverError as error:
                    if str(error) not in logged:
                        logged.add(str(error))
                        log.warning("nvml events unavailable", error=str(error))
                    self._report_unheard()
                    await anyio.sleep(self.timing.event_retry)
                    continue
                logged.clear()
                affected = [
                    gpu for event in deduplicated(events) for gpu in self._handle_event(event)
                ]
                self._report_unheard()

                # Checks run beside the next wait: a GPU that hangs delays no events of others.
                for gpu in dict.fromkeys(affected):
                    checks.start_soon(self._check, gpu)

    def _handle_event(self, event: DriverEvent) -> tuple[GpuId, ...]:
        """Act on an event at once; return the GPUs whose condition has to be read now."""
        assessment = judge_event(event, self.settings(), has_mig=self._has_mig(event.gpu))
        self.fault_log.publish(event)
        if assessment.fatal and assessment.gpu is not None:
            gpu, reason, instance = assessment.gpu, assessment.reason, assessment.mig_instance
            if instance is None:
                fault = Fault.XID if isinstance(event, Xid) else Fault.MEMORY
                self.verdicts.fault(gpu, reason, fault, proof=True)
            elif not self.mig.apply_fault(gpu, instance, reason):
                self._unattributed.setdefault(gpu, []).append((instance, reason))
        self.fault_log.log(event, assessment)

        if assessment.gpu is None:
            # NVML does not name the GPU: no healthy GPU is blamed, every GPU is checked.
            return tuple(self.registry.snapshot.gpus)
        return (assessment.gpu,)

    async def _rescan(self) -> None:
        backoff = Backoff(self.timing.unread_rescan, self.timing.unread_rescan_longest)
        while True:
            period = float(self.settings().rescan_period)
            if self.registry.snapshot.unreadable_gpus:
                period = min(period, backoff.next())
            else:
                backoff.reset()
            self._survey_due = anyio.Event()
            with anyio.move_on_after(period):
                await self._survey_due.wait()
            await self.survey()
            # A GPU that was reset by hand between two checks shows nothing of it.
            await self.driver.renew_events()
            await self.mig.recover_removed()

    async def _recheck_unhealthy(self) -> None:
        """Check the GPUs that are out of service, until each has recovered."""
        while True:
            quiet = float(self.settings().quiet_period)
            await anyio.sleep(min(max(quiet / 4, 0.05), 5.0))

            async with anyio.create_task_group() as group:
                for gpu in list(self.verdicts.recovering):
                    group.start_soon(self._recheck, gpu, quiet)

    async def _recheck(self, gpu: GpuId, quiet: float) -> None:
        condition = await read_condition(self.driver, gpu)
        if condition is not None and gpu in self._unlisted:
            # Only a survey can find again what a survey did not find.
            self._survey_due.set()
            condition = None
        recovery = self.verdicts.recovering.get(gpu)
        if recovery is None:
            return

        recovered = recovery.record_check(anyio.current_time(), condition, quiet)
        if condition is None:
            recovery.events_renewed = False
        elif recovered or not recovery.events_renewed:
            recovery.events_renewed = True
            await self.driver.renew_events()
            if self.verdicts.recovering.get(gpu) is not recovery:
                return  # another fault meanwhile
        if recovered:
            self.verdicts.recovered(gpu, f"passed its checks for {quiet:g} s")
            return
        if condition is not None and condition.recovery_action is None:
            self.verdicts.notify_operator(gpu, recovery)
        self.verdicts.report_recovery(gpu, recovery, quiet)

    async def _check_unheard(self) -> None:
        """Check the GPUs whose XIDs are not heard: a check finds what NVML asks for."""
        while True:
            await anyio.sleep(self.timing.unheard_check)
            async with anyio.create_task_group() as group:
                for gpu, state in self.registry.snapshot.gpus.items():
                    if state.unheard is not None and gpu not in self.verdicts.recovering:
                        group.start_soon(self._check, gpu)

    def _report_unheard(self) -> None:
        """Report the GPUs whose XIDs are not heard, and those that are heard again.

        A GPU that is out of service is reported as that, and is checked all the time.
        """
        problems = self.driver.unheard
        for gpu, state in self.registry.snapshot.gpus.items():
            problem = problems.get(gpu)
            if problem is not None:
                if state.verdict.healthy:
                    self.registry.apply(GpuUnheard(gpu, problem, self.clock()))
            elif state.unheard is not None:
                self.registry.apply(GpuHeard(gpu, self.clock()))

    def _has_mig(self, gpu: GpuId | None) -> bool:
        state = self.registry.snapshot.gpus.get(gpu) if gpu is not None else None
        return state is None or bool(state.gpu.mig_enabled or state.provisioned)

    async def _check(self, gpu: GpuId) -> None:
        for instance, reason in self._unattributed.pop(gpu, ()):
            found = False
            try:
                found = await self.mig.find_and_fault(gpu, instance, reason)
            finally:  # also if NVML fails meanwhile: a fatal fault must not be lost
                if not found:
                    self.verdicts.fault(gpu, reason, Fault.XID, proof=True)
        recoveries = self.verdicts.recoveries[gpu]
        problem = await find_problem(self.driver, gpu)
        if problem is not None and self.verdicts.recoveries[gpu] == recoveries:
            self.verdicts.fault(gpu, *problem)


def _first(group: BaseExceptionGroup[DriverUnavailable]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner

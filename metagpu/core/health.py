"""Whether each GPU may serve: from faults heard and checks made to verdicts.

A GPU goes out of service when a fatal XID or an uncorrected memory error is heard, when NVML says
it needs a recovery action, or when it does not answer. It comes back only when NVML asks for no
action and the device check has passed for a quiet period, or when an operator acknowledges. On
drivers that report no recovery action, silence proves nothing after a fatal XID: there only an
operator, or a restart of the daemon, brings the GPU back.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog

from metagpu.core.config import Health
from metagpu.core.driver import Condition, Driver, DriverEvent, Survey, Xid
from metagpu.core.errors import DriverError, DriverUnavailable, MetagpuError
from metagpu.core.facts import DriverRead, GpuFaulted, GpuRecovered, GpusFound, TopologyRead
from metagpu.core.fault_news import FaultNews
from metagpu.core.gpu import GpuId
from metagpu.core.instance_health import InstanceHealth
from metagpu.core.judgement import (
    Heard,
    Patient,
    fault_in,
    judge_condition,
    judge_event,
    without_echoes,
)
from metagpu.core.model import Fault
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Versions

RETRY: Final = 5.0
"""Seconds between tries to reach an NVML that is not there."""
BACK_OFF: Final = 1.0
"""Seconds to wait after NVML failed to wait for events, so that a broken one costs no CPU."""

log = structlog.get_logger()


@dataclass
class HealthWatch:
    """Keeps the registry's GPUs and verdicts true.

    Attributes:
        settings: the rules; a reload replaces them.
        surveyed: set once NVML has been read for the first time.
        unusable: why NVML as a whole cannot be used now, empty while it can.
    """

    driver: Driver
    registry: Registry
    settings: Health = field(default_factory=Health)
    clock: Callable[[], float] = time.time
    surveyed: anyio.Event = field(default_factory=anyio.Event)
    unusable: str = "NVML was not asked yet"
    instances: InstanceHealth = field(init=False)
    news: FaultNews = field(init=False)
    _patients: dict[GpuId, Patient] = field(default_factory=dict)
    _returns: Counter[GpuId] = field(default_factory=Counter)
    _unplaced: dict[GpuId, list[Heard]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.instances = InstanceHealth(self.driver, self.registry, self.clock)
        self.news = FaultNews(self.registry.news, self.clock)

    async def run(self) -> None:
        """Watch until cancelled; an NVML that is missing or lost is tried again."""
        while True:
            try:
                async with self.driver.session():
                    self.unusable = ""
                    await self._session()
            except* DriverUnavailable as group:
                reason = str(_first(group))
                if reason != self.unusable:
                    self.unusable = reason
                    log.error(
                        "NVML cannot be used; trying again", error=reason, every=f"{RETRY:g}s"
                    )
                for gpu in self.registry.snapshot.gpus:
                    self._fault(gpu, reason, Fault.DRIVER)
                await anyio.sleep(RETRY)

    async def acknowledge(self, gpu: GpuId, device: str | None = None) -> None:
        """Take a GPU back into service on an operator's word, if it passes the device check.

        Its MIG devices too, whether the GPU itself was out or not; or one of them, and nothing
        else.

        Raises:
            MetagpuError: if all of it is in service already, NVML still says it needs something, or
                it had a new fault meanwhile.
            DriverError: if it fails the check.
        """
        state = self.registry.snapshot.gpus[gpu]
        if state.verdict.healthy and not state.faults:
            raise MetagpuError(f"GPU {gpu} is in service; there is nothing to acknowledge")

        patient, before = self._patients.get(gpu), self.instances.heard[gpu]
        refusal = judge_condition(await self.driver.condition(gpu))
        if refusal is not None:
            raise MetagpuError(f"GPU {gpu} cannot come back: {refusal}")
        new = self._patients.get(gpu, patient) is not patient
        if new or self.instances.heard[gpu] != before:
            raise MetagpuError(
                f"GPU {gpu} had a new fault during its check; read the daemon's log, and "
                "acknowledge it again when that is mended"
            )
        self.instances.acknowledge(gpu, device)
        if device is None:
            self._recovered(gpu, "acknowledged by an operator")

    async def _session(self) -> None:
        await self.survey()
        self.surveyed.set()

        async with anyio.create_task_group() as group:
            group.start_soon(self._listen)
            group.start_soon(self._rescan)
            group.start_soon(self._nurse)

    async def survey(self) -> None:
        """Read all GPUs once, inside a session of the driver, and judge each by its condition."""
        returns = self._returns.copy()
        survey = await self.driver.survey()
        refusals: dict[GpuId, tuple[str, Fault]] = {}

        async def check(gpu: GpuId) -> None:
            returns[gpu] = self._returns[gpu]
            refusal = await self._refusal(gpu)
            if refusal is not None:
                refusals[gpu] = refusal

        async with anyio.create_task_group() as group:
            for found in survey.gpus:
                group.start_soon(check, found.id)

        # In one turn of the loop: a GPU that is new and ill is never seen healthy.
        self.registry.apply(GpusFound(survey.gpus, self.clock()))
        self.registry.apply(TopologyRead(survey.topology))
        self.registry.apply(DriverRead(Versions(survey.driver_version, survey.cuda_version)))
        for unreadable in survey.unreadable:
            if unreadable.gpu is None:  # one that is known is told as out of service below
                log.warning("a GPU cannot be read", index=unreadable.index, why=unreadable.reason)
        told = {gpu: (reason, Fault.NOT_LISTED) for gpu, reason in self._missing(survey)}
        for gpu, refusal in {**refusals, **told}.items():
            if self._returns[gpu] == returns[gpu]:  # else it was mended since it was looked at
                self._fault(gpu, *refusal)

    def _missing(self, survey: Survey) -> list[tuple[GpuId, str]]:
        """Find GPUs that were known and are not there now: their ids stay listed, unhealthy."""
        there = {gpu.id for gpu in survey.gpus}
        why = {unreadable.gpu: unreadable.reason for unreadable in survey.unreadable}

        return [
            (gpu, why.get(gpu, "NVML does not list it any more"))
            for gpu in self.registry.snapshot.gpus
            if gpu not in there
        ]

    async def _listen(self) -> None:
        told: set[str] = set()

        async with anyio.create_task_group() as checks:
            while True:
                try:
                    events = await self.driver.events()
                except DriverUnavailable:
                    raise
                except DriverError as error:
                    if str(error) not in told:
                        told.add(str(error))
                        log.warning("NVML does not deliver events", error=str(error))
                    await anyio.sleep(BACK_OFF)
                    continue
                told.clear()

                # Beside the next wait, not before it: a GPU that hangs delays no news of others.
                heard = (gpu for event in without_echoes(events) for gpu in self._hear(event))
                for gpu in dict.fromkeys(heard):
                    checks.start_soon(self._check, gpu)

    def _hear(self, event: DriverEvent) -> tuple[GpuId, ...]:
        """Act on an event at once; give the GPUs whose condition should now be read."""
        heard = judge_event(event, self.settings)
        self.news.publish(event)
        if heard.fatal and heard.gpu is not None:
            if heard.inside is None:
                fault = Fault.XID if isinstance(event, Xid) else Fault.MEMORY
                self._fault(heard.gpu, heard.reason, fault, proof=True)
            elif not self.instances.hear(heard.gpu, heard):
                self._unplaced.setdefault(heard.gpu, []).append(heard)
        self.news.log(event, heard)

        if heard.gpu is None:
            # Nobody knows which GPU it was: no healthy one is blamed, every one is looked at.
            return tuple(self.registry.snapshot.gpus)
        return (heard.gpu,)

    async def _rescan(self) -> None:
        while True:
            await anyio.sleep(self.settings.rescan_period)
            await self.survey()
            await self.instances.forget()

    async def _nurse(self) -> None:
        """Check the GPUs that are out of service until each has recovered."""
        while True:
            quiet = float(self.settings.quiet_period)
            await anyio.sleep(min(max(quiet / 4, 0.05), 5.0))

            async with anyio.create_task_group() as group:
                for gpu in list(self._patients):
                    group.start_soon(self._visit, gpu, quiet)

    async def _visit(self, gpu: GpuId, quiet: float) -> None:
        condition = await self._condition(gpu)
        patient = self._patients.get(gpu)
        if patient is None:
            return

        if patient.checked(anyio.current_time(), condition, quiet):
            self._recovered(gpu, f"passed its checks for {quiet:g} s")
        elif condition is not None and condition.recovery_action is None:
            self._call_for_operator(gpu, patient)

    async def _check(self, gpu: GpuId) -> None:
        for heard in self._unplaced.pop(gpu, ()):
            placed = False
            try:
                placed = await self.instances.seek(gpu, heard)
            finally:  # also if NVML goes meanwhile: a fatal fault must not be forgotten with it
                if not placed:
                    self._fault(gpu, heard.reason, Fault.XID, proof=True)
        returns = self._returns[gpu]
        refusal = await self._refusal(gpu)
        if refusal is not None and self._returns[gpu] == returns:
            self._fault(gpu, *refusal)

    async def _refusal(self, gpu: GpuId) -> tuple[str, Fault] | None:
        """Read a GPU's condition and say why it may not serve, `None` when it may."""
        try:
            condition = await self.driver.condition(gpu)
        except DriverUnavailable:
            raise
        except DriverError as error:
            # Whoever shows a verdict has named the GPU already.
            return str(error).rpartition(f"({gpu}): ")[2], Fault.NO_ANSWER
        refusal = judge_condition(condition)
        return None if refusal is None else (refusal, fault_in(condition))

    async def _condition(self, gpu: GpuId) -> Condition | None:
        try:
            return await self.driver.condition(gpu)
        except DriverUnavailable:
            raise
        except DriverError:
            return None

    def _fault(self, gpu: GpuId, reason: str, fault: Fault, *, proof: bool = False) -> None:
        known = self._patients.get(gpu, Patient())
        # A new one each time, so that who waits for a check can tell that there was a fault.
        self._patients[gpu] = Patient(proof=known.proof or proof, told=known.told)

        if self.registry.apply(GpuFaulted(gpu, reason, self.clock(), fault)):
            log.error("GPU out of service", gpu=gpu, reason=reason)

    def _call_for_operator(self, gpu: GpuId, patient: Patient) -> None:
        if patient.proof and not patient.told:
            patient.told = True
            log.warning(
                "this driver does not report recovery actions, so the GPU waits for an operator",
                gpu=gpu,
                mend=f"repair or reset it, then run: metagpu acknowledge {gpu}",
            )

    def _recovered(self, gpu: GpuId, reason: str) -> None:
        self._patients.pop(gpu, None)
        self._returns[gpu] += 1
        if self.registry.apply(GpuRecovered(gpu, reason, self.clock())):
            log.info("GPU back in service", gpu=gpu, reason=reason)


def _first(group: BaseExceptionGroup[DriverUnavailable]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner

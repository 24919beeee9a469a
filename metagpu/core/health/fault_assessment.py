"""Assessment of XIDs, memory errors and conditions: what is wrong with a GPU.

The severity of each XID is in `core/model/xid_severity.py`. Without a clock.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

import msgspec

from metagpu.core.config.config import HealthConfig
from metagpu.core.contracts.driver import (
    DriverEvent,
    EccError,
    GpuCondition,
    GpuUnavailable,
    HealthDriver,
    RecoveryAction,
    RecoveryActionChanged,
    Xid,
)
from metagpu.core.errors import DriverError, DriverUnavailable
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Fault
from metagpu.core.model.xid_severity import CONTAINED_XIDS, Severity, XidRule, rule_for


class MigInstanceRef(msgspec.Struct, frozen=True):
    """The numbers by which NVML's events name a MIG instance; NVML may use them again."""

    gpu_instance: int
    compute_instance: int | None = None


class FaultAssessment(msgspec.Struct, frozen=True):
    """Assessment of one event: a fault with its reason, or an event to log.

    Attributes:
        fatal: whether the fault takes its GPU, or its MIG instance, out of service.
        mig_instance: the MIG instance that contains the fault; `None` when the fault is the whole
            GPU's.
    """

    gpu: GpuId | None
    reason: str
    fatal: bool
    mig_instance: MigInstanceRef | None = None


def judge_event(
    event: DriverEvent, health: HealthConfig, *, has_mig: bool = True
) -> FaultAssessment:
    """Assess an event for its GPU's verdict. Pure.

    Without MIG mode an event's instance ids mean nothing: some libraries write 0 there.
    """
    match event:
        case Xid(gpu, code, gpu_instance, compute_instance):
            rule: XidRule = rule_for(code, health.xids, health.other_xids)
            gpu_instance = gpu_instance if has_mig else None
            fatal = rule.severity is Severity.FATAL
            if fatal and gpu_instance is not None and code in CONTAINED_XIDS:
                instance = MigInstanceRef(gpu_instance, compute_instance)
                return FaultAssessment(gpu, f"XID {code}: {rule.meaning}", fatal, instance)
            where = "" if gpu_instance is None else f" in MIG instance {gpu_instance}"
            return FaultAssessment(gpu, f"XID {code}{where}: {rule.meaning}", fatal)
        case EccError(gpu, double_bit):
            kind = "uncorrected (double-bit)" if double_bit else "corrected (single-bit)"
            return FaultAssessment(gpu, f"{kind} memory error", double_bit)
        case RecoveryActionChanged(gpu):
            return FaultAssessment(gpu, "the recovery action changed", fatal=False)
        case GpuUnavailable(gpu):
            return FaultAssessment(gpu, "the GPU does not answer", fatal=False)
        case _:
            assert_never(event)


def deduplicated(events: Sequence[DriverEvent]) -> Iterator[DriverEvent]:
    """Leave out a batch's duplicates of events that only ask for a check. Pure."""
    seen = set[DriverEvent]()
    for event in events:
        if event not in seen:
            yield event
        if isinstance(event, RecoveryActionChanged | GpuUnavailable):
            seen.add(event)


def judge_condition(condition: GpuCondition) -> str | None:
    """Return why a condition makes a GPU unhealthy, `None` for a healthy GPU. Pure."""
    action = condition.recovery_action
    if action not in (None, RecoveryAction.NONE):
        return f"NVML asks for a recovery action: {action}"
    if condition.remapped_rows is not None and condition.remapped_rows.failed:
        return "a memory row could not be remapped"
    return None


def fault_kind(condition: GpuCondition) -> Fault:
    """Return the kind of the fault of a GPU in an unhealthy condition. Pure."""
    asked = condition.recovery_action not in (None, RecoveryAction.NONE)
    return Fault.RECOVERY_ACTION if asked else Fault.MEMORY


class GpuRecovery(msgspec.Struct):
    """Recovery of one GPU that is out of service.

    Attributes:
        needs_proof: whether NVML must report that no recovery action is needed: a driver that
            reports no recovery actions is not enough.
        clean_since: when the present run of passed checks began.
        events_renewed: whether the GPU has been registered for events again since the fault.
        operator_notified: whether the log has an entry for the operator that the GPU waits.
    """

    needs_proof: bool = False
    clean_since: float | None = None
    events_renewed: bool = False
    operator_notified: bool = False

    def record_check(self, now: float, condition: GpuCondition | None, quiet_period: float) -> bool:
        """Record a check, `None` for a failed one; return whether the GPU has recovered."""
        clean = (
            condition is not None
            and judge_condition(condition) is None
            and not (self.needs_proof and condition.recovery_action is None)
        )
        if not clean:
            self.clean_since = None
            return False

        self.clean_since = now if self.clean_since is None else self.clean_since
        return now - self.clean_since >= quiet_period


async def find_problem(driver: HealthDriver, gpu: GpuId) -> tuple[str, Fault] | None:
    """Check a GPU's condition; return its problem and fault, `None` when healthy."""
    try:
        condition = await driver.condition(gpu)
    except DriverUnavailable:
        raise
    except DriverError as error:
        return reason_beside(gpu, str(error)), Fault.NO_ANSWER
    problem = judge_condition(condition)
    return None if problem is None else (problem, fault_kind(condition))


def reason_beside(gpu: GpuId, message: str) -> str:
    """Return a message without its GPU: a verdict is shown beside the GPU."""
    return message.rpartition(f"({gpu}): ")[2]


async def read_condition(driver: HealthDriver, gpu: GpuId) -> GpuCondition | None:
    """Read a GPU's condition; return `None` where the GPU does not answer."""
    try:
        return await driver.condition(gpu)
    except DriverUnavailable:
        raise
    except DriverError:
        return None

"""What an event or a condition means for a GPU's verdict: pure rules, no clock and no waiting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from metagpu.core.config import Health
from metagpu.core.driver import (
    Condition,
    DriverEvent,
    EccError,
    GpuUnavailable,
    RecoveryAction,
    RecoveryActionChanged,
    Xid,
)
from metagpu.core.gpu import GpuId
from metagpu.core.model import Fault
from metagpu.core.xid import CONTAINED, Severity, XidRule, rule_for


class Inside(msgspec.Struct, frozen=True):
    """A MIG instance as NVML's events name it: by numbers, which another may have later."""

    gpu_instance: int
    compute_instance: int | None = None


class Heard(msgspec.Struct, frozen=True):
    """What an event means: a fault with its reason, or only something to tell.

    Attributes:
        inside: the MIG instance that a fault stays in, `None` when it is the whole GPU's.
    """

    gpu: GpuId | None
    reason: str
    fatal: bool
    inside: Inside | None = None


def judge_event(event: DriverEvent, health: Health) -> Heard:
    """Say what an event means for its GPU's verdict. Pure."""
    match event:
        case Xid(gpu, code, gpu_instance, compute_instance):
            rule: XidRule = rule_for(code, health.xids)
            fatal = rule.severity is Severity.FATAL
            if fatal and gpu_instance is not None and code in CONTAINED:
                inside = Inside(gpu_instance, compute_instance)
                return Heard(gpu, f"XID {code}: {rule.meaning}", fatal, inside)
            where = "" if gpu_instance is None else f" in MIG instance {gpu_instance}"
            return Heard(gpu, f"XID {code}{where}: {rule.meaning}", fatal)
        case EccError(gpu, double_bit):
            kind = "uncorrected (double-bit)" if double_bit else "corrected (single-bit)"
            return Heard(gpu, f"{kind} memory error", double_bit)
        case RecoveryActionChanged(gpu):
            return Heard(gpu, "the recovery action changed", fatal=False)
        case GpuUnavailable(gpu):
            return Heard(gpu, "it does not answer", fatal=False)
        case _:
            assert_never(event)


def without_echoes(events: Sequence[DriverEvent]) -> Iterator[DriverEvent]:
    """Leave out what NVML says a second time at once and that only asks for a look. Pure."""
    said = set[DriverEvent]()
    for event in events:
        if event not in said:
            yield event
        if isinstance(event, RecoveryActionChanged | GpuUnavailable):
            said.add(event)


def judge_condition(condition: Condition) -> str | None:
    """Say why a GPU in this condition may not serve, `None` when it may. Pure."""
    action = condition.recovery_action
    if action not in (None, RecoveryAction.NONE):
        return f"NVML asks for a recovery action: {action}"
    if condition.remapped_rows is not None and condition.remapped_rows.failed:
        return "a row of its memory could not be remapped"
    return None


def fault_in(condition: Condition) -> Fault:
    """Say what kind of thing keeps a GPU in this condition from serving, if something does."""
    asked = condition.recovery_action not in (None, RecoveryAction.NONE)
    return Fault.RECOVERY_ACTION if asked else Fault.MEMORY


@dataclass(slots=True)
class Patient:
    """A GPU out of service, as the recovery rule sees it.

    Attributes:
        proof: whether NVML must say that no action is needed; silence will not do.
        clean_since: when the present run of passed checks began.
        told: whether an operator was told that it is waiting for them.
    """

    proof: bool = False
    clean_since: float | None = None
    told: bool = False

    def checked(self, now: float, condition: Condition | None, quiet_period: float) -> bool:
        """Take a check's result, `None` for a failed one; tell whether the GPU has recovered."""
        clean = (
            condition is not None
            and judge_condition(condition) is None
            and not (self.proof and condition.recovery_action is None)
        )
        if not clean:
            self.clean_since = None
            return False

        self.clean_since = now if self.clean_since is None else self.clean_since
        return now - self.clean_since >= quiet_period

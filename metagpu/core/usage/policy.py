"""Decisions about a container that uses more GPU memory than its shares stand for.

Every function here is pure; `core/usage/enforcer.py` carries the decisions out.
"""

from collections.abc import Mapping, Sequence
from signal import Signals
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.config.memory import EnforcementPolicy, MemoryEnforcement, VictimSelection
from metagpu.core.contracts.host import ProcessIdentity
from metagpu.core.model.gpu import Gpu
from metagpu.core.usage.accounting import ContainerUsage, ProcessUsage

QUIET: Final = 60.0
"""Seconds within the limit after which the next violation is a new one, with a new warning."""


class LimitViolation(msgspec.Struct, frozen=True):
    """A container above its memory limit, now or within the last `QUIET` seconds.

    Attributes:
        last_seen: when the container was last seen above its limit.
        since: since when the container is above its limit without a break; `None` while it is
            within its limit.
        signalled: the last signal of each process, and when it was sent. A process that was gone
            at the last check is not in the mapping.
    """

    last_seen: float
    since: float | None
    signalled: Mapping[ProcessIdentity, tuple[Signals, float]] = msgspec.field(default_factory=dict)


class EnforcementDecision(msgspec.Struct, frozen=True):
    """The result of one check of a container.

    Attributes:
        violation: input of the next check.
        warn: whether this check begins a violation, and a warning is due.
        signals: the processes to signal now, each with its signal.
        next_check: seconds until the next check; `None` when the usual period is soon enough.
    """

    violation: LimitViolation | None = None
    warn: bool = False
    signals: Sequence[tuple[ProcessUsage, Signals]] = ()
    next_check: float | None = None


def memory_limit(usage: ContainerUsage, gpu: Gpu, headroom: int) -> int | None:
    """Return the bytes of a GPU that a container may use, `None` for an unknown share.

    The limit is the container's part of the memory that programs can have at all, plus the
    headroom. The limit is never less than the promised amount.
    """
    if (promised := usage.share_memory) is None:
        return None
    if gpu.memory is None:
        return promised + headroom

    usable = gpu.memory - (gpu.reserved or 0)
    return max(promised, promised * usable // gpu.memory + headroom)


def decide(
    usage: ContainerUsage,
    limit: int | None,
    violation: LimitViolation | None,
    settings: MemoryEnforcement,
    now: float,
) -> EnforcementDecision:
    """Decide about a container; `violation` is the result of the previous check.

    Unknown memory counts as 0: a container is above its limit by its known memory alone.
    """
    if limit is None or usage.memory <= limit:
        if violation is None or now - violation.last_seen >= QUIET:
            return EnforcementDecision()
        return EnforcementDecision(LimitViolation(violation.last_seen, since=None))

    since = now if violation is None or violation.since is None else violation.since
    present = {process.identity for process in usage.processes}
    signalled = {} if violation is None else violation.signalled
    current = LimitViolation(
        now, since, {process: sent for process, sent in signalled.items() if process in present}
    )
    decision = EnforcementDecision(current, warn=violation is None)

    if settings.policy is not EnforcementPolicy.KILL:
        return decision
    if (left := since + settings.grace - now) > 0:
        return replace(decision, next_check=left)
    return _with_signals(decision, current, usage, settings, now, excess=usage.memory - limit)


def _with_signals(
    decision: EnforcementDecision,
    violation: LimitViolation,
    usage: ContainerUsage,
    settings: MemoryEnforcement,
    now: float,
    *,
    excess: int,
) -> EnforcementDecision:
    """Add the signals of a decision: SIGTERM first, SIGKILL for a process that stays.

    With `largest`, as many of the largest processes end as cover the excess in bytes, less what
    those that are ending already will free. One that stays listed a stop timeout after SIGKILL, as
    a zombie may, frees nothing: it does not keep the others for ever.
    """
    signals: list[tuple[ProcessUsage, Signals]] = []
    due = [float(settings.stop_timeout)]
    candidates = []

    for process in usage.processes:
        identity = process.identity
        last, at = violation.signalled.get(identity, (None, now)) if identity else (None, now)
        left = at + settings.stop_timeout - now
        if last is None:
            candidates.append(process)
        elif left > 0:
            due.append(left)
            excess -= process.memory or 0
        elif last is Signals.SIGTERM:
            signals.append((process, Signals.SIGKILL))
            excess -= process.memory or 0

    for process in candidates:  # the largest first
        if process.memory and process.identity:
            if settings.victims is VictimSelection.ALL or excess > 0:
                signals.append((process, Signals.SIGTERM))
            excess -= process.memory

    sent = {process.identity: (signal, now) for process, signal in signals if process.identity}
    return replace(
        decision,
        violation=replace(violation, signalled={**violation.signalled, **sent}),
        signals=tuple(signals),
        next_check=min(due),
    )

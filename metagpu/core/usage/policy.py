"""Decisions about containers that use more GPU memory than their shares stand for.

Every function here is pure; `core/usage/enforcer.py` carries the decisions out.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from signal import Signals
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.config.memory import EnforcementPolicy, MemoryEnforcement, VictimSelection
from metagpu.core.contracts.host import ProcessIdentity
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Holder, Share
from metagpu.core.usage.accounting import ContainerUsage, ProcessUsage

QUIET: Final = 60.0
"""Seconds within the limit after which the next violation is a new one, with a new warning."""

_Group = Sequence[ProcessUsage]
_Key = tuple[Holder, str | None]


class EffectiveLimit(msgspec.Struct, frozen=True):
    """Memory limit of one container on one GPU.

    Attributes:
        settings: the pool's settings, with the policy that the pod has chosen.
        limit: bytes; `None` where the container's share is unknown, or there is no limit.
        request: bytes that are its own in any case: what it uses above, up to its limit, is
            borrowed. The limit itself where its pool lends nothing.
        rejected: a sentence for each annotation that has no effect.
    """

    settings: MemoryEnforcement
    limit: int | None
    request: int | None
    rejected: tuple[str, ...] = ()


Account = tuple[ContainerUsage, EffectiveLimit]
"""A container's use of a GPU, and what it may use."""
_Loan = tuple[int, Sequence[Account]]
"""Bytes that a pod has borrowed, and its containers that have, the largest loan first."""


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
    excess = 0 if limit is None else usage.memory - limit
    return _judge(_groups(usage, settings.victims), excess, violation, settings, now)


def _groups(usage: ContainerUsage, victims: VictimSelection) -> Sequence[_Group]:
    """Return the processes that end together, the largest first."""
    each = [(process,) for process in usage.processes]
    return [usage.processes] if victims is VictimSelection.ALL else each


def _judge(
    groups: Sequence[_Group],
    excess: int,
    violation: LimitViolation | None,
    settings: MemoryEnforcement,
    now: float,
) -> EnforcementDecision:
    """Decide about processes that use `excess` bytes too many, in their order."""
    if excess <= 0:
        if violation is None or now - violation.last_seen >= QUIET:
            return EnforcementDecision()
        return EnforcementDecision(LimitViolation(violation.last_seen, since=None))

    since = now if violation is None or violation.since is None else violation.since
    present = {process.identity for group in groups for process in group}
    signalled = {} if violation is None else violation.signalled
    current = LimitViolation(
        now, since, {process: sent for process, sent in signalled.items() if process in present}
    )
    decision = EnforcementDecision(current, warn=violation is None)

    if settings.policy is not EnforcementPolicy.KILL:
        return decision
    if (left := since + settings.grace - now) > 0:
        return replace(decision, next_check=left)
    return _with_signals(decision, current, groups, settings, now, excess=excess)


def _with_signals(
    decision: EnforcementDecision,
    violation: LimitViolation,
    groups: Sequence[_Group],
    settings: MemoryEnforcement,
    now: float,
    *,
    excess: int,
) -> EnforcementDecision:
    """Add the signals of a decision: SIGTERM first, SIGKILL for a process that stays.

    As many groups end as cover the excess in bytes, less what those that are ending already will
    free. One that stays listed a stop timeout after SIGKILL, as a zombie may, frees nothing: it
    does not keep the others for ever.
    """
    signals: list[tuple[ProcessUsage, Signals]] = []
    due = [float(settings.stop_timeout)]
    candidates = set()

    for process in chain.from_iterable(groups):
        identity = process.identity
        last, at = violation.signalled.get(identity, (None, now)) if identity else (None, now)
        left = at + settings.stop_timeout - now
        if last is None:
            candidates.add(process.pid)
        elif left > 0:
            due.append(left)
            excess -= process.memory or 0
        elif last is Signals.SIGTERM:
            signals.append((process, Signals.SIGKILL))
            excess -= process.memory or 0

    for group in groups:
        if excess > 0 or any(process.identity in violation.signalled for process in group):
            for process in group:
                if process.pid in candidates and process.memory and process.identity:
                    signals.append((process, Signals.SIGTERM))
                    excess -= process.memory

    sent = {process.identity: (signal, now) for process, signal in signals if process.identity}
    return replace(
        decision,
        violation=replace(violation, signalled={**violation.signalled, **sent}),
        signals=tuple(signals),
        next_check=min(due),
    )


class Reclaim(msgspec.Struct, frozen=True):
    """The result of one check of a GPU that lends memory, and input of the next.

    Attributes:
        shortage: since when the GPU is short of free memory, and the signals sent.
        warned: the containers that were warned of it.
        warn: the borrowers to warn now.
        signals: the processes to signal now, each with its container.
        next_check: seconds until the next check; `None` when the usual period is soon enough.
    """

    shortage: LimitViolation = LimitViolation(-inf, since=None)
    warned: frozenset[_Key] = frozenset()
    warn: Sequence[Account] = ()
    signals: Sequence[tuple[Account, ProcessUsage, Signals]] = ()
    next_check: float | None = None


def reclaim(
    accounts: Sequence[Account],
    free: int | None,
    settings: MemoryEnforcement,
    before: Reclaim,
    now: float,
    *,
    violations: Iterable[LimitViolation] = (),
) -> Reclaim:
    """Decide who gives back GPU memory that others have requested.

    The grace begins with the shortage, for all borrowers: nobody gains by taking turns.

    Args:
        accounts: every container that holds shares of the GPU, also one without processes.
        free: bytes of the GPU; `None` where they are unknown, which ends nobody.
        settings: those of the GPU's pool.
        before: the result of the previous check.
        now: seconds.
        violations: of containers above their limit: their signalled processes free memory too.
    """
    loans, unused = _loans(accounts)
    kept = settings.burst.reserve if settings.burst else None
    reserve = unused if kept is None else min(unused, kept)
    missing = reserve - free if loans and free is not None else 0

    sent = {
        process: signal
        for violation in (*violations, before.shortage)
        for process, signal in violation.signalled.items()
    }
    stuck = {
        process
        for process, (signal, at) in sent.items()
        if signal is Signals.SIGKILL and now - at >= settings.stop_timeout
    }
    groups = _victims(loans, settings.victims, stuck)
    decision = _judge(groups, missing, replace(before.shortage, signalled=sent), settings, now)
    if decision.violation is None:
        return Reclaim()

    borrowers = [account for _, pod in loans for account in pod] if missing > 0 else []
    keys = {(usage.holder, usage.pod_uid): (usage, terms) for usage, terms in borrowers}
    owners = {process: account for account in borrowers for process in account[0].processes}
    return Reclaim(
        decision.violation,
        before.warned | keys.keys(),
        [account for key, account in keys.items() if key not in before.warned],
        [(owners[process], process, signal) for process, signal in decision.signals],
        decision.next_check,
    )


def borrowed_memory(account: Account) -> int:
    """Return the bytes that a container has borrowed."""
    usage, terms = account
    if terms.settings.burst is None or terms.request is None:
        return 0
    return max(0, usage.memory - terms.request)


def _loans(accounts: Sequence[Account]) -> tuple[Sequence[_Loan], int]:
    """Return the largest loans first, and the bytes that other pods may still need.

    The pod borrows: what a container leaves, the others of its pod may use. Of equal loans, that of
    the youngest process comes first.
    """
    loans, unused = [], 0
    for pod in _pods(accounts):
        processes = [process for usage, _ in pod for process in usage.processes]
        used = sum(process.memory or 0 for process in processes)
        if (request := _request_of(pod)) is None:
            continue
        if used > request:
            started = max((each.identity.started for each in processes if each.identity), default=0)
            borrowers = sorted(filter(borrowed_memory, pod), key=borrowed_memory, reverse=True)
            loans.append((used - request, started, borrowers))
        elif all(process.memory is not None for process in processes):
            unused += request - used
    loans.sort(key=lambda loan: loan[:2], reverse=True)
    return [(loan, borrowers) for loan, _, borrowers in loans if borrowers], unused


def _pods(accounts: Sequence[Account]) -> Sequence[Sequence[Account]]:
    """Return the containers of each pod; pods that share a claim's share are one."""
    found: list[tuple[set[object], list[Account]]] = []
    for account in accounts:
        holder = account[0].holder
        keys, pod = {(holder.namespace, holder.pod), *account[0].shares}, [account]
        same = [group for group in found if not keys.isdisjoint(group[0])]
        found = [group for group in found if group not in same]
        found.append((keys.union(*(group[0] for group in same)), sum((g[1] for g in same), pod)))
    return [pod for _, pod in found]


def _request_of(pod: Sequence[Account]) -> int | None:
    """Return the bytes that are a pod's own; shares of several containers count once."""
    total, counted = 0, set[Share]()
    for usage, terms in sorted(pod, key=lambda account: -len(account[0].shares)):
        if terms.request is None:
            return None
        total += 0 if counted.issuperset(usage.shares) else terms.request
        counted.update(usage.shares)
    return total


def _victims(
    loans: Sequence[_Loan], victims: VictimSelection, stuck: Container[ProcessIdentity]
) -> Sequence[_Group]:
    """Return the processes whose end returns the loans, in their order."""
    found = []
    for loan, pod in loans:
        open_loan = loan
        for account in pod:
            left = min(open_loan, borrowed_memory(account))
            for group in _groups(account[0], victims):
                if left > 0:
                    found.append(group)
                    able = [each for each in group if each.identity and each.identity not in stuck]
                    freed = sum(process.memory or 0 for process in able)
                    left, open_loan = left - freed, open_loan - freed
    return found

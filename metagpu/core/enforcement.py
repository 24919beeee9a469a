"""What is done about a container that uses more GPU memory than its shares stand for.

The decision is pure; `core/enforcer.py` carries it out.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from signal import Signals
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.gpu import MIB, Gpu
from metagpu.core.host import Identity
from metagpu.core.units import Bytes, Duration
from metagpu.core.usage import Process, Usage

QUIET: Final = 60.0
"""Seconds within the limit after which the next excess is a new one, and told again."""


class Policy(StrEnum):
    """How far it goes: each does what the one before does."""

    OFF = "off"
    REPORT = "report"
    WARN = "warn"
    KILL = "kill"


class Victims(StrEnum):
    """Whose memory is taken back."""

    LARGEST = "largest"
    ALL = "all"


class Annotation(StrEnum):
    """What of it a pod may say for itself, by an annotation (`core/wishes.py`)."""

    LIMIT = "limit"
    POLICY = "policy"


class Enforcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a pool says about the memory of its GPUs.

    Attributes:
        policy: a `Policy`; YAML reads an `off` without quotes as false, which is taken for it.
        headroom: how much more than its share a container may use of each GPU. CUDA keeps some
            hundred MiB for itself in every process, which a program can do nothing about.
        grace: how long a container may stay above its limit before one of its processes is ended.
        stop_timeout: how long a process has from SIGTERM to SIGKILL.
        victims: whether its largest process is ended, and the next if that was not enough, or all.
        period: how often processes are looked at.
        dry_run: whether signals are only told, and not sent.
        driver_limits: whether the driver's own limits of memory are set too, where there are some
            and containers are to be kept within their limits at all.
        allow_annotations: what pods may say for themselves.
    """

    policy: Policy | bool = Policy.WARN
    headroom: Bytes = Bytes(512 * MIB)
    grace: Duration = Duration(0.5)
    stop_timeout: Duration = Duration(0.5)
    victims: Victims = Victims.LARGEST
    period: Duration = Duration(0.5)
    dry_run: bool = False
    driver_limits: bool = True
    allow_annotations: tuple[Annotation, ...] = ()

    def __post_init__(self) -> None:
        if self.policy is True:
            raise ValueError(f"policy is no switch; allowed: {', '.join(Policy)}")
        if self.policy is False:
            msgspec.structs.force_setattr(self, "policy", Policy.OFF)
        if self.period <= 0:
            raise ValueError("period must be longer than 0")

    @property
    def watches(self) -> bool:
        """Whether somebody has to look all the time."""
        return self.acts or Annotation.POLICY in self.allow_annotations

    @property
    def acts(self) -> bool:
        """Whether an excess is told or ended without being asked for."""
        return self.policy in {Policy.WARN, Policy.KILL}

    @property
    def by_driver(self) -> bool:
        """Whether the driver shall refuse what is too much: it may only where it may be ended."""
        return self.policy is Policy.KILL and self.driver_limits and not self.dry_run


class Excess(msgspec.Struct, frozen=True):
    """A container that uses more than its limit, for as long as it does so again and again.

    Attributes:
        last: when it was last seen to.
        since: how long it has done so without a break; `None` while it is within its limit.
        signalled: the last signal of each process that was not gone when it was last seen, and
            when it was sent.
    """

    last: float
    since: float | None
    signalled: Mapping[Identity, tuple[Signals, float]] = msgspec.field(default_factory=dict)


class Ruling(msgspec.Struct, frozen=True):
    """What follows from one look at a container.

    Attributes:
        excess: to be remembered until the next look.
        warn: whether it is news that the container uses too much.
        signals: who gets which signal now.
        due: in how many seconds to look again, `None` when there is no hurry.
    """

    excess: Excess | None = None
    warn: bool = False
    signals: Sequence[tuple[Process, Signals]] = ()
    due: float | None = None


def limit_of(usage: Usage, gpu: Gpu, headroom: int) -> int | None:
    """Say how many bytes of a GPU a container may use; `None` when nobody knows its share.

    That is its part of the memory that programs can have at all, and the headroom; and never less
    than it was told.
    """
    if usage.share is None:
        return None

    usable = gpu.memory - (gpu.reserved or 0)
    return max(usage.share, usage.share * usable // gpu.memory + headroom)


def rule(
    usage: Usage, limit: int | None, excess: Excess | None, terms: Enforcement, now: float
) -> Ruling:
    """Decide about a container; `excess` is what was found at the last look, if anything.

    Memory that is not known counts nothing: who is above its limit is so by what is known.
    """
    if limit is None or usage.memory <= limit:
        if excess is None or now - excess.last >= QUIET:
            return Ruling()
        return Ruling(Excess(excess.last, since=None))

    since = now if excess is None or excess.since is None else excess.since
    here = {process.who for process in usage.processes}
    signalled = {} if excess is None else excess.signalled
    found = Excess(now, since, {who: it for who, it in signalled.items() if who in here})
    ruling = Ruling(found, warn=excess is None)

    if terms.policy is not Policy.KILL:
        return ruling
    if (left := since + terms.grace - now) > 0:
        return replace(ruling, due=left)
    return _sentenced(ruling, found, usage, terms, now)


def _sentenced(
    ruling: Ruling, found: Excess, usage: Usage, terms: Enforcement, now: float
) -> Ruling:
    """Add who gets which signal: SIGTERM first, SIGKILL for those who do not go."""
    signals: list[tuple[Process, Signals]] = []
    due = [float(terms.stop_timeout)]

    for process in usage.processes:
        last, at = found.signalled.get(process.who, (None, now)) if process.who else (None, now)
        if last is Signals.SIGTERM:
            left = at + terms.stop_timeout - now
            due += [left] if left > 0 else []
            signals += [] if left > 0 else [(process, Signals.SIGKILL)]

    # While the largest is on its way out, nobody can say whether another has to go.
    if terms.victims is Victims.ALL or not found.signalled:
        able = [
            process
            for process in usage.processes
            if process.memory and process.who and process.who not in found.signalled
        ]
        chosen = able if terms.victims is Victims.ALL else able[:1]
        signals += [(process, Signals.SIGTERM) for process in chosen]

    sent = {process.who: (signal, now) for process, signal in signals if process.who}
    return replace(
        ruling,
        excess=replace(found, signalled={**found.signalled, **sent}),
        signals=tuple(signals),
        due=min(due),
    )

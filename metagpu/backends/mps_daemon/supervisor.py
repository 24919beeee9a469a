"""What to do about an MPS control daemon: pure decisions from what was seen of it, and a clock."""

from enum import Enum, auto
from typing import Final

import msgspec
from msgspec.structs import replace

PROBES: Final = 3
"""Probes in a row that fail before a control daemon counts as hanging."""


class Timing(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        period: between two probes of a control daemon that answers.
        retry: between two probes of one that does not, or not yet.
        deadline: for the answer to one command.
        patience: how long one that was started may take until its first answer.
        first_pause: before it is started again when it has ended twice; twice as long each time, up
            to `longest_pause`. After a first end it is started at once.
        steady: how long it must have run for its next end to count as a first one.
    """

    period: float = 10.0
    retry: float = 0.5
    deadline: float = 5.0
    patience: float = 20.0
    first_pause: float = 1.0
    longest_pause: float = 60.0
    steady: float = 60.0


class Look(msgspec.Struct, frozen=True):
    """What was seen at one moment.

    Attributes:
        running: whether the control daemon's process is there.
        problem: why its answer to the probe was none, empty if it was good; of one that does not
            run, what it said last.
        fault: why its servers take no clients for now, as they say; empty if they do.
        used: whether anybody may be its client. It is never ended while that is so.
    """

    at: float
    running: bool
    problem: str = ""
    fault: str = ""
    used: bool = True


class Watch(msgspec.Struct, frozen=True):
    """What is remembered from one look to the next.

    Attributes:
        since: when the control daemon that runs was started or found, `None` if none does.
        answered: whether it has answered since then.
        failures: probes in a row that failed.
        ends: how often in a row it ended, or could not be started, before it was steady.
        start_at: when to start it, if none runs.
    """

    since: float | None = None
    answered: bool = False
    failures: int = 0
    ends: int = 0
    start_at: float = 0.0


class Step(Enum):
    """What to do now."""

    START = auto()
    SERVE = auto()
    SUSPEND = auto()
    STAY = auto()
    END = auto()


class Decision(msgspec.Struct, frozen=True):
    """What to do, what to remember, when to look again; `reason` is for those who read lists."""

    step: Step
    watch: Watch
    wait: float = 0.0
    reason: str = ""


def decide(watch: Watch, look: Look, timing: Timing) -> Decision:
    """Say what follows from a look.

    A control daemon that ended is started again, after a pause that grows while it does not last.
    One that hangs is suspended after three probes; it is ended, and so started again, only if
    nobody can be its client, and else left alone until it answers.
    """
    if not look.running:
        return _absent(watch, look, timing)
    watch = watch if watch.since is not None else replace(watch, since=look.at)
    return _silent(watch, look, timing) if look.problem else _answering(watch, look, timing)


def not_started(watch: Watch, at: float, problem: str, timing: Timing) -> Decision:
    """Say what follows when it could not be started."""
    return _later(watch.ends, at, problem, _pause(watch.ends, timing))


def _absent(watch: Watch, look: Look, timing: Timing) -> Decision:
    if watch.since is not None:
        steady = watch.answered and look.at - watch.since >= timing.steady
        ends = 0 if steady else watch.ends
        problem = f"the MPS control daemon ended ({look.problem})"
        return _later(ends, look.at, problem, _pause(ends - 1, timing) if ends else 0.0)

    if look.at < watch.start_at:
        return Decision(Step.STAY, watch, watch.start_at - look.at)
    return Decision(Step.START, replace(watch, since=look.at, answered=False, failures=0))


def _answering(watch: Watch, look: Look, timing: Timing) -> Decision:
    watch = replace(watch, answered=True, failures=0)
    if look.fault:
        return Decision(Step.SUSPEND, watch, timing.retry, look.fault)
    return Decision(Step.SERVE, watch, timing.period)


def _silent(watch: Watch, look: Look, timing: Timing) -> Decision:
    watch = replace(watch, failures=watch.failures + 1)
    since = look.at if watch.since is None else watch.since

    starting = not watch.answered and look.at - since < timing.patience
    if starting or watch.failures < PROBES:
        return Decision(Step.STAY, watch, timing.retry)

    reason = f"the MPS control daemon failed {watch.failures} probes: {look.problem}"
    step = Step.SUSPEND if look.used else Step.END
    return Decision(step, watch, timing.retry, reason)


def _later(ends: int, at: float, problem: str, pause: float) -> Decision:
    when = f"it is tried again in {pause:g} s" if pause else "it is started again at once"
    again = Watch(ends=ends + 1, start_at=at + pause)
    return Decision(Step.SUSPEND, again, pause, f"{problem}; {when}")


def _pause(ends: int, timing: Timing) -> float:
    doublings = min(ends, 30)  # the count grows for ever, the pause does not
    return min(timing.first_pause * float(1 << doublings), timing.longest_pause)

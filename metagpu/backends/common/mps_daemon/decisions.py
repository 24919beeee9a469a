"""Decisions about an MPS control daemon, and the privileges that it needs. Pure."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.model.privileges import Privilege

MAX_FAILED_PROBES: Final = 3
"""Probes in a row that fail before a control daemon counts as hanging."""


class MpsDaemonTiming(msgspec.Struct, frozen=True):
    """Times of a control daemon, in seconds.

    Attributes:
        period: between two probes of a daemon that answers.
        retry: between two probes of a daemon that does not answer, or not yet.
        deadline: for the answer to one command.
        start_timeout: from a start to the first answer.
        first_delay: before the restart after a second end; twice as long each time, up to
            `longest_delay`. After a first end the daemon starts at once.
        longest_delay: the limit of that delay.
        stable_after: how long a daemon must run for its next end to count as a first one.
    """

    period: float = 10.0
    retry: float = 0.5
    deadline: float = 5.0
    start_timeout: float = 20.0
    first_delay: float = 1.0
    longest_delay: float = 60.0
    stable_after: float = 60.0


class DaemonObservation(msgspec.Struct, frozen=True):
    """One check of a control daemon.

    Attributes:
        at: the time of the check.
        running: whether the process runs.
        problem: why the probe failed, empty if it succeeded; of a daemon that does not run, the
            last line of its output.
        fault: why its servers take no clients for now, in their words; empty if they do.
        used: whether it may have clients. A daemon in use is never stopped.
    """

    at: float
    running: bool
    problem: str = ""
    fault: str = ""
    used: bool = True


class DaemonState(msgspec.Struct, frozen=True):
    """The memory of a control daemon between two checks.

    Attributes:
        since: when the running daemon was started or found, `None` if none runs.
        answered: whether it has answered since then.
        failures: probes in a row that failed.
        ends: how often in a row it ended, or failed to start, before it was stable.
        start_at: when to start it, if none runs.
    """

    since: float | None = None
    answered: bool = False
    failures: int = 0
    ends: int = 0
    start_at: float = 0.0


class DaemonAction(Enum):
    """The action after a check."""

    START = auto()
    SERVE = auto()
    SUSPEND = auto()
    WAIT = auto()
    STOP = auto()


class DaemonDecision(msgspec.Struct, frozen=True):
    """The action, the new state, the seconds to the next check, and the reason."""

    action: DaemonAction
    state: DaemonState
    wait: float = 0.0
    reason: str = ""


def decide(
    state: DaemonState, observation: DaemonObservation, timing: MpsDaemonTiming
) -> DaemonDecision:
    """Decide what follows from a check.

    A daemon that ended is started again, after a delay that grows while it does not last. A daemon
    that hangs is suspended after three failed probes. It is stopped, and so started again, only if
    it can have no clients; otherwise it is left alone until it answers.
    """
    if not observation.running:
        return _when_absent(state, observation, timing)
    if state.since is None:
        state = replace(state, since=observation.at)
    if observation.problem:
        return _when_silent(state, observation, timing)
    return _when_answering(state, observation, timing)


def decide_after_failed_start(
    state: DaemonState, at: float, problem: str, timing: MpsDaemonTiming
) -> DaemonDecision:
    """Decide what follows from a start that failed."""
    return _restart_later(state.ends, at, problem, _delay(state.ends, timing))


def _when_absent(
    state: DaemonState, observation: DaemonObservation, timing: MpsDaemonTiming
) -> DaemonDecision:
    if state.since is not None:
        stable = state.answered and observation.at - state.since >= timing.stable_after
        ends = 0 if stable else state.ends
        problem = f"the MPS control daemon ended ({observation.problem})"
        delay = _delay(ends - 1, timing) if ends else 0.0
        return _restart_later(ends, observation.at, problem, delay)

    if observation.at < state.start_at:
        return DaemonDecision(DaemonAction.WAIT, state, state.start_at - observation.at)
    started = replace(state, since=observation.at, answered=False, failures=0)
    return DaemonDecision(DaemonAction.START, started)


def _when_answering(
    state: DaemonState, observation: DaemonObservation, timing: MpsDaemonTiming
) -> DaemonDecision:
    state = replace(state, answered=True, failures=0)
    if observation.fault:
        return DaemonDecision(DaemonAction.SUSPEND, state, timing.retry, observation.fault)
    return DaemonDecision(DaemonAction.SERVE, state, timing.period)


def _when_silent(
    state: DaemonState, observation: DaemonObservation, timing: MpsDaemonTiming
) -> DaemonDecision:
    state = replace(state, failures=state.failures + 1)
    since = observation.at if state.since is None else state.since

    starting = not state.answered and observation.at - since < timing.start_timeout
    if starting or state.failures < MAX_FAILED_PROBES:
        return DaemonDecision(DaemonAction.WAIT, state, timing.retry)

    reason = f"the MPS control daemon failed {state.failures} probes: {observation.problem}"
    action = DaemonAction.SUSPEND if observation.used else DaemonAction.STOP
    return DaemonDecision(action, state, timing.retry, reason)


def _restart_later(ends: int, at: float, problem: str, delay: float) -> DaemonDecision:
    when = f"it is tried again in {delay:g} s" if delay else "it is started again at once"
    state = DaemonState(ends=ends + 1, start_at=at + delay)
    return DaemonDecision(DaemonAction.SUSPEND, state, delay, f"{problem}; {when}")


def _delay(ends: int, timing: MpsDaemonTiming) -> float:
    """Return the delay after so many ends: a back-off as a value.

    `DaemonState` is immutable, and so cannot hold a `Backoff`.
    """
    doublings = min(ends, 30)  # the count grows for ever, the delay does not
    return min(timing.first_delay * float(1 << doublings), timing.longest_delay)


PRIVILEGES: Final[Mapping[Privilege, str]] = {
    Privilege.SYS_PTRACE: "MPS: the mounts and cgroups of the host's first process",
    Privilege.SYS_CHROOT: "MPS: the host's mounts, a driver container's root",
    Privilege.DAC_OVERRIDE: "MPS: a cgroup for each control daemon",
    Privilege.FOWNER: "MPS: the removal of what containers left in its folders",
}
"""By what each is needed for. Docs: permissions.md."""

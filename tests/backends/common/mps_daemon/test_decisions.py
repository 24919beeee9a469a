"""The pure decisions about an MPS control daemon."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.backends.common.mps_daemon.decisions import (
    DaemonAction,
    DaemonDecision,
    DaemonObservation,
    DaemonState,
    MpsDaemonTiming,
    decide,
    decide_after_failed_start,
)

TIMING = MpsDaemonTiming()
GONE = DaemonObservation(0.0, running=False, problem="no such GPU")
GOOD = DaemonObservation(0.0, running=True)
SILENT = DaemonObservation(0.0, running=True, problem="it did not end within 5 s")


def after(*observations: DaemonObservation, watch: DaemonState | None = None) -> DaemonDecision:
    """Return the decision after some probes, the last of them."""
    decision = DaemonDecision(DaemonAction.WAIT, watch or DaemonState())
    for observation in observations:
        decision = decide(decision.state, observation, TIMING)
    return decision


def test_a_daemon_is_started_before_shares_are_served() -> None:
    """A missing daemon is started, and shares are served with its first answer."""
    assert after(GONE).action is DaemonAction.START
    assert after(GONE, GOOD).action is DaemonAction.SERVE


def test_a_running_daemon_is_adopted() -> None:
    """A control daemon that was found and answers is adopted and serves at once."""
    assert after(GOOD).action is DaemonAction.SERVE


def test_a_starting_daemon_is_given_time() -> None:
    """Failed probes before the first answer do not count within the start timeout."""
    probes = [replace(SILENT, at=float(second)) for second in range(10)]

    assert after(GONE, *probes).action is DaemonAction.WAIT


def test_a_daemon_that_never_answers_is_ended() -> None:
    """An unused daemon without an answer is ended after the timeout, and started again."""
    late = replace(SILENT, at=TIMING.start_timeout, used=False)
    decision = after(GONE, SILENT, SILENT, late)

    assert decision.action is DaemonAction.STOP
    assert decision.reason == ("the MPS control daemon failed 3 probes: it did not end within 5 s")


def test_two_failed_probes_change_nothing() -> None:
    """A control daemon may be slow: nothing changes before the third failure in a row."""
    assert after(GOOD, SILENT, SILENT).action is DaemonAction.WAIT
    assert after(GOOD, SILENT, SILENT, GOOD, SILENT, SILENT).action is DaemonAction.WAIT


def test_three_failed_probes_suspend() -> None:
    """The third failure suspends with its reason, and the first good answer resumes."""
    decision = after(GOOD, SILENT, SILENT, SILENT)

    assert decision.action is DaemonAction.SUSPEND
    assert decision.reason.endswith("failed 3 probes: it did not end within 5 s")
    assert after(GOOD, watch=decision.state).action is DaemonAction.SERVE


def test_an_ended_daemon_is_started_again_at_once() -> None:
    """A daemon that ended for any reason is started at once for new clients."""
    ended = after(GOOD, GONE)

    assert (ended.action, ended.wait) == (DaemonAction.SUSPEND, 0.0)
    assert ended.reason == "the MPS control daemon ended (no such GPU); it is started again at once"
    assert after(GONE, watch=ended.state).action is DaemonAction.START


def test_a_daemon_that_ends_again_is_started_after_a_delay() -> None:
    """The end is reported at once; the start follows after the delay, not before."""
    ended = after(GOOD, GONE, GONE, GOOD, GONE)

    assert (ended.action, ended.wait) == (DaemonAction.SUSPEND, 1.0)
    assert ended.reason == "the MPS control daemon ended (no such GPU); it is tried again in 1 s"
    assert after(replace(GONE, at=0.5), watch=ended.state) == DaemonDecision(
        DaemonAction.WAIT, ended.state, 0.5
    )
    assert after(replace(GONE, at=1.0), watch=ended.state).action is DaemonAction.START


def test_the_delay_doubles_while_daemons_end_soon() -> None:
    """A daemon that ends again and again is started more rarely, at last once a minute."""
    watch, at, pauses = DaemonState(), 0.0, []
    for _ in range(9):
        decision = after(replace(GONE, at=at), replace(GOOD, at=at), watch=watch)
        decision = after(replace(GONE, at=at), watch=decision.state)
        pauses.append(decision.wait)
        at, watch = at + decision.wait, decision.state

    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_daemon_that_lasted_is_started_soon_again() -> None:
    """After a minute of good answers an end counts as the first."""
    watch = DaemonState(since=0.0, answered=True, ends=5)

    assert after(replace(GONE, at=59.0), watch=watch).wait == 16
    assert after(replace(GONE, at=60.0), watch=watch).wait == 0


def test_a_failed_start_is_tried_again() -> None:
    """A failed start is reported with the time of the next attempt, after growing delays."""
    first = decide_after_failed_start(after(GONE).state, 0.0, "there is no such program", TIMING)
    second = decide_after_failed_start(first.state, 1.0, "there is no such program", TIMING)

    assert (first.action, first.reason) == (
        DaemonAction.SUSPEND,
        "there is no such program; it is tried again in 1 s",
    )
    assert (first.wait, second.wait) == (1, 2)


def test_a_fault_suspends_until_it_is_over() -> None:
    """A control daemon whose server has a fault answers, and is suspended all the same."""
    faulty = after(GOOD, replace(GOOD, fault="a client's fault"))

    assert (faulty.action, faulty.reason) == (DaemonAction.SUSPEND, "a client's fault")
    assert after(GOOD, watch=faulty.state).action is DaemonAction.SERVE


OBSERVATIONS = st.builds(
    DaemonObservation,
    at=st.just(0.0),
    running=st.booleans(),
    problem=st.sampled_from(["", "no answer"]),
    fault=st.sampled_from(["", "a fault"]),
    used=st.booleans(),
)


@given(st.lists(st.tuples(OBSERVATIONS, st.floats(0, 100)), max_size=40))
def test_clients_are_safe_after_any_probes(seen: list[tuple[DaemonObservation, float]]) -> None:
    """A daemon that may have clients is not ended, not started twice, and not served unprobed."""
    watch, at = DaemonState(), 0.0
    for observation, delay in seen:
        decision = decide(watch, replace(observation, at=at), TIMING)
        watch, at = decision.state, at + delay

        assert decision.action is not DaemonAction.STOP or (
            observation.running and not observation.used
        )
        assert decision.action is not DaemonAction.START or not observation.running
        assert decision.action is not DaemonAction.SERVE or (
            observation.running and not observation.problem
        )
        assert decision.action is not DaemonAction.SUSPEND or decision.reason
        assert 0 <= decision.wait <= TIMING.longest_delay


@pytest.mark.parametrize("ends", [0, 40, 10_000])
def test_the_delay_has_a_maximum(ends: int) -> None:
    """After any number of ends a start is tried once a minute."""
    assert (
        decide_after_failed_start(DaemonState(ends=ends), 0.0, "x", TIMING).wait
        <= TIMING.longest_delay
    )

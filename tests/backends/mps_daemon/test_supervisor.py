"""What is done about an MPS control daemon, as pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.backends.mps_daemon.supervisor import (
    Decision,
    Look,
    Step,
    Timing,
    Watch,
    decide,
    not_started,
)

TIMING = Timing()
GONE = Look(0.0, running=False, problem="no such GPU")
GOOD = Look(0.0, running=True)
SILENT = Look(0.0, running=True, problem="it did not end within 5 s")


def after(*looks: Look, watch: Watch | None = None) -> Decision:
    """Give the decision after some looks, the last of them."""
    decision = Decision(Step.STAY, watch or Watch())
    for look in looks:
        decision = decide(decision.watch, look, TIMING)
    return decision


def test_it_is_started_before_anything_is_served() -> None:
    """Where none runs one is started, and shares are served with its first answer."""
    assert after(GONE).step is Step.START
    assert after(GONE, GOOD).step is Step.SERVE


def test_one_that_runs_is_not_started() -> None:
    """A control daemon that was found and answers is served at once: it is adopted."""
    assert after(GOOD).step is Step.SERVE


def test_one_that_starts_is_given_time() -> None:
    """Before its first answer no probe counts, as long as its patience lasts."""
    probes = [replace(SILENT, at=float(second)) for second in range(10)]

    assert after(GONE, *probes).step is Step.STAY


def test_one_that_never_answers_is_ended() -> None:
    """When the patience is over and nobody uses it, it is ended and so started again."""
    late = replace(SILENT, at=TIMING.patience, used=False)
    decision = after(GONE, SILENT, SILENT, late)

    assert decision.step is Step.END
    assert decision.reason == ("the MPS control daemon failed 3 probes: it did not end within 5 s")


def test_two_failed_probes_are_no_news() -> None:
    """A control daemon may be slow: nothing changes before the third failure in a row."""
    assert after(GOOD, SILENT, SILENT).step is Step.STAY
    assert after(GOOD, SILENT, SILENT, GOOD, SILENT, SILENT).step is Step.STAY


def test_three_failed_probes_suspend() -> None:
    """The third says why, and the first good answer heals."""
    decision = after(GOOD, SILENT, SILENT, SILENT)

    assert decision.step is Step.SUSPEND
    assert decision.reason.endswith("failed 3 probes: it did not end within 5 s")
    assert after(GOOD, watch=decision.watch).step is Step.SERVE


def test_one_that_ended_is_started_again_at_once() -> None:
    """Whatever ended it: clients that come now find another."""
    ended = after(GOOD, GONE)

    assert (ended.step, ended.wait) == (Step.SUSPEND, 0.0)
    assert ended.reason == "the MPS control daemon ended (no such GPU); it is started again at once"
    assert after(GONE, watch=ended.watch).step is Step.START


def test_one_that_ends_again_is_started_after_a_pause() -> None:
    """Its end is told at once; it is started when the pause is over, not before."""
    ended = after(GOOD, GONE, GONE, GOOD, GONE)

    assert (ended.step, ended.wait) == (Step.SUSPEND, 1.0)
    assert ended.reason == "the MPS control daemon ended (no such GPU); it is tried again in 1 s"
    assert after(replace(GONE, at=0.5), watch=ended.watch) == Decision(Step.STAY, ended.watch, 0.5)
    assert after(replace(GONE, at=1.0), watch=ended.watch).step is Step.START


def test_the_pause_doubles_while_it_does_not_last() -> None:
    """One that ends again and again is started ever more rarely, at last once a minute."""
    watch, at, pauses = Watch(), 0.0, []
    for _ in range(9):
        decision = after(replace(GONE, at=at), replace(GOOD, at=at), watch=watch)
        decision = after(replace(GONE, at=at), watch=decision.watch)
        pauses.append(decision.wait)
        at, watch = at + decision.wait, decision.watch

    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_one_that_lasted_is_started_soon_again() -> None:
    """After a minute of good answers an end counts as the first."""
    watch = Watch(since=0.0, answered=True, ends=5)

    assert after(replace(GONE, at=59.0), watch=watch).wait == 16
    assert after(replace(GONE, at=60.0), watch=watch).wait == 0


def test_what_could_not_be_started_is_tried_again() -> None:
    """The problem is told with the time of the next attempt, which grows like that of an end."""
    first = not_started(after(GONE).watch, 0.0, "there is no such program", TIMING)
    second = not_started(first.watch, 1.0, "there is no such program", TIMING)

    assert (first.step, first.reason) == (
        Step.SUSPEND,
        "there is no such program; it is tried again in 1 s",
    )
    assert (first.wait, second.wait) == (1, 2)


def test_a_fault_suspends_until_it_is_over() -> None:
    """A control daemon whose server is in a fault answers, and is told of all the same."""
    faulty = after(GOOD, replace(GOOD, fault="a client's fault"))

    assert (faulty.step, faulty.reason) == (Step.SUSPEND, "a client's fault")
    assert after(GOOD, watch=faulty.watch).step is Step.SERVE


LOOKS = st.builds(
    Look,
    at=st.just(0.0),
    running=st.booleans(),
    problem=st.sampled_from(["", "no answer"]),
    fault=st.sampled_from(["", "a fault"]),
    used=st.booleans(),
)


@given(st.lists(st.tuples(LOOKS, st.floats(0, 100)), max_size=40))
def test_whatever_is_seen_clients_are_safe(seen: list[tuple[Look, float]]) -> None:
    """It is not ended while it may have clients, nor started twice, nor served unasked."""
    watch, at = Watch(), 0.0
    for look, pause in seen:
        decision = decide(watch, replace(look, at=at), TIMING)
        watch, at = decision.watch, at + pause

        assert decision.step is not Step.END or (look.running and not look.used)
        assert decision.step is not Step.START or not look.running
        assert decision.step is not Step.SERVE or (look.running and not look.problem)
        assert decision.step is not Step.SUSPEND or decision.reason
        assert 0 <= decision.wait <= TIMING.longest_pause


@pytest.mark.parametrize("ends", [0, 40, 10_000])
def test_the_pause_never_passes_its_bound(ends: int) -> None:
    """However often it ended, it is tried once a minute."""
    assert not_started(Watch(ends=ends), 0.0, "x", TIMING).wait <= TIMING.longest_pause

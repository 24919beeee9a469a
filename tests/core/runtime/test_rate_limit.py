"""Limits of repetition: back-off, a token bucket, and repeated problems in the log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.runtime.rate_limit import Backoff, LogOnce, TokenBucket


def test_a_burst_and_then_a_rate() -> None:
    """A full bucket gives its burst at once, then one token each time the rate adds one."""
    bucket = TokenBucket(burst=3, rate=2)

    assert [bucket.take(10) for _ in range(5)] == [True, True, True, False, False]
    assert bucket.wait(10) == 0.5
    assert [bucket.take(10.5), bucket.take(10.6)] == [True, False]


def test_reserving_says_how_long_to_wait() -> None:
    """A reservation always gets a token, later the more were reserved before."""
    bucket = TokenBucket(burst=1, rate=10)

    assert [round(bucket.reserve(0), 3) for _ in range(3)] == [0, 0.1, 0.2]


def test_after_a_rest_it_is_full() -> None:
    """A bucket that rested is full again."""
    bucket = TokenBucket(burst=2, rate=1)
    bucket.take(0)

    assert [bucket.is_full(0.5), bucket.is_full(1)] == [False, True]


@given(st.lists(st.floats(0, 2), max_size=50))
def test_never_more_than_burst_and_rate(pauses: list[float]) -> None:
    """At any time no more tokens are taken than burst and rate allow."""
    bucket, now, taken = TokenBucket(burst=3, rate=2), 0.0, 0
    for pause in pauses:
        now += pause
        taken += bucket.take(now)

    assert taken <= 3 + 2 * now + 1e-6


def test_delays_double_up_to_the_limit() -> None:
    """Each failure in a row doubles the delay, up to the limit."""
    backoff = Backoff(first=1, longest=5)

    assert [backoff.next() for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_success_resets_it() -> None:
    """After a success the next failure is the first again."""
    backoff = Backoff(first=1, longest=5)
    backoff.next()
    backoff.reset()

    assert backoff.next() == 1


@pytest.mark.parametrize("failures", [1, 3, 10])
def test_jitter_shortens_to_half_at_most(failures: int) -> None:
    """With jitter a delay lies between half of its value and the whole."""
    plain, spread = Backoff(1, 60), Backoff(1, 60, jitter=True)

    for _ in range(failures):
        pause = plain.next()
        assert pause / 2 <= spread.next() <= pause


def test_a_server_may_ask_for_more() -> None:
    """A delay is never shorter than what the server asked for."""
    assert Backoff(first=1, longest=5).next(at_least=30) == 30


def test_a_problem_is_new_once_for_each_subject() -> None:
    """The same problem of another subject, or another problem of the same, is new again."""
    logged = LogOnce()

    assert logged.is_new("gpu 0", "busy")
    assert not logged.is_new("gpu 0", "busy")
    assert logged.is_new("gpu 1", "busy")
    assert logged.is_new("gpu 0", "lost")


def test_a_problem_that_comes_back_is_new() -> None:
    """A problem that is over is forgotten; an unknown problem has no end."""
    logged = LogOnce()
    logged.is_new("gpu 0", "busy")

    assert [logged.clear("gpu 0"), logged.clear("gpu 0")] == [True, False]
    assert logged.is_new("gpu 0", "busy")

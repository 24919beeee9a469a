"""The token bucket."""

from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.runtime.rate_limit import TokenBucket


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

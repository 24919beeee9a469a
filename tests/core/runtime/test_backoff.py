"""Exponential back-off."""

import pytest

from metagpu.core.runtime.backoff import Backoff


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

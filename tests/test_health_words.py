"""What keeps a GPU from serving, in words."""

import pytest

from metagpu.core.facts import Fact, GpuFaulted
from metagpu.health_words import full_health
from tests.build import offer
from tests.reported import CORDON, ENDED, FRACTIONS, HELD, SUSPENDED, A, told


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ((), ["healthy"]),
        ((GpuFaulted(A.id, "XID 79", at=0),), ["XID 79, since 1970-01-01 00:00:00 UTC"]),
        ((CORDON,), ["cordoned: riser, since 1970-01-01 00:01:00 UTC"]),
        (
            (CORDON, SUSPENDED),
            [
                "cordoned: riser, since 1970-01-01 00:01:00 UTC",
                "mps suspended: no daemon, since 1970-01-01 00:02:00 UTC",
            ],
        ),
        ((HELD, ENDED), ["mps cleans it since 1970-01-01 00:03:00 UTC"]),
    ],
    ids=["healthy", "faulty", "cordoned", "suspended too", "being cleaned"],
)
def test_all_that_keeps_a_gpu_from_serving_is_told(
    facts: tuple[Fact, ...], lines: list[str]
) -> None:
    """Each reason has its line, with since when."""
    assert full_health(told(*facts)).plain.splitlines() == lines


def test_a_gpu_that_waits_says_for_whom() -> None:
    """A GPU cut anew is healthy and tells whose end it waits for."""
    waiting = full_health(told(HELD, offer(*FRACTIONS)))
    assert "is held by a pod that is being admitted" in waiting.plain

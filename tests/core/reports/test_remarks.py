"""The pure choice of the pod whose move makes room."""

import pytest

from metagpu.core.availability.exact import FreePart
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import RequestRule
from metagpu.core.model.shares import Holder
from metagpu.core.reports.remarks import LeasedPart, PartMove, best_move

WHOLE, ONE, ANY = RequestRule.WHOLE_GPUS, RequestRule.ONE_GPU, RequestRule.ANY


def parts(*free: int) -> list[FreePart]:
    """Return GPUs of 100 shares, of which so many are free."""
    return [FreePart(GpuId(str(n)), 100, number) for n, number in enumerate(free)]


def held(pod: str, gpu: int, shares: int) -> LeasedPart:
    """Return the shares of a pod's only container."""
    return LeasedPart(GpuId(str(gpu)), Holder("default", pod, "main"), shares)


def move(part: LeasedPart, target: int, largest: int) -> PartMove:
    """Return the move of a part to a GPU."""
    return PartMove(part, GpuId(str(target)), largest)


A, B, C = held("a", 0, 70), held("b", 1, 20), held("c", 1, 50)


@pytest.mark.parametrize(
    ("rule", "free", "holders", "expected"),
    [
        (WHOLE, parts(30, 30), [A, B, C], move(B, 0, 50)),
        (ONE, parts(30, 30), [A, B, C], move(B, 0, 50)),
        # After the move GPU 1 is idle: a request may take it and the rest of another.
        (WHOLE, parts(30, 80), [A, B], move(B, 0, 110)),
        # The fullest GPU that has room.
        (WHOLE, parts(40, 80, 25), [A, B], move(B, 2, 140)),
        # Nothing helps: no GPU has room, the request would not grow, or any shares go together.
        (WHOLE, parts(10, 10), [held("a", 0, 90), held("b", 1, 90)], None),
        (WHOLE, parts(100, 80), [B], None),
        (ANY, parts(30, 30), [A, B, C], None),
        (WHOLE, [], [], None),
        # The pod of two GPUs stays.
        (WHOLE, parts(30, 80), [held("a", 0, 70), held("a", 1, 20)], None),
    ],
)
def test_the_smallest_pod_that_helps_most_moves(
    rule: RequestRule, free: list[FreePart], holders: list[LeasedPart], expected: PartMove | None
) -> None:
    """The move makes room for the largest request, at the cost of the fewest shares."""
    assert best_move(rule, free, holders) == expected


def test_no_pod_moves_to_a_gpu_that_serves_all_its_containers() -> None:
    """A GPU without a free place for another container is no target."""
    full = FreePart(GpuId("0"), 100, 30, full=True)

    assert best_move(ONE, [full, *parts(0, 30)[1:]], [B, C]) is None

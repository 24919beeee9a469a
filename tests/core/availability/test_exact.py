"""The pure choice of the shares that are held back."""

import pytest

from metagpu.core.availability.exact import FreePart, held_back_gpus, largest_request
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import RequestRule

WHOLE, ONE, ANY = RequestRule.WHOLE_GPUS, RequestRule.ONE_GPU, RequestRule.ANY


def parts(*free: int, total: int = 100, full: tuple[int, ...] = ()) -> list[FreePart]:
    """Return GPUs of equal shares, of which so many are free; `full` ones take nobody more."""
    return [FreePart(GpuId(str(n)), total, number, n in full) for n, number in enumerate(free)]


def uneven(*pairs: tuple[int, int]) -> list[FreePart]:
    """Return GPUs by their numbers of free shares and of all shares."""
    return [FreePart(GpuId(str(n)), total, free) for n, (free, total) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("rule", "gpus", "held", "largest"),
    [
        (WHOLE, parts(30, 30), {"1"}, 30),
        (WHOLE, parts(30, 40), {"0"}, 40),
        (WHOLE, parts(30, 40, 100), {"0"}, 140),
        (WHOLE, parts(100, 100), set(), 200),
        (WHOLE, parts(0, 0), set(), 0),
        (WHOLE, parts(), set(), 0),
        (WHOLE, parts(100, 30, 20, 30), {"2", "3"}, 130),
        (ONE, parts(30, 40), {"0"}, 40),
        (ONE, parts(30, 40, 100), set(), 100),
        (ANY, parts(30, 40), set(), 70),
        # Without the largest GPU, no request between a smaller GPU and the largest one fits.
        (WHOLE, uneven((10, 80), (40, 40), (40, 40)), {"0", "2"}, 90),
        (WHOLE, uneven((10, 80), (40, 40)), {"0"}, 40),
        (WHOLE, uneven((80, 80), (40, 40), (15, 40), (20, 80)), {"2"}, 140),
        (ONE, uneven((10, 80), (40, 40), (40, 40)), {"0", "2"}, 40),
        (ONE, parts(100, 30, 40, full=(0, 2)), {"0", "2"}, 30),
        (ONE, parts(100, 30, 40, full=(2,)), {"2"}, 100),
    ],
)
def test_what_no_request_could_take_together_is_held_back(
    rule: RequestRule, gpus: list[FreePart], held: set[str], largest: int
) -> None:
    """The shares left on offer are those that a request of the whole sum would take."""
    assert held_back_gpus(rule, gpus) == held
    assert largest_request(rule, gpus) == largest


@pytest.mark.parametrize("rule", RequestRule)
def test_a_resource_without_a_gpu_gives_nothing(rule: RequestRule) -> None:
    """No request can be placed where no GPU has shares of a resource."""
    assert largest_request(rule, ()) == 0

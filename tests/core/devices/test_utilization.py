"""The utilization of a node that cluster-autoscaler reads from its ResourceSlices."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from metagpu.core.model.gpu import Gpu
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.autoscaler import IncompletePoolError, utilization
from tests.rigs.build import gpu
from tests.sim.allocation.slices import amount, claim, found, published, request

EIGHT = tuple(gpu(number) for number in range(8))
WHOLE = "{backend: whole}"
FRACTION = "{backend: fraction, sharesPerGpu: 100}"
MPS = "{backend: mps}"
TIMESLICE = "{backend: timeslice, replicas: 4}"
MIG = "{backend: mig, profiles: [1g.5gb, 3g.20gb]}"


def _pools(*backends: str) -> str:
    entries = (
        f"  - {{name: p{n}, gpus: {{index: {index}}}, api: dra, backends: [{those}]}}\n"
        for n, (index, _, those) in enumerate(backend.partition(": ") for backend in backends)
    )
    return "version: metagpu/v1\npools:\n" + "".join(entries)


def _utilization(text: str, gpus: Sequence[Gpu], *requests: Any) -> Fraction:  # noqa: ANN401
    """Return the utilization of a node whose claims have one request each."""
    slices = published(text, *gpus)
    claims = [claim(value, name=f"c{n}") for n, value in enumerate(requests)]
    results = found(slices, *claims)
    assert results is not None
    devices = [(result.id.pool, result.id.device) for part in results for result in part]
    return utilization((piece["spec"] for piece in slices), devices)


SHARE = request(kind="fraction", capacity=amount(shares=1))
ALL_SHARES = request(kind="fraction", capacity=amount(shares=100))
MIG_GPUS = tuple(mig_gpu(number) for number in range(2))
MIXED_GPUS = MIG_GPUS[0], EIGHT[1]


@pytest.mark.parametrize(
    ("backends", "gpus", "requests", "expected"),
    [
        ((f"0-7: {WHOLE}, {FRACTION}",), EIGHT, [], 0),
        ((f"0-7: {WHOLE}, {FRACTION}",), EIGHT, [SHARE], Fraction(1, 8)),
        ((f"0-7: {WHOLE}, {FRACTION}",), EIGHT, [SHARE] * 20, Fraction(1, 8)),
        ((f"0-7: {WHOLE}, {FRACTION}",), EIGHT, [ALL_SHARES, SHARE, request()], Fraction(3, 8)),
        ((f"0-7: {FRACTION}",), EIGHT, [SHARE], Fraction(1, 8)),
        ((f"0-7: {WHOLE}",), EIGHT, [request(count=3)], Fraction(3, 8)),
        ((f"0: {WHOLE}",), EIGHT[:1], [request()], 1),
        ((f"0: {WHOLE}, {FRACTION}",), EIGHT[:1], [request()], 1),
        ((f"0-7: {MPS}, {TIMESLICE}",), EIGHT, [request(kind="mps")] * 3, Fraction(1, 8)),
        ((f"0-1: {MIG}, {WHOLE}",), MIG_GPUS, [request(kind="mig")], Fraction(1, 2)),
        ((f"0-1: {MIG}, {WHOLE}",), MIG_GPUS, [request(kind="mig")] * 3, Fraction(1, 2)),
        ((f"0-1: {MIG}",), MIG_GPUS, [request(kind="mig", count=14)], 1),
        # A pool of whole GPUs beside a pool with fractions: both kinds count by GPU.
        ((f"0: {WHOLE}, {FRACTION}", f"1-7: {WHOLE}"), EIGHT, [SHARE], Fraction(1, 8)),
        ((f"0: {WHOLE}, {FRACTION}", f"1-7: {WHOLE}"), EIGHT, [SHARE, request()], Fraction(2, 8)),
        ((f"0: {MIG}", f"1: {WHOLE}, {MPS}"), MIXED_GPUS, [request(kind="mps")], Fraction(1, 2)),
    ],
)
def test_an_autoscaler_sees_the_part_of_gpus_in_use(
    backends: Sequence[str], gpus: Sequence[Gpu], requests: Sequence[Any], expected: Fraction
) -> None:
    """A GPU with a claim counts in full, an idle one not at all; devices to look at never do."""
    assert _utilization(_pools(*backends), gpus, *requests) == expected


def test_the_autoscaler_reads_no_incomplete_pool() -> None:
    """A slice of the newest generation that is missing is an error of the rule."""
    slices = published(_pools(f"0-7: {WHOLE}, {FRACTION}"), *EIGHT)
    with pytest.raises(IncompletePoolError):
        utilization([piece["spec"] for piece in slices[1:]], ())

"""A GPU as reports tell of it, after some facts."""

from typing import Any

from metagpu.core.facts import (
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpuKept,
    GpusFound,
    SharesGranted,
    SharesReleased,
)
from metagpu.core.layout import Layout
from metagpu.core.report import explanation
from tests.build import after, gpu, offer, share

A = gpu(0)
FRACTIONS = tuple(share(A, number) for number in range(4))
UNITS = tuple(share(A, number, backend="mps", resource="x.y/mps") for number in range(2))


def told(*facts: Fact) -> dict[str, Any]:
    """Tell of a GPU after some facts."""
    kept = GpuKept(A.id, "mps", readies=False, cleans=True, at=0)
    snapshot = after(GpusFound((A,), at=0), kept, offer(*FRACTIONS, *UNITS), *facts)
    [gpu] = explanation(snapshot, Layout((), {}, ()))["gpus"]
    return dict(gpu)


CORDON = GpuCordoned(A.id, "riser", at=60)
SUSPENDED = BackendSuspended(A.id, "mps", "no daemon", at=120)
HELD = SharesGranted(UNITS[:1], at=30)
ENDED = SharesReleased(UNITS[:1], at=180)

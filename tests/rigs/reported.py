"""A GPU as the reports show it, after some facts."""

from typing import Any

from metagpu.core.layout.layout import Layout
from metagpu.core.reports.status import explain_report
from metagpu.core.state.facts import (
    BackendAttached,
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpusFound,
    SharesClaimed,
    SharesReleased,
)
from tests.rigs.build import after, gpu, offer, share

A = gpu(0)
FRACTIONS = tuple(share(A, number) for number in range(4))
UNITS = tuple(share(A, number, backend="mps", resource="x.y/mps") for number in range(2))


def gpu_report(*facts: Fact) -> dict[str, Any]:
    """Return the report of a GPU after some facts."""
    kept = BackendAttached(A.id, "mps", needs_setup=False, needs_cleanup=True, at=0)
    snapshot = after(GpusFound((A,), at=0), kept, offer(*FRACTIONS, *UNITS), *facts)
    [gpu] = explain_report(snapshot, Layout((), {}, ()))["gpus"]
    return dict(gpu)


CORDON = GpuCordoned(A.id, "riser", at=60)
SUSPENDED = BackendSuspended(A.id, "mps", "no daemon", at=120)
HELD = SharesClaimed(UNITS[:1], at=30)
ENDED = SharesReleased(UNITS[:1], at=180)

"""Stories that are told before all others: those that found a fault, and one for planted ones."""

from collections.abc import Mapping, Sequence
from typing import Final

from tests.chaos.node import FRACTION, MPS_WHOLE, WHOLE
from tests.chaos.steps import Step


def _pod(resource: str, size: int, pause: float = 0.5) -> Step:
    return Step("pod", {"resource": resource, "size": size, "shape": "one"}, pause)


def _old_list(number: int) -> Step:
    return Step("old_list", {"number": number, "seconds": 1.0})


PLANTED: Final = (
    _pod(WHOLE, 1),
    _pod("nvidia.com/mig-1g.5gb", 1),
    _pod("nvidia.com/mig-2g.10gb", 1, 2.0),
    _old_list(5),
    Step("kubelet_restart", {"mood": "empty", "seconds": 4.0}),
    _old_list(5),
    Step("kill_beside_late_kubelet", {"mood": "late", "seconds": 4.0}),
    _old_list(5),
    _pod(MPS_WHOLE, 1),
    _pod(FRACTION, 4),
    Step("cordon", {"gpu": 1}),
    _old_list(5),
    _old_list(800),
    Step("work", {"number": 0, "percent": 90, "count": 3, "stubborn": 0}, 1.0),
    Step("provisioning", {"removal_failures": 1}),
    Step("end", {"number": 1}, 3.0),
)
"""Finds each of these: shares that are offered before the leases are known, leases that end with
one empty list, backends that do not exclude each other, a cordon that Allocate ignores, MIG
instances that a start removes, processes that end within their limit, and an instance that no
longer counts as ours after a removal that failed halfway."""
KEPT: Final[Mapping[str, Sequence[Step]]] = {"planted": PLANTED}

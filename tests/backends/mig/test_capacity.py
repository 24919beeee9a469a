"""The free capacity of GPUs in MIG mode, for operators."""

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder, ProvisionedState, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.status import explain_report
from metagpu.core.state.facts import (
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    LeasesObserved,
    ProvisioningReported,
    SharesClaimed,
)
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import after, layout_of

A, B = mig_gpu(0), mig_gpu(1)
LAYOUT = layout_of(
    A,
    B,
    text=(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, "
        "profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]}]}]"
    ),
)


def held(of: GpuId, *slots: str) -> dict[ShareId, Holder]:
    """Report pods that hold some instances; a pod has its instance's name."""
    return {ShareId(f"{of}::{slot}"): Holder("default", slot, "main") for slot in slots}


def capacity_lines(snapshot: Snapshot) -> list[str]:
    """Return the operator's lines."""
    return [it.text for it in explain_report(snapshot, LAYOUT).remarks]


def node(*holders: dict[ShareId, Holder]) -> Snapshot:
    """Return the snapshot while pods hold these instances."""
    everyone = {share: holder for each in holders for share, holder in each.items()}
    return after(GpusFound((A, B), at=0), LAYOUT.offer_fact, LeasesObserved(everyone, at=5))


def test_the_largest_instance_that_fits_is_named() -> None:
    """Each GPU's largest free profile is named; blocked slots and claims count as taken."""
    snapshot = node(held(A.id, "3g.20gb@0"))
    assert capacity_lines(snapshot) == [
        "GPU 0: the largest instance that fits is 3g.20gb",
        "GPU 1: the largest instance that fits is 7g.40gb",
    ]

    claimed = next(it for it in LAYOUT.shares if it.id == f"{A.id}::2g.10gb@4")
    blocked = ProvisionedState(blocked={f"s{n}": "foreign" for n in range(8)})
    snapshot = after(
        SharesClaimed((claimed,), at=6),
        ProvisioningReported(B.id, "mig", blocked, at=6),
        since=snapshot,
    )
    assert capacity_lines(snapshot) == [
        "GPU 0: the largest instance that fits is 1g.5gb",
        "GPU 1: the GPU is full",
    ]


def test_the_helpful_move_is_named() -> None:
    """A profile that fits nowhere has the pod to move, its place and its target, if any."""
    snapshot = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "2g.10gb@0", "3g.20gb@4"))
    assert capacity_lines(snapshot) == [
        "GPU 0: the largest instance that fits is 2g.10gb",
        "GPU 1: the largest instance that fits is 2g.10gb",
        (
            "if default/1g.5gb@0 (main) moved from 1g.5gb@0 of GPU 0 to 1g.5gb@6 of GPU 0, a "
            "3g.20gb would fit on GPU 0"
        ),
    ]
    assert len(capacity_lines(node(held(A.id, "7g.40gb@0"), held(B.id, "7g.40gb@0")))) == 2


def test_a_fixed_layout_has_no_capacity_lines() -> None:
    """GPUs with a fixed layout have all instances that they shall have."""
    pool = "{name: a, backends: [{backend: mig, layout: {1g.5gb: 7}}]}"
    fixed = layout_of(A, text=f"version: metagpu/v1\npools: [{pool}]")
    assert fixed.free_capacity(after(GpusFound((A,), at=0), fixed.offer_fact)) == []


def test_free_capacity_is_reported_in_numbers() -> None:
    """Each GPU has its largest profile with slices, its free slices, and the helpful move."""
    snapshot = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "2g.10gb@0", "3g.20gb@4"))
    explained = explain_report(snapshot, LAYOUT)
    first, second = (plain_report(it.free_capacity) for it in explained.gpus if it.free_capacity)

    move = {
        "profile": "3g.20gb",
        "freedSlot": "3g.20gb@0",
        "holder": "default/1g.5gb@0 (main)",
        "from": "1g.5gb@0",
        "to": "1g.5gb@6",
        "toGpu": 0,
    }
    assert first == {
        "largest": "2g.10gb",
        "largestSlices": 2,
        "freeSlices": 6,
        "slices": 8,
        "moves": [move],
    }
    assert second == {**first, "freeSlices": 2, "moves": []}
    empty = explain_report(node(), LAYOUT).gpus[0].free_capacity
    assert empty is not None
    assert (empty.largest, empty.largest_slices, empty.free_slices) == ("7g.40gb", 8, 8)


def test_a_full_gpu_has_no_largest_profile() -> None:
    """On a full GPU the largest profile has no name and no slices, whatever is free."""
    [first, _] = LAYOUT.free_capacity(node(held(A.id, "7g.40gb@0")))

    assert (first.largest, first.largest_slices, first.free_slices) == (None, 0, 0)


def test_an_unavailable_gpu_has_no_capacity() -> None:
    """A cordoned or faulty GPU is named so, and is the target of no move."""
    crowded = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "1g.5gb@0", "1g.5gb@4"))
    snapshot = after(
        GpuFaulted(A.id, "XID 79", at=6), GpuCordoned(B.id, "riser", at=6), since=crowded
    )
    first, second = LAYOUT.free_capacity(snapshot)

    assert (first.largest, first.closed, first.free_slices) == (None, True, 6)
    assert (second.largest, second.closed, second.moves) == (None, True, ())
    assert capacity_lines(snapshot) == [
        "GPU 0: pods get no MIG instances now",
        "GPU 1: pods get no MIG instances now",
    ]

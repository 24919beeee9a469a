"""What an operator is told of what is left of GPUs in MIG's hands."""

from metagpu.core.facts import (
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    LeasesObserved,
    SharesGranted,
    StockTold,
)
from metagpu.core.gpu import GpuId
from metagpu.core.model import Holder, ShareId, Stock
from metagpu.core.report import explanation
from metagpu.core.snapshot import Snapshot
from tests.backends.mig.gpus import mig_gpu
from tests.build import after, laid_out

A, B = mig_gpu(0), mig_gpu(1)
LAYOUT = laid_out(
    A,
    B,
    text=(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, "
        "profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]}]}]"
    ),
)


def held(of: GpuId, *slots: str) -> dict[ShareId, Holder]:
    """Let a pod hold each of some instances; it is called as its instance."""
    return {ShareId(f"{of}::{slot}"): Holder("default", slot, "main") for slot in slots}


def told(snapshot: Snapshot) -> list[str]:
    """Give what is told."""
    found: list[str] = explanation(snapshot, LAYOUT)["remarks"]
    return found


def node(*holders: dict[ShareId, Holder]) -> Snapshot:
    """Give what is known when pods hold these."""
    everyone = {share: holder for each in holders for share, holder in each.items()}
    return after(GpusFound((A, B), at=0), LAYOUT.offered, LeasesObserved(everyone, at=5))


def test_the_largest_instance_that_fits_is_named() -> None:
    """Of each GPU; what is taken otherwise, or by a container that is being admitted, counts."""
    snapshot = node(held(A.id, "3g.20gb@0"))
    assert told(snapshot) == [
        "GPU 0: the largest instance that fits is 3g.20gb",
        "GPU 1: the largest instance that fits is 7g.40gb",
    ]

    claimed = next(it for it in LAYOUT.shares if it.id == f"{A.id}::2g.10gb@4")
    blocked = Stock(blocked={f"s{n}": "foreign" for n in range(8)})
    snapshot = after(
        SharesGranted((claimed,), at=6), StockTold(B.id, "mig", blocked, at=6), since=snapshot
    )
    assert told(snapshot) == [
        "GPU 0: the largest instance that fits is 1g.5gb",
        "GPU 1: it is full",
    ]


def test_the_pod_is_named_whose_move_would_help() -> None:
    """Of what fits nowhere, where it is and where it could be; nothing where no move helps."""
    snapshot = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "2g.10gb@0", "3g.20gb@4"))
    assert told(snapshot) == [
        "GPU 0: the largest instance that fits is 2g.10gb",
        "GPU 1: the largest instance that fits is 2g.10gb",
        (
            "if default/1g.5gb@0 (main) moved from 1g.5gb@0 of GPU 0 to 1g.5gb@6 of GPU 0, a "
            "3g.20gb would fit on GPU 0"
        ),
    ]
    assert len(told(node(held(A.id, "7g.40gb@0"), held(B.id, "7g.40gb@0")))) == 2


def test_a_fixed_layout_has_nothing_to_tell() -> None:
    """What its GPUs have is what they shall have."""
    pool = "{name: a, backends: [{backend: mig, layout: {1g.5gb: 7}}]}"
    fixed = laid_out(A, text=f"version: metagpu/v1\npools: [{pool}]")
    assert fixed.rooms(after(GpusFound((A,), at=0), fixed.offered)) == []


def test_room_is_told_in_numbers() -> None:
    """By GPU: the largest profile and its slices, what is free, and the move that would help."""
    snapshot = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "2g.10gb@0", "3g.20gb@4"))
    first, second = (gpu["room"] for gpu in explanation(snapshot, LAYOUT)["gpus"])

    move = {
        "profile": "3g.20gb",
        "opens": "3g.20gb@0",
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
    empty = explanation(node(), LAYOUT)["gpus"][0]["room"]
    assert (empty["largest"], empty["largestSlices"], empty["freeSlices"]) == ("7g.40gb", 8, 8)


def test_a_full_gpu_has_no_largest_profile() -> None:
    """What does not fit has no name and no slices, whatever is free."""
    [first, _] = LAYOUT.rooms(node(held(A.id, "7g.40gb@0")))

    assert (first.largest, first.largest_slices, first.free_slices) == (None, 0, 0)


def test_a_gpu_that_gives_nothing_has_no_room() -> None:
    """A GPU that is cordoned or out of service is named so, and is nobody's way out."""
    crowded = node(held(A.id, "1g.5gb@0", "1g.5gb@4"), held(B.id, "1g.5gb@0", "1g.5gb@4"))
    snapshot = after(
        GpuFaulted(A.id, "XID 79", at=6), GpuCordoned(B.id, "riser", at=6), since=crowded
    )
    first, second = LAYOUT.rooms(snapshot)

    assert (first.largest, first.shut, first.free_slices) == (None, True, 6)
    assert (second.largest, second.shut, second.reliefs) == (None, True, ())
    assert told(snapshot) == [
        "GPU 0: it gives no instances now",
        "GPU 1: it gives no instances now",
    ]

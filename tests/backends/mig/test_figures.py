"""What monitoring is told of GPUs in MIG's hands, in numbers."""

import pytest

from metagpu.backends.mig.figures import KINDS, PLACEABLE
from metagpu.core.facts import (
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpusFound,
    InstanceFaulted,
    LeasesObserved,
    StockTold,
)
from metagpu.core.gpu import GpuId
from metagpu.core.layout import Layout
from metagpu.core.model import Holder, Made, ShareId, Stock
from metagpu.core.snapshot import Snapshot
from tests.backends.mig.gpus import mig_gpu
from tests.build import after, laid_out

A, B = mig_gpu(0), mig_gpu(1)
POOL = "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, OPTIONS}]}]\n"
ON_DEMAND = laid_out(
    A, B, text=POOL.replace("OPTIONS", "profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]")
)
HOLDER = Holder("default", "train", "main")


def figures(layout: Layout, snapshot: Snapshot, of: GpuId = A.id) -> dict[tuple[str, ...], float]:
    """Give the figures of a GPU by name and labels; none may be there twice."""
    found: dict[tuple[str, ...], float] = {}
    for it in layout.figures(snapshot):
        assert it.kind in KINDS
        assert len(it.labels) == len(it.kind.labels)
        if it.gpu == of:
            key = (it.kind.name, *it.labels)
            assert key not in found
            found[key] = it.value
    return found


def node(*slots: str, layout: Layout = ON_DEMAND) -> Snapshot:
    """Give what is known when pods hold these instances of A."""
    holders = {ShareId(f"{A.id}::{slot}"): HOLDER for slot in slots}
    return after(GpusFound((A, B), at=0), layout.offered, LeasesObserved(holders, at=5))


def test_an_empty_gpu_has_room_for_everything() -> None:
    """Nothing is made, all is free, nothing is in pieces."""
    told = figures(ON_DEMAND, node())

    assert told["mig_free_slices",] == told["mig_largest_placeable_slices",] == 8
    assert told["mig_placeable_instances", "1g.5gb"] == 7
    assert told["mig_placeable_instances", "7g.40gb"] == 1
    assert told["mig_fragmentation_ratio",] == 0
    assert not any(n for name, n in told.items() if name[0] == "mig_instances")
    assert ("mig_instances", "2g.10gb", "warm") in told


def test_free_slices_that_lie_apart_are_fragments() -> None:
    """Two pods in the wrong places: six slices are free, and no 3g, which wants four, fits."""
    told = figures(ON_DEMAND, node("1g.5gb@0", "1g.5gb@4"))

    assert told["mig_free_slices",] == 6
    assert told["mig_largest_placeable_slices",] == 2
    assert told["mig_placeable_instances", "3g.20gb"] == 0
    assert told["mig_fragmentation_ratio",] == 0.5
    assert figures(ON_DEMAND, node("1g.5gb@0", "1g.5gb@4"), B.id)["mig_fragmentation_ratio",] == 0


def test_a_full_gpu_is_not_in_pieces() -> None:
    """Nothing fits, and nothing could."""
    told = figures(ON_DEMAND, node("7g.40gb@0"))

    assert told["mig_free_slices",] == told["mig_largest_placeable_slices",] == 0
    assert told["mig_fragmentation_ratio",] == 0


@pytest.mark.parametrize(
    "facts",
    [
        (),
        (GpuCordoned(A.id, "fan", at=6),),
        (StockTold(B.id, "mig", Stock(blocked={"s0": "foreign", "s5": "foreign"}), at=6),),
        (BackendSuspended(B.id, "mig", "MIG mode is off", at=6),),
    ],
)
@pytest.mark.parametrize("profiles", ["1g.5gb, 2g.10gb, 3g.20gb", "2g.10gb", "7g.40gb"])
def test_numbers_are_those_of_status(profiles: str, facts: tuple[Fact, ...]) -> None:
    """What `metagpu status` says of the room on a GPU, monitoring says too."""
    layout = laid_out(A, B, text=POOL.replace("OPTIONS", f"profiles: [{profiles}]"))
    slot = next(share.id for share in layout.shares).partition("::")[2]
    snapshot = after(*facts, since=node(slot, layout=layout))

    for room in layout.rooms(snapshot):
        told = figures(layout, snapshot, room.gpu.id)
        assert told["mig_largest_placeable_slices",] == room.largest_slices
        assert told["mig_free_slices",] == room.free_slices
        placeable = {name[1] for name, n in told.items() if n and name[0] == PLACEABLE.name}
        assert (room.largest is not None) == bool(placeable)
        assert room.largest is None or room.largest in placeable


def test_instances_by_what_becomes_of_them() -> None:
    """Held, kept for the next, or looked at; of replicas one holder is enough."""
    layout = laid_out(
        A,
        B,
        text=POOL.replace(
            "OPTIONS",
            "layout: {2g.10gb: 1, 1g.5gb: 3}, replicas: {1g.5gb: 2}",
        ),
    )
    [two, *ones] = sorted({share.id for share in layout.shares if share.gpu == A.id}, reverse=True)
    pairs = [ones[at : at + 2] for at in range(0, 6, 2)]
    made = {two: Made("MIG-two", 1, 0)}
    for at, pair in enumerate(pairs):
        made |= {share: Made(f"MIG-{at}", 2 + at, 0, idle=at == 2) for share in pair}
    holders = {pairs[0][0]: HOLDER}
    snapshot = after(
        GpusFound((A, B), at=0),
        layout.offered,
        LeasesObserved(holders, at=5),
        StockTold(A.id, "mig", Stock(made=made), at=6),
    )
    told = figures(layout, snapshot)

    counts = {name[1:]: n for name, n in told.items() if name[0] == "mig_instances" and n}
    assert counts == {
        ("2g.10gb", "checked"): 1,
        ("1g.5gb", "held"): 1,
        ("1g.5gb", "checked"): 1,
        ("1g.5gb", "warm"): 1,
    }
    ill = after(InstanceFaulted(A.id, "MIG-2", "XID 94", at=7), since=snapshot)
    assert figures(layout, ill)["mig_instances", "1g.5gb", "broken"] == 1
    assert {name[0] for name in told} == {"mig_instances"}  # of a layout, nothing more is made

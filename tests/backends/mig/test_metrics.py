"""The metrics of GPUs in MIG mode."""

import pytest

from metagpu.backends.mig.capacity import KINDS
from metagpu.core.layout.layout import Layout
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import HardwareDevice, Holder, ProvisionedState, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpusFound,
    InstanceFaulted,
    LeasesObserved,
    ProvisioningReported,
)
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import after, layout_of

A, B = mig_gpu(0), mig_gpu(1)
POOL = "version: metagpu/v1\npools: [{name: a, backends: [{backend: mig, OPTIONS}]}]\n"
ON_DEMAND = layout_of(
    A, B, text=POOL.replace("OPTIONS", "profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]")
)
HOLDER = Holder("default", "train", "main")


def metrics_of(
    layout: Layout, snapshot: Snapshot, of: GpuId = A.id
) -> dict[tuple[str, ...], float]:
    """Return the metrics of a GPU by name and labels; fail for duplicates."""
    found: dict[tuple[str, ...], float] = {}
    for metric in layout.metrics(snapshot):
        assert metric.kind in KINDS
        assert len(metric.labels) == len(metric.kind.labels)
        if metric.gpu == of:
            key = (metric.kind.name, *metric.labels)
            assert key not in found
            found[key] = metric.value
    return found


def node(*slots: str, layout: Layout = ON_DEMAND) -> Snapshot:
    """Return the snapshot while pods hold these instances of A."""
    holders = {ShareId(f"{A.id}::{slot}"): HOLDER for slot in slots}
    return after(GpusFound((A, B), at=0), layout.offer_fact, LeasesObserved(holders, at=5))


def test_an_empty_gpu_has_capacity_for_all_profiles() -> None:
    """An empty GPU has no instance, all slices free, and no fragmentation."""
    metrics = metrics_of(ON_DEMAND, node())

    assert metrics["mig_free_slices",] == metrics["mig_largest_placeable_slices",] == 8
    assert metrics["mig_fragmentation_ratio",] == 0
    assert not any(name[0] == "mig_instances" for name in metrics)


def test_free_slices_that_lie_apart_are_fragments() -> None:
    """Two pods in bad places leave six slices free, and no place for 3g, which needs four."""
    metrics = metrics_of(ON_DEMAND, node("1g.5gb@0", "1g.5gb@4"))

    assert metrics["mig_free_slices",] == 6
    assert metrics["mig_largest_placeable_slices",] == 2
    assert metrics["mig_fragmentation_ratio",] == 0.5
    assert (
        metrics_of(ON_DEMAND, node("1g.5gb@0", "1g.5gb@4"), B.id)["mig_fragmentation_ratio",] == 0
    )


def test_a_full_gpu_is_not_fragmented() -> None:
    """A full GPU has no fragmentation: a better order would place nothing more."""
    metrics = metrics_of(ON_DEMAND, node("7g.40gb@0"))

    assert metrics["mig_free_slices",] == metrics["mig_largest_placeable_slices",] == 0
    assert metrics["mig_fragmentation_ratio",] == 0


@pytest.mark.parametrize(
    "facts",
    [
        (),
        (GpuCordoned(A.id, "fan", at=6),),
        (
            ProvisioningReported(
                B.id, "mig", ProvisionedState(blocked={"s0": "foreign", "s5": "foreign"}), at=6
            ),
        ),
        (BackendSuspended(B.id, "mig", "MIG mode is off", at=6),),
    ],
)
@pytest.mark.parametrize("profiles", ["1g.5gb, 2g.10gb, 3g.20gb", "2g.10gb", "7g.40gb"])
def test_numbers_are_those_of_status(profiles: str, facts: tuple[Fact, ...]) -> None:
    """The metrics of free capacity equal those of `metagpu status`."""
    layout = layout_of(A, B, text=POOL.replace("OPTIONS", f"profiles: [{profiles}]"))
    slot = next(share.id for share in layout.shares).partition("::")[2]
    snapshot = after(*facts, since=node(slot, layout=layout))

    for room in layout.free_capacity(snapshot):
        metrics = metrics_of(layout, snapshot, room.gpu.id)
        assert metrics["mig_largest_placeable_slices",] == room.largest_slices
        assert metrics["mig_free_slices",] == room.free_slices


def test_instances_are_counted_by_state() -> None:
    """Instances are leased, idle or checked; one holder of replicas is enough."""
    layout = layout_of(
        A,
        B,
        text=POOL.replace(
            "OPTIONS",
            "layout: {2g.10gb: 1, 1g.5gb: 3}, replicas: {1g.5gb: 2}",
        ),
    )
    [two, *ones] = sorted({share.id for share in layout.shares if share.gpu == A.id}, reverse=True)
    pairs = [ones[at : at + 2] for at in range(0, 6, 2)]
    made = {two: HardwareDevice("MIG-two", 1, 0)}
    for at, pair in enumerate(pairs):
        made |= {share: HardwareDevice(f"MIG-{at}", 2 + at, 0, idle=at == 2) for share in pair}
    holders = {pairs[0][0]: HOLDER}
    snapshot = after(
        GpusFound((A, B), at=0),
        layout.offer_fact,
        LeasesObserved(holders, at=5),
        ProvisioningReported(A.id, "mig", ProvisionedState(devices=made), at=6),
    )
    metrics = metrics_of(layout, snapshot)

    counts = {name[1:]: n for name, n in metrics.items() if name[0] == "mig_instances"}
    assert counts == {
        ("2g.10gb", "released"): 1,
        ("1g.5gb", "held"): 1,
        ("1g.5gb", "released"): 1,
        ("1g.5gb", "warm"): 1,
    }
    ill = after(InstanceFaulted(A.id, "MIG-2", "XID 94", at=7), since=snapshot)
    assert metrics_of(layout, ill)["mig_instances", "1g.5gb", "faulty"] == 1
    assert {name[0] for name in metrics} == {"mig_instances"}  # of a layout, no other metric exists

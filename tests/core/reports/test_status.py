"""A snapshot as plain data for `explain` and `status`."""

import time
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.errors import MetagpuError
from metagpu.core.layout.layout import Layout
from metagpu.core.model.gpu import Connection, PciPath, Topology
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.status import explain_report as explain
from metagpu.core.reports.status import find_gpu, lease_reports
from metagpu.core.state.facts import (
    BackendAttached,
    GpuFaulted,
    LeasesObserved,
    PodsListed,
    SharesClaimed,
    SharesReleased,
    TopologyRead,
)
from tests.rigs.build import METAGPU, after, gpu, offer, offered, refusal, share

A, B = gpu(0, numa_node=1), gpu(1)
ALICE = Holder("team", "alice", "main")


def explain_report(snapshot: Snapshot, layout: Layout) -> dict[str, Any]:
    """Return an explanation as JSON has it."""
    return plain_report(explain(snapshot, layout))


def leases_of(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the leases as JSON has them."""
    return [plain_report(report) for report in lease_reports(snapshot)]


HEALTHY = {
    "product": "NVIDIA A100-SXM4-40GB",
    "memoryMiB": 40960,
    "healthy": True,
    "reason": "",
    "since": "1970-01-01T00:00:00+00:00",
    "recovery": None,
    "backends": ["fraction"],
    "owner": None,
    "turn": None,
    "cleaning": {},
    "suspended": {},
    "cordon": None,
    "unheard": None,
    "faults": [],
    "devices": [],
    "blocked": [],
    "paused": [],
    "api": "device-plugin",
    "waitsFor": None,
    "nvlinkPeers": [],
    "pool": "all",
    "poolReason": "all GPUs",
    "freeCapacity": None,
}
"""What is the same of every healthy and idle GPU."""


def test_an_explanation_has_offers_and_reasons() -> None:
    """Capacity counts all shares, allocatable those of healthy GPUs; each GPU is explained."""
    layout, snapshot = offered(A, B)
    held = layout.shares[:4]
    snapshot = after(SharesClaimed(held, at=5), GpuFaulted(B.id, "XID 79", at=3600), since=snapshot)
    report = explain_report(snapshot, layout)

    assert report["resources"] == {METAGPU: {"capacity": 20, "allocatable": 10}}
    first, second = report["gpus"]
    assert first == HEALTHY | {
        "index": 0,
        "uuid": A.id,
        "pciBusId": "0000:00:00.0",
        "numaNode": 1,
        "owner": "fraction",
        "shares": {METAGPU: {"capacity": 10, "held": 4, "free": 6}},
    }
    assert second == HEALTHY | {
        "index": 1,
        "uuid": B.id,
        "pciBusId": "0000:01:00.0",
        "numaNode": None,
        "healthy": False,
        "reason": "XID 79",
        "since": "1970-01-01T01:00:00+00:00",
        "shares": {METAGPU: {"capacity": 10, "held": 0, "free": 0, "reason": "unhealthy"}},
    }


def test_what_is_held_back_is_reported_with_the_reason() -> None:
    """Free shares that no request could take with the rest are counted, and explained."""
    layout, snapshot = offered(A, B)
    held = (*layout.shares[:4], *layout.shares[10:15])
    report = explain_report(after(SharesClaimed(held, at=5), since=snapshot), layout)

    assert report["resources"] == {METAGPU: {"capacity": 20, "allocatable": 15}}
    assert report["offers"] == {
        METAGPU: {"free": 11, "heldBack": 5, "largestRequest": 6, "requestRule": "whole_gpus"}
    }
    text = (
        "GPU 1: 5 free shares of cnvrg.io/metagpu are hidden from the scheduler: one pod can "
        "get at most 6 now"
    )
    assert report["remarks"] == [{"reason": "shares_held_back", "gpu": 1, "text": text}]


def test_the_move_that_makes_room_is_reported() -> None:
    """Beside what is held back stands the pod whose move lets a larger request fit."""
    layout, snapshot = offered(A, B)
    first, second = layout.shares[:10], layout.shares[10:]
    held = {"big": first[:6], "small": first[6:8], "other": second[:7]}
    snapshot = after(
        *(SharesClaimed(shares, at=5) for shares in held.values()),
        LeasesObserved(
            {other.id: Holder("ns", pod, "main") for pod in held for other in held[pod]}, 6
        ),
        since=snapshot,
    )

    _, move = explain_report(snapshot, layout)["remarks"]
    assert (move["reason"], move["gpu"]) == ("move_for_request", None)
    assert move["text"] == (
        "if ns/small (main) moved with its 2 cnvrg.io/metagpu from GPU 0 to GPU 1, a request of 4 "
        "would fit"
    )


def test_unavailable_shares_are_not_allocatable() -> None:
    """A share that another backend's lease excludes counts as capacity alone."""
    layout, snapshot = offered(A)
    slices = (share(A, 0, backend="slice", resource="example.com/slice"),)
    snapshot = after(
        offer(*layout.shares, *slices), SharesClaimed(layout.shares[:1], at=1), since=snapshot
    )

    assert explain_report(snapshot, layout)["resources"] == {
        METAGPU: {"capacity": 10, "allocatable": 10},
        "example.com/slice": {"capacity": 1, "allocatable": 0},
    }


def test_devices_of_dra_are_counted_by_type() -> None:
    """A device with a held share is free in part; one of a faulty GPU, or held alone, is not."""
    text = """
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends: [{backend: fraction, sharesPerGpu: 10}, {backend: whole}]
"""
    layout, snapshot = offered(A, B, text=text)
    [first, *_] = layout.shares
    snapshot = after(
        SharesClaimed((first,), at=5), GpuFaulted(B.id, "XID 79", at=3600), since=snapshot
    )
    assert explain_report(snapshot, layout)["devices"] == {
        "fraction": {"devices": 2, "free": 1, "largest": {"shares": 9}},
        "gpu": {"devices": 2, "free": 0, "largest": {}},
    }


def test_a_new_gpu_waits_for_the_next_layout() -> None:
    """A GPU found after the last layout has no pool yet."""
    _, snapshot = offered(A)
    [report] = explain_report(snapshot, Layout((), {}, ()))["gpus"]

    assert (report["pool"], report["poolReason"]) == (None, "not assigned yet")


def test_an_explanation_has_the_connections_of_gpus() -> None:
    """Each GPU is listed with its NVLink peers, each pair with its best connection."""
    third = gpu(2)
    read = Topology(
        {
            frozenset((A.id, B.id)): Connection(PciPath.SWITCH, nvlinks=4),
            frozenset((A.id, third.id)): Connection(PciPath.SYSTEM, nvlinks=0),
        }
    )
    layout, snapshot = offered(A, B, third)
    report = explain_report(after(TopologyRead(read), since=snapshot), layout)

    assert [gpu["nvlinkPeers"] for gpu in report["gpus"]] == [[1], [0], []]
    assert report["topology"] == [["X", "NV4", "SYS"], ["NV4", "X", "?"], ["SYS", "?", "X"]]


def test_a_status_counts_leases() -> None:
    """Leases are counted for each resource, GPU and holder; one without holder has `None`."""
    layout, snapshot = offered(A)
    snapshot = after(
        SharesClaimed(layout.shares[:3], at=5),
        LeasesObserved({part.id: ALICE for part in layout.shares[:2]}, at=6),
        since=snapshot,
    )
    assert leases_of(snapshot) == [
        {
            "resource": METAGPU,
            "gpu": 0,
            "uuid": A.id,
            "shares": 2,
            "part": 0.2,
            "holder": "team/alice (main)",
        },
        {"resource": METAGPU, "gpu": 0, "uuid": A.id, "shares": 1, "part": 0.1, "holder": None},
    ]


def test_a_blocker_names_the_backend_that_has_the_gpu() -> None:
    """A share that another backend's lease excludes is refused with that backend's name."""
    layout, snapshot = offered(A)
    snapshot = after(SharesClaimed(layout.shares[:1], at=1), since=snapshot)

    other = share(A, 0, backend="whole", resource="a.b/c")
    snapshot = after(offer(*layout.shares, other), since=snapshot)
    assert refusal(snapshot.gpus[A.id], other).endswith(f"GPU 0 ({A.id}) is in use by fraction")


def test_a_status_has_the_pod_metadata_of_a_holder() -> None:
    """Leases have uid, owner and phase of their pod where the API server reported them."""
    layout, snapshot = offered(A)
    pod = KnownPod("u", "team", "alice", "Running", "Job/train")
    holders = {layout.shares[0].id: ALICE, layout.shares[1].id: replace(ALICE, pod="bob")}
    snapshot = after(LeasesObserved(holders, at=1), PodsListed((pod,)), since=snapshot)
    alice, bob = leases_of(snapshot)

    assert (alice["podUid"], alice["podOwner"], alice["podPhase"]) == ("u", "Job/train", "Running")
    assert bob.keys() == {"resource", "gpu", "uuid", "shares", "part", "holder"}


def test_leases_of_an_earlier_configuration_are_in_no_capacity() -> None:
    """After a reload to fewer shares, no more of them are held than there are."""
    layout, snapshot = offered(A)
    held = after(SharesClaimed(layout.shares[:9], at=5), since=snapshot)
    snapshot = after(offer(*layout.shares[:4]), since=held)
    report = explain_report(snapshot, layout)

    assert report["gpus"][0]["shares"][METAGPU] == {"capacity": 4, "held": 4, "free": 0}
    assert sum(lease["shares"] for lease in leases_of(snapshot)) == 9


@pytest.mark.parametrize(
    ("holder", "who"), [(ALICE, "team/alice (main)"), (None, "a pod that is being admitted")]
)
def test_a_blocker_names_the_pod_of_an_orphaned_lease(holder: Holder | None, who: str) -> None:
    """A GPU with new shares waits for the pods of its old shares, and names them."""
    layout, snapshot = offered(A)
    [held, *_] = layout.shares
    observed = {held.id: holder} if holder is not None else {}
    snapshot = after(
        SharesClaimed((held,), at=5),
        LeasesObserved(observed, at=6),
        offer(share(A, 0, resource="a.b/c")),
        since=snapshot,
    )

    assert explain_report(snapshot, layout)["gpus"][0]["waitsFor"] == (
        f"GPU 0 ({A.id}) is held by {who} under cnvrg.io/metagpu, which is not on offer as it was "
        "granted; the GPU waits for the end of that pod"
    )


@pytest.mark.parametrize("name", ["1", B.id, "0000:01:00.0", "00000000:01:00.0"])
def test_a_gpu_is_found_by_index_uuid_and_bus_id(name: str) -> None:
    """People name a GPU by its number or place, programs by its uuid."""
    _, snapshot = offered(A, B)

    assert find_gpu(snapshot, name) == B.id


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    """The error for an unknown GPU lists the known names."""
    _, snapshot = offered(A, B)

    with pytest.raises(MetagpuError, match=r"^there is no GPU '7' here; there are: 0, 1$"):
        find_gpu(snapshot, "7")
    for loose in ("1:01:00.0", "0x0:01:00.0", " 0000:01:00.0"):  # near a bus id, and none
        with pytest.raises(MetagpuError, match="there is no GPU"):
            find_gpu(snapshot, loose)
    with pytest.raises(MetagpuError, match=r"^there is no GPU '' here; there are: none$"):
        find_gpu(Snapshot(), "")


def test_a_cleanup_has_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleanup that began 100 s ago by the event loop's clock did so by the time of day."""
    layout, snapshot = offered(A)
    held = layout.shares[:1]
    attached = BackendAttached(A.id, "fraction", needs_setup=False, needs_cleanup=True, at=1)
    claimed = SharesClaimed(held, at=2)
    snapshot = after(attached, claimed, SharesReleased(held, at=400), since=snapshot)
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    monkeypatch.setattr(time, "time", lambda: 3700.0)

    [report] = explain_report(snapshot, layout)["gpus"]
    assert report["cleaning"] == {"fraction": "1970-01-01T01:00:00+00:00"}

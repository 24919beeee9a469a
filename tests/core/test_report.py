"""A snapshot as plain data: what `explain` and `status` say."""

import pytest
from msgspec.structs import replace

from metagpu.core.errors import MetagpuError
from metagpu.core.facts import GpuFaulted, LeasesObserved, PodsTold, SharesGranted, TopologyRead
from metagpu.core.gpu import Connection, PciPath, Topology
from metagpu.core.layout import Layout
from metagpu.core.model import Holder
from metagpu.core.pods import KnownPod
from metagpu.core.report import explanation, gpu_named, hindrance, status
from metagpu.core.snapshot import Snapshot
from tests.build import METAGPU, after, gpu, offer, offered, share

A, B = gpu(0, numa_node=1), gpu(1)
ALICE = Holder("team", "alice", "main")


def test_an_explanation_says_what_is_offered_and_why() -> None:
    """Capacity counts all shares, allocatable those of healthy GPUs; each GPU is explained."""
    layout, snapshot = offered(A, B)
    held = layout.shares[:4]
    snapshot = after(SharesGranted(held, at=5), GpuFaulted(B.id, "XID 79", at=3600), since=snapshot)
    told = explanation(snapshot, layout)

    assert told["resources"] == {METAGPU: {"capacity": 20, "allocatable": 10}}
    assert told["gpus"] == [
        {
            "index": 0,
            "uuid": A.id,
            "product": "NVIDIA A100-SXM4-40GB",
            "memoryMiB": 40960,
            "pciBusId": "0000:00:00.0",
            "numaNode": 1,
            "healthy": True,
            "reason": "",
            "since": "1970-01-01T00:00:00+00:00",
            "backends": ["fraction"],
            "owner": "fraction",
            "cleaning": {},
            "suspended": {},
            "cordon": None,
            "faults": [],
            "made": [],
            "blocked": [],
            "waitsFor": None,
            "nvlinkPeers": [],
            "pool": "all",
            "why": "all GPUs",
            "shares": {METAGPU: {"capacity": 10, "held": 4, "free": 6}},
            "room": None,
        },
        {
            "index": 1,
            "uuid": B.id,
            "product": "NVIDIA A100-SXM4-40GB",
            "memoryMiB": 40960,
            "pciBusId": "0000:01:00.0",
            "numaNode": None,
            "healthy": False,
            "reason": "XID 79",
            "since": "1970-01-01T01:00:00+00:00",
            "backends": ["fraction"],
            "owner": None,
            "cleaning": {},
            "suspended": {},
            "cordon": None,
            "faults": [],
            "made": [],
            "blocked": [],
            "waitsFor": None,
            "nvlinkPeers": [],
            "pool": "all",
            "why": "all GPUs",
            "shares": {METAGPU: {"capacity": 10, "held": 0, "free": 0}},
            "room": None,
        },
    ]


def test_withheld_shares_are_not_allocatable() -> None:
    """A share that another backend's lease excludes counts as capacity alone."""
    layout, snapshot = offered(A)
    slices = (share(A, 0, backend="slice", resource="example.com/slice"),)
    snapshot = after(
        offer(*layout.shares, *slices), SharesGranted(layout.shares[:1], at=1), since=snapshot
    )

    assert explanation(snapshot, layout)["resources"] == {
        METAGPU: {"capacity": 10, "allocatable": 10},
        "example.com/slice": {"capacity": 1, "allocatable": 0},
    }


def test_a_gpu_not_laid_out_yet_says_so() -> None:
    """A GPU found after the last layout has no pool yet."""
    _, snapshot = offered(A)
    [told] = explanation(snapshot, Layout((), {}, ()))["gpus"]

    assert (told["pool"], told["why"]) == (None, "not laid out yet")


def test_an_explanation_says_how_gpus_are_connected() -> None:
    """Each GPU is told with those it reaches over NVLink, each pair with its best connection."""
    third = gpu(2)
    read = Topology(
        {
            frozenset((A.id, B.id)): Connection(PciPath.SWITCH, nvlinks=4),
            frozenset((A.id, third.id)): Connection(PciPath.SYSTEM, nvlinks=0),
        }
    )
    layout, snapshot = offered(A, B, third)
    told = explanation(after(TopologyRead(read), since=snapshot), layout)

    assert [gpu["nvlinkPeers"] for gpu in told["gpus"]] == [[1], [0], []]
    assert told["topology"] == [["X", "NV4", "SYS"], ["NV4", "X", "?"], ["SYS", "?", "X"]]


def test_a_status_says_who_holds_what() -> None:
    """Leases are counted for each resource, GPU and holder; one without holder has `None`."""
    layout, snapshot = offered(A)
    snapshot = after(
        SharesGranted(layout.shares[:3], at=5),
        LeasesObserved({part.id: ALICE for part in layout.shares[:2]}, at=6),
        since=snapshot,
    )
    told = status(snapshot, layout)

    assert told["leases"] == [
        {"resource": METAGPU, "gpu": 0, "uuid": A.id, "shares": 2, "holder": "team/alice (main)"},
        {"resource": METAGPU, "gpu": 0, "uuid": A.id, "shares": 1, "holder": None},
    ]
    assert told["gpus"] == explanation(snapshot, layout)["gpus"]


def test_a_hindrance_names_the_backend_that_has_the_gpu() -> None:
    """A share that another backend's lease excludes is refused with that backend's name."""
    layout, snapshot = offered(A)
    snapshot = after(SharesGranted(layout.shares[:1], at=1), since=snapshot)

    assert hindrance(snapshot.gpus[A.id]) == f"GPU 0 ({A.id}) is in use by fraction"


def test_what_the_api_server_knows_of_a_holder_is_told() -> None:
    """Uid, owner and phase of a pod stand with its leases; where nobody knows them, they do not."""
    layout, snapshot = offered(A)
    pod = KnownPod("u", "team", "alice", "Running", "Job/train")
    holders = {layout.shares[0].id: ALICE, layout.shares[1].id: replace(ALICE, pod="bob")}
    snapshot = after(LeasesObserved(holders, at=1), PodsTold((pod,)), since=snapshot)
    alice, bob = status(snapshot, layout)["leases"]

    assert (alice["podUid"], alice["podOwner"], alice["podPhase"]) == ("u", "Job/train", "Running")
    assert bob.keys() == {"resource", "gpu", "uuid", "shares", "holder"}


@pytest.mark.parametrize(
    ("holder", "who"), [(ALICE, "team/alice (main)"), (None, "a pod that is being admitted")]
)
def test_a_hindrance_names_the_pod_that_is_waited_for(holder: Holder | None, who: str) -> None:
    """A GPU that was cut anew waits for the pods of the old cut, and says for which."""
    layout, snapshot = offered(A)
    [held, *_] = layout.shares
    observed = {held.id: holder} if holder is not None else {}
    snapshot = after(
        SharesGranted((held,), at=5),
        LeasesObserved(observed, at=6),
        offer(share(A, 0, memory_mib=1)),
        since=snapshot,
    )

    assert hindrance(snapshot.gpus[A.id]) == (
        f"GPU 0 ({A.id}) is held by {who} under cnvrg.io/metagpu, which is not on offer as it was "
        "granted; the GPU waits for the end of that pod"
    )


@pytest.mark.parametrize("name", ["1", B.id, "0000:01:00.0", "00000000:01:00.0"])
def test_a_gpu_is_found_by_index_uuid_and_bus_id(name: str) -> None:
    """People name a GPU by its number or place, programs by its uuid."""
    _, snapshot = offered(A, B)

    assert gpu_named(snapshot, name) == B.id


def test_an_unknown_gpu_is_told_with_those_there_are() -> None:
    """A name that no GPU has is answered with the names that would do."""
    _, snapshot = offered(A, B)

    with pytest.raises(MetagpuError, match=r"^there is no GPU '7' here; there are: 0, 1$"):
        gpu_named(snapshot, "7")
    with pytest.raises(MetagpuError, match=r"^there is no GPU '' here; there are: none$"):
        gpu_named(Snapshot(), "")

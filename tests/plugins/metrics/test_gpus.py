"""Metrics of GPUs, resources and who holds what."""

from msgspec.structs import replace

from metagpu.core.facts import (
    BackendSuspended,
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    InstanceFaulted,
    LeasesObserved,
    RivalMet,
    SharesGranted,
    StockTold,
)
from metagpu.core.gpu import MIB
from metagpu.core.model import Fault, Holder, ResourceName, ShareId, Stock
from metagpu.core.report import status
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.metrics.gpus import of_snapshot
from tests.build import METAGPU, after, gpu, laid_out
from tests.plugins.metrics.rig import valued

A, B = replace(gpu(0), reserved=620 * MIB), gpu(1)
ON_A, ON_B = ("0", A.id), ("1", B.id)
WHOLE = "nvidia.com/gpu"
LAYOUT = laid_out(
    A,
    B,
    text="""
version: metagpu/v1
pools:
  - name: mixed
    backends: [{backend: fraction, sharesPerGpu: 10}, {backend: whole}]
""",
)
FRESH = after(GpusFound((A, B), at=0), LAYOUT.offered)
ALICE = Holder("team", "alice", "main")


def held(count: int, since: Snapshot = FRESH) -> Snapshot:
    """Let Alice hold so many fractions of A."""
    fractions = [it for it in LAYOUT.shares if it.gpu == A.id and it.backend == "fraction"]
    holders = {share.id: ALICE for share in fractions[:count]}
    return after(LeasesObserved(holders, at=5), since=since)


def test_an_idle_node() -> None:
    """Every GPU is there with what it is; nothing is held."""
    values = valued(of_snapshot(FRESH, LAYOUT))

    assert values["metagpu_gpu_info", *ON_A, A.name, "0000:00:00.0", "mixed"] == 1
    assert values["metagpu_gpu_memory_bytes", *ON_A] == 40960 * MIB
    assert values["metagpu_gpu_reserved_memory_bytes", *ON_A] == 620 * MIB
    assert ("metagpu_gpu_reserved_memory_bytes", *ON_B) not in values
    assert values["metagpu_gpu_healthy", *ON_A] == 1
    assert not any(value for name, value in values.items() if name[0] == "metagpu_gpu_fault")
    assert values["metagpu_gpu_owned", *ON_A, "fraction"] == 0
    assert values["metagpu_gpu_backend_ready", *ON_A, "whole"] == 1
    assert values["metagpu_resource_capacity_shares", METAGPU] == 20
    assert values["metagpu_resource_free_shares", METAGPU] == 20
    assert not any(name[0] == "metagpu_container_shares" for name in values)


def test_who_holds_what() -> None:
    """A held GPU is its backend's; one series for each container, resource and GPU."""
    values = valued(of_snapshot(held(3), LAYOUT))

    assert values["metagpu_container_shares", "team", "alice", "main", *ON_A, METAGPU] == 3
    assert values["metagpu_gpu_owned", *ON_A, "fraction"] == 1
    assert values["metagpu_gpu_owned", *ON_A, "whole"] == 0
    assert values["metagpu_gpu_resource_held_shares", *ON_A, METAGPU] == 3
    assert values["metagpu_gpu_resource_free_shares", *ON_A, METAGPU] == 7
    assert values["metagpu_gpu_resource_free_shares", *ON_A, WHOLE] == 0
    assert values["metagpu_resource_held_shares", METAGPU] == 3
    assert values["metagpu_resource_allocatable_shares", METAGPU] == 20
    assert values["metagpu_resource_allocatable_shares", WHOLE] == 1


def test_a_lease_without_a_name_counts_as_held() -> None:
    """Until the kubelet tells whose it is, it is in nobody's series."""
    share = next(it for it in LAYOUT.shares if it.gpu == B.id and it.backend == "whole")
    values = valued(of_snapshot(after(SharesGranted((share,), at=6), since=FRESH), LAYOUT))

    assert values["metagpu_gpu_resource_held_shares", *ON_B, WHOLE] == 1
    assert not any(name[0] == "metagpu_container_shares" for name in values)


def test_numbers_are_those_of_status() -> None:
    """What `metagpu status` says of resources and GPUs, monitoring says too, whatever happened."""
    snapshot = after(
        BackendSuspended(A.id, "whole", "no", at=6),
        GpuCordoned(A.id, "fan", at=6),
        GpuFaulted(B.id, "XID 79", at=6, fault=Fault.XID),
        since=held(3),
    )
    values, said = valued(of_snapshot(snapshot, LAYOUT)), status(snapshot, LAYOUT)

    for resource, told in said["resources"].items():
        assert values["metagpu_resource_capacity_shares", resource] == told["capacity"]
        assert values["metagpu_resource_allocatable_shares", resource] == told["allocatable"]
    for told in said["gpus"]:
        for resource, shares in told["shares"].items():
            where = (str(told["index"]), told["uuid"], resource)
            assert values["metagpu_gpu_resource_capacity_shares", *where] == shares["capacity"]
            assert values["metagpu_gpu_resource_held_shares", *where] == shares["held"]
            assert values["metagpu_gpu_resource_free_shares", *where] == shares["free"]


def test_what_is_wrong_with_a_gpu() -> None:
    """The kind of its fault, a cordon, a suspended backend; others stay as they are."""
    snapshot = after(
        GpuFaulted(A.id, "XID 79: gone", at=6, fault=Fault.XID),
        GpuCordoned(A.id, "fan", at=6),
        BackendSuspended(B.id, "whole", "no", at=6),
        InstanceFaulted(B.id, "MIG-x", "XID 94", at=6),
        StockTold(B.id, "whole", Stock(paused={ShareId(B.id): "MPS is down"}), at=6),
        since=FRESH,
    )
    values = valued(of_snapshot(snapshot, LAYOUT))

    assert values["metagpu_gpu_healthy", *ON_A] == 0
    assert {fault for fault in Fault if values["metagpu_gpu_fault", *ON_A, fault]} == {Fault.XID}
    assert values["metagpu_gpu_cordoned", *ON_A] == 1
    assert values["metagpu_gpu_cordoned", *ON_B] == 0
    assert values["metagpu_gpu_broken_instances", *ON_B] == 1
    assert values["metagpu_gpu_paused_shares", *ON_B] == 1
    assert values["metagpu_gpu_paused_shares", *ON_A] == 0
    assert values["metagpu_gpu_backend_ready", *ON_B, "whole"] == 0
    assert values["metagpu_gpu_backend_ready", *ON_B, "fraction"] == 1


def test_what_waits_for_the_end_of_a_pod() -> None:
    """Shares of an earlier configuration are counted on their GPU."""
    again = laid_out(A, B)
    values = valued(of_snapshot(after(again.offered, since=held(2)), again))
    assert values["metagpu_gpu_stray_shares", *ON_A] == 0

    smaller = laid_out(A, B, text=WHOLE_ONLY)
    values = valued(of_snapshot(after(smaller.offered, since=held(2)), smaller))
    assert values["metagpu_gpu_stray_shares", *ON_A] == 2
    assert values["metagpu_gpu_stray_shares", *ON_B] == 0


WHOLE_ONLY = "version: metagpu/v1\npools: [{name: a, backends: [{backend: whole}]}]\n"


def test_a_rival_is_told() -> None:
    """A resource that another plugin serves."""
    snapshot = after(RivalMet(ResourceName(WHOLE), "/dp/nvidia-gpu.sock"), since=FRESH)
    values = valued(of_snapshot(snapshot, LAYOUT))

    assert values["metagpu_resource_rivalled", WHOLE] == 1
    assert values["metagpu_resource_rivalled", METAGPU] == 0


def test_a_gpu_in_no_pool() -> None:
    """It is known, and has no pool and no shares."""
    only = laid_out(
        A,
        B,
        text=WHOLE_ONLY.replace("backends", "gpus: {index: 0}, backends"),
    )
    values = valued(of_snapshot(after(GpusFound((A, B), at=0), only.offered), only))

    assert values["metagpu_gpu_info", *ON_B, B.name, "0000:01:00.0", ""] == 1
    assert not any(name[:3] == ("metagpu_gpu_owned", *ON_B) for name in values)

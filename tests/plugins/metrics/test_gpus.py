"""Metrics of GPUs, resources and leases."""

from msgspec.structs import replace

from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import (
    Fault,
    Holder,
    ProvisionedState,
    ResourceName,
    ShareId,
)
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.status import explain_report
from metagpu.core.state.facts import (
    BackendSuspended,
    CompetingPluginFound,
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    GpuUnheard,
    InstanceFaulted,
    LeasesObserved,
    ProvisioningReported,
    RegistrationProblemFound,
    SharesClaimed,
)
from metagpu.plugins.metrics.gpus import snapshot_samples
from tests.plugins.metrics.rig import valued
from tests.rigs.build import METAGPU, after, gpu, layout_of

A, B = replace(gpu(0), reserved=620 * MIB), gpu(1)
ON_A, ON_B = ("0", A.id), ("1", B.id)
WHOLE = "nvidia.com/gpu"
LAYOUT = layout_of(
    A,
    B,
    text="""
version: metagpu/v1
pools:
  - name: mixed
    backends: [{backend: fraction, sharesPerGpu: 10}, {backend: whole}]
""",
)
FRESH = after(GpusFound((A, B), at=0), LAYOUT.offer_fact)
ALICE = Holder("team", "alice", "main")


def held(count: int, since: Snapshot = FRESH) -> Snapshot:
    """Assign fractions of GPU A to Alice."""
    fractions = [
        share for share in LAYOUT.shares if share.gpu == A.id and share.backend == "fraction"
    ]
    holders = {share.id: ALICE for share in fractions[:count]}
    return after(LeasesObserved(holders, at=5), since=since)


def test_an_idle_node() -> None:
    """Every GPU has its properties; no share is held."""
    values = valued(snapshot_samples(FRESH, LAYOUT))

    assert values["metagpu_gpu_info", *ON_A, A.name, "0000:00:00.0", "mixed"] == 1
    assert values["metagpu_gpu_memory_bytes", *ON_A] == 40960 * MIB
    assert values["metagpu_gpu_memory_reserved_bytes", *ON_A] == 620 * MIB
    assert ("metagpu_gpu_memory_reserved_bytes", *ON_B) not in values
    assert values["metagpu_gpu_healthy", *ON_A] == 1
    assert not any(name[0] == "metagpu_gpu_fault" for name in values)
    assert not any(name[0] == "metagpu_gpu_owned" for name in values)
    assert values["metagpu_gpu_backend_ready", *ON_A, "whole"] == 1
    assert values["metagpu_resource_capacity_shares", METAGPU] == 20
    assert values["metagpu_resource_free_shares", METAGPU] == 20
    assert not any(name[0] == "metagpu_container_shares" for name in values)


def test_leases_have_series() -> None:
    """A held GPU has its backend as owner, and a series per container, resource and GPU."""
    values = valued(snapshot_samples(held(3), LAYOUT))

    assert values["metagpu_container_shares", "team", "alice", "main", *ON_A, METAGPU] == 3
    assert [value for value in values if value[0] == "metagpu_gpu_owned"] == [
        ("metagpu_gpu_owned", *ON_A, "fraction")
    ]
    assert values["metagpu_gpu_resource_free_shares", *ON_A, METAGPU] == 7
    assert values["metagpu_gpu_resource_free_shares", *ON_A, WHOLE] == 0
    assert values["metagpu_resource_held_shares", METAGPU] == 3
    assert values["metagpu_resource_allocatable_shares", METAGPU] == 20
    assert values["metagpu_resource_allocatable_shares", WHOLE] == 1


def test_held_back_shares_have_series() -> None:
    """Shares held back are free, not allocatable, and beyond the largest request."""
    shares = {gpu.id: [share for share in LAYOUT.shares if share.gpu == gpu.id] for gpu in (A, B)}
    claims = [share for gpu in shares.values() for share in gpu if share.backend == "fraction"]
    claimed = SharesClaimed((*claims[:3], *claims[10:14]), at=6)
    values = valued(snapshot_samples(after(claimed, since=FRESH), LAYOUT))

    assert values["metagpu_resource_free_shares", METAGPU] == 13
    assert values["metagpu_resource_allocatable_shares", METAGPU] == 14
    assert values["metagpu_resource_held_back_shares", METAGPU] == 6
    assert values["metagpu_gpu_resource_held_back_shares", *ON_A, METAGPU] == 0
    assert values["metagpu_gpu_resource_held_back_shares", *ON_B, METAGPU] == 6
    assert values["metagpu_resource_largest_request_shares", METAGPU] == 7
    assert ("metagpu_resource_held_back_shares", WHOLE) not in values  # any GPUs make a request


def test_a_lease_without_a_name_counts_as_held() -> None:
    """A lease has no container's series until the kubelet lists its holder."""
    share = next(other for other in LAYOUT.shares if other.gpu == B.id and other.backend == "whole")
    values = valued(snapshot_samples(after(SharesClaimed((share,), at=6), since=FRESH), LAYOUT))

    assert values["metagpu_resource_held_shares", WHOLE] == 1
    assert not any(name[0] == "metagpu_container_shares" for name in values)


def test_numbers_are_those_of_status() -> None:
    """Metrics of resources and GPUs equal the numbers of `metagpu status`, in every state."""
    snapshot = after(
        BackendSuspended(A.id, "whole", "no", at=6),
        GpuCordoned(A.id, "fan", at=6),
        GpuFaulted(B.id, "XID 79", at=6, fault=Fault.XID),
        since=held(3),
    )
    values, status = valued(snapshot_samples(snapshot, LAYOUT)), explain_report(snapshot, LAYOUT)

    for resource, counts in status.resources.items():
        assert values["metagpu_resource_capacity_shares", resource] == counts.capacity
        assert values["metagpu_resource_allocatable_shares", resource] == counts.allocatable
    for each in status.gpus:
        for resource, shares in each.shares.items():
            where = (str(each.index), each.uuid, resource)
            names = [value for value in values if value[0] == "metagpu_container_shares"]
            assert sum(values[name] for name in names if name[4:] == where) == shares.held
            assert values["metagpu_gpu_resource_free_shares", *where] == shares.free


def test_what_is_wrong_with_a_gpu() -> None:
    """Fault, cordon and suspension show on their GPU; other GPUs are unchanged."""
    snapshot = after(
        GpuFaulted(A.id, "XID 79: gone", at=6, fault=Fault.XID),
        GpuCordoned(A.id, "fan", at=6),
        GpuUnheard(A.id, "refused", at=6),
        BackendSuspended(B.id, "whole", "no", at=6),
        InstanceFaulted(B.id, "MIG-x", "XID 94", at=6),
        ProvisioningReported(
            B.id, "whole", ProvisionedState(paused={ShareId(B.id): "MPS is down"}), at=6
        ),
        since=FRESH,
    )
    values = valued(snapshot_samples(snapshot, LAYOUT))

    assert values["metagpu_gpu_healthy", *ON_A] == 0
    assert [name[-1] for name in values if name[0] == "metagpu_gpu_fault"] == [Fault.XID]
    assert values["metagpu_gpu_cordoned", *ON_A] == 1
    assert values["metagpu_gpu_cordoned", *ON_B] == 0
    assert values["metagpu_gpu_reports_xids", *ON_A] == 0
    assert values["metagpu_gpu_reports_xids", *ON_B] == 1
    assert values["metagpu_gpu_unhealthy_mig_devices", *ON_B] == 1
    assert ("metagpu_gpu_unhealthy_mig_devices", *ON_A) not in values
    assert values["metagpu_gpu_paused_shares", *ON_B] == 1
    assert values["metagpu_gpu_paused_shares", *ON_A] == 0
    assert values["metagpu_gpu_backend_ready", *ON_B, "whole"] == 0
    assert values["metagpu_gpu_backend_ready", *ON_B, "fraction"] == 1


def test_a_gpu_in_mig_mode_counts_its_mig_devices_from_zero() -> None:
    """Faults of MIG devices have series where the GPU is in MIG mode, before the first one."""
    with_mig = replace(A, mig_enabled=True)
    values = valued(snapshot_samples(after(GpusFound((with_mig, B), at=1), since=FRESH), LAYOUT))

    assert values["metagpu_gpu_unhealthy_mig_devices", *ON_A] == 0
    assert ("metagpu_gpu_unhealthy_mig_devices", *ON_B) not in values


def test_what_waits_for_the_end_of_a_pod() -> None:
    """Shares of an earlier configuration are counted on their GPU."""
    again = layout_of(A, B)
    values = valued(snapshot_samples(after(again.offer_fact, since=held(2)), again))
    assert values["metagpu_gpu_orphaned_leases", *ON_A] == 0

    smaller = layout_of(A, B, text=WHOLE_ONLY)
    values = valued(snapshot_samples(after(smaller.offer_fact, since=held(2)), smaller))
    assert values["metagpu_gpu_orphaned_leases", *ON_A] == 2
    assert values["metagpu_gpu_orphaned_leases", *ON_B] == 0


WHOLE_ONLY = "version: metagpu/v1\npools: [{name: a, backends: [{backend: whole}]}]\n"


def test_a_competing_plugin_is_marked() -> None:
    """A resource that another plugin serves is marked."""
    snapshot = after(CompetingPluginFound(ResourceName(WHOLE), "/dp/nvidia-gpu.sock"), since=FRESH)
    values = valued(snapshot_samples(snapshot, LAYOUT))

    assert values["metagpu_resource_served_by_other_plugin", WHOLE] == 1
    assert ("metagpu_resource_served_by_other_plugin", METAGPU) not in values


def test_a_registration_problem_is_marked() -> None:
    """A resource that the kubelet does not have as it is listed is marked."""
    snapshot = after(RegistrationProblemFound(ResourceName(WHOLE), "it counts 0"), since=FRESH)
    values = valued(snapshot_samples(snapshot, LAYOUT))

    assert values["metagpu_resource_registration_problem", WHOLE] == 1
    assert ("metagpu_resource_registration_problem", METAGPU) not in values


def test_a_gpu_in_no_pool() -> None:
    """A GPU in no pool is listed without pool and shares."""
    only = layout_of(
        A,
        B,
        text=WHOLE_ONLY.replace("backends", "gpus: {index: 0}, backends"),
    )
    values = valued(snapshot_samples(after(GpusFound((A, B), at=0), only.offer_fact), only))

    assert values["metagpu_gpu_info", *ON_B, B.name, "0000:01:00.0", ""] == 1
    assert not any(name[:3] == ("metagpu_gpu_owned", *ON_B) for name in values)

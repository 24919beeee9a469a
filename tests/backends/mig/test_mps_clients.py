"""Units of instances under MPS: preference, refusal and grant."""

from collections.abc import Sequence

import pytest

from metagpu.backends.common.packing import PlacementPolicy
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.sharing import MigMpsOptions
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.request_errors import INIT_CONTAINERS, MultipleDevices, TooManyClients
from metagpu.core.model.shares import HardwareDevice, Holder, ProvisionedState, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpusFound, LeasesObserved, ProvisioningReported, SharesClaimed
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import after, layout_of, offer

A, B = mig_gpu(0), mig_gpu(1)
THREE = {"3g.20gb": 2}


def backend(mps: MigMpsOptions | None = None, layout: dict[str, int] | None = None) -> MigBackend:
    """Create the backend of a pool, by default with ten units of each instance."""
    options = mps or MigMpsOptions(units_per_instance=10)
    return MigBackend(
        MigOptions("mig", layout=layout or THREE, mps=options), Injection(run_dir="/r")
    )


def node(*gpus: Gpu, cutter: MigBackend | None = None) -> Snapshot:
    """Return the snapshot of GPUs with their offers."""
    shares = [share for gpu in gpus for share in (cutter or backend()).shares(gpu)]
    return after(GpusFound(gpus, at=0), offer(*shares))


def units(snapshot: Snapshot, gpu: Gpu, instance: str, *numbers: int) -> list[Share]:
    """Return units of an instance."""
    names = {f"{gpu.id}::{instance}-p{number}" for number in numbers}
    return [share for share in snapshot.gpus[gpu.id].shares if share.id in names]


def held(snapshot: Snapshot, shares: Sequence[Share], name: str = "pod", at: int = 1) -> Snapshot:
    """Report a container that holds these shares, as the kubelet does."""
    granted = after(SharesClaimed(tuple(shares), at=at), since=snapshot)
    before = {
        share: lease.holder
        for state in snapshot.gpus.values()
        for share, lease in state.leases.items()
        if lease.holder
    }
    holders = before | dict.fromkeys(
        (share.id for share in shares), Holder("default", name, "main")
    )
    return after(LeasesObserved(holders, at=at + 1), since=granted)


def free(snapshot: Snapshot) -> list[Share]:
    """Return the shares without a lease."""
    return [
        share
        for state in snapshot.gpus.values()
        for share in state.shares
        if share.id not in state.leases
    ]


def named(shares: Sequence[Share]) -> set[str]:
    """Return the instances of shares."""
    return {f"{share.gpu[-1]}:{share.id.partition('::')[2].partition('-p')[0]}" for share in shares}


def test_units_come_from_one_instance() -> None:
    """Units come from the fullest instance with enough of them, or the pool's emptiest."""
    snapshot = held(node(A, B), units(node(A, B), A, "3g.20gb@4", 0, 1, 2, 3))
    spread = backend(MigMpsOptions(units_per_instance=10, placement=PlacementPolicy.SPREAD))

    assert named(backend().prefer(free(snapshot), (), 6, snapshot)) == {f"{A.id[-1]}:3g.20gb@4"}
    assert named(backend().prefer(free(snapshot), (), 7, snapshot)) == {f"{A.id[-1]}:3g.20gb@0"}
    assert named(spread.prefer(free(snapshot), (), 1, snapshot)) == {f"{A.id[-1]}:3g.20gb@0"}
    last = free(snapshot)[-1:]
    assert backend().prefer(last, (), 1, snapshot) == last


def test_the_order_of_the_request_does_not_matter() -> None:
    """The kubelet's order is random; the same free units give the same choice."""
    snapshot = node(A, B)
    there, cutter = free(snapshot), backend()

    assert cutter.prefer(there[::-1], (), 3, snapshot) == cutter.prefer(there, (), 3, snapshot)


def test_an_unavailable_instance_comes_last() -> None:
    """An instance whose control daemon does not answer is taken only if others do not suffice."""
    snapshot = node(A)
    shut = {share.id: "it hangs" for share in units(snapshot, A, "3g.20gb@0", *range(10))}
    snapshot = after(
        ProvisioningReported(A.id, "mig", ProvisionedState(paused=shut), at=1), since=snapshot
    )

    assert named(backend().prefer(free(snapshot), (), 4, snapshot)) == {f"{A.id[-1]}:3g.20gb@4"}
    assert len(backend().prefer(free(snapshot), (), 15, snapshot)) == 15


def test_an_instance_that_is_full_of_clients_comes_last() -> None:
    """A full instance may have units left, but serves no further client."""
    cutter = backend(MigMpsOptions(units_per_instance=10, max_clients=3))
    snapshot = held(node(A, cutter=cutter), units(node(A), A, "3g.20gb@4", 0))

    assert named(cutter.prefer(free(snapshot), (), 1, snapshot)) == {f"{A.id[-1]}:3g.20gb@0"}


def test_required_units_are_kept() -> None:
    """Units of an init container stay chosen, and the others are of their instance."""
    snapshot = node(A)
    must = units(snapshot, A, "3g.20gb@4", 7)
    chosen = backend().prefer(free(snapshot), must, 3, snapshot)

    assert must[0] in chosen
    assert named(chosen) == {f"{A.id[-1]}:3g.20gb@4"}


def test_units_of_two_instances_are_refused() -> None:
    """A process uses one control daemon; the refusal lists the free units."""
    snapshot = held(node(A), units(node(A), A, "3g.20gb@4", 0, 1))
    asked = [*units(snapshot, A, "3g.20gb@0", 0), *units(snapshot, A, "3g.20gb@4", 5)]

    with pytest.raises(MultipleDevices) as caught:
        backend().check(asked, snapshot)
    assert str(caught.value) == (
        "nvidia.com/mig-3g.20gb.shared: 2 units do not fit: MPS serves a container on one MIG "
        "instance, and the kubelet chose GPU 0 3g.20gb@0: 1, GPU 0 3g.20gb@4: 1; free now: GPU 0 "
        "3g.20gb@0: 10, GPU 0 3g.20gb@4: 8. Ask for less, wait for a pod to end, or ask for larger "
        f"instances. {INIT_CONTAINERS}"
    )


def test_more_units_than_any_instance_has_can_never_be_had() -> None:
    """A request above an instance's units is refused with the most that can be had."""
    snapshot = node(A)
    asked = [
        *units(snapshot, A, "3g.20gb@0", *range(10)),
        *units(snapshot, A, "3g.20gb@4", 0),
    ]

    with pytest.raises(MultipleDevices, match=r"can ever give 11 units: .* at most 10, or for"):
        backend().check(asked, snapshot)


def test_one_container_too_many_is_refused() -> None:
    """An instance refuses one container too many; another instance has its own clients."""
    cutter = backend(MigMpsOptions(units_per_instance=10, max_clients=3))
    snapshot = held(node(A, cutter=cutter), units(node(A), A, "3g.20gb@4", 0, 1))

    with pytest.raises(TooManyClients) as caught:
        cutter.check(units(snapshot, A, "3g.20gb@4", 2), snapshot)
    assert str(caught.value) == (
        f"nvidia.com/mig-3g.20gb.shared: instance 3g.20gb@4 of GPU {A} serves 1 containers through "
        "MPS and can serve no more, though it has units left; wait for a pod to end"
    )
    cutter.check(units(snapshot, A, "3g.20gb@0", 2), snapshot)
    cutter.check(units(snapshot, A, "3g.20gb@4", 0, 1), snapshot)  # handed on


async def test_a_container_gets_its_part() -> None:
    """Units of one instance are one device, with the threads and the memory of all of them."""
    snapshot = node(A)
    shares = units(snapshot, A, "3g.20gb@4", 0, 1, 2)
    made = dict.fromkeys((share.id for share in shares), HardwareDevice("MIG-a", 1, 0))
    snapshot = after(
        ProvisioningReported(A.id, "mig", ProvisionedState(made), at=1), since=snapshot
    )
    grant = await backend().grant(shares, snapshot)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": "MIG-a",
        "METAGPU_MEMORY_MIB": "MIG-a=5971",
        "CUDA_MPS_PIPE_DIRECTORY": "/r/mps/MIG-a/pipe",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5971M",
    }
    assert [mount.host_path for mount in grant.mounts] == ["/r/mps/MIG-a/pipe", "/r/mps/MIG-a/shm"]
    assert not any(mount.read_only for mount in grant.mounts)


async def test_pools_of_one_name_keep_their_own_parts() -> None:
    """The first pool's backend of a shared name grants the second pool's parts."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: mig, layout: {3g.20gb: 2}, "
        "replicas: 2}]}\n"
        "  - {name: b, gpus: {index: 1}, backends: [{backend: mig, layout: {3g.20gb: 2}, "
        "mps: {unitsPerInstance: 4}}]}\n"
    )
    layout = layout_of(A, B, text=text)
    snapshot = after(GpusFound((A, B), at=0), layout.offer_fact)
    [first] = layout.backends.values()
    shares = list(snapshot.gpus[B.id].shares)[:4]
    made = {share.id: HardwareDevice("MIG-b", 1, 0) for share in shares}
    snapshot = after(
        ProvisioningReported(B.id, "mig", ProvisionedState(made), at=1), since=snapshot
    )

    assert first.prefer(free(snapshot), shares[:1], 3, snapshot) == shares[:3]
    quarter = await first.grant(shares[:1], snapshot)
    assert quarter.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"

"""Units of instances under MPS: which a container gets, which it may not have, what they are."""

from collections.abc import Sequence

import pytest

from metagpu.backends.mig import MigBackend
from metagpu.backends.mig.division import MpsTerms
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.placement import Placement
from metagpu.core.errors import OneDeviceOnly, TooManyClients
from metagpu.core.facts import GpusFound, LeasesObserved, SharesGranted, StockTold
from metagpu.core.gpu import Gpu
from metagpu.core.injection import Injection
from metagpu.core.model import Holder, Made, Share, Stock
from metagpu.core.snapshot import Snapshot
from tests.backends.mig.gpus import mig_gpu
from tests.build import after, laid_out, offer

A, B = mig_gpu(0), mig_gpu(1)
THREE = {"3g.20gb": 2}


def backend(terms: MpsTerms | None = None, layout: dict[str, int] | None = None) -> MigBackend:
    """Make the backend of a pool: ten units of each instance if nothing is said."""
    said = terms or MpsTerms(units_per_instance=10)
    return MigBackend(MigOptions("mig", layout=layout or THREE, mps=said), Injection(run_dir="/r"))


def node(*gpus: Gpu, cutter: MigBackend | None = None) -> Snapshot:
    """Give what is known of GPUs that are cut."""
    shares = [share for it in gpus for share in (cutter or backend()).shares(it)]
    return after(GpusFound(gpus, at=0), offer(*shares))


def units(snapshot: Snapshot, gpu: Gpu, instance: str, *numbers: int) -> list[Share]:
    """Find units of an instance."""
    names = {f"{gpu.id}::{instance}-p{number}" for number in numbers}
    return [share for share in snapshot.gpus[gpu.id].shares if share.id in names]


def held(snapshot: Snapshot, shares: Sequence[Share], name: str = "pod", at: int = 1) -> Snapshot:
    """Let a container hold these, and the kubelet tell of it."""
    granted = after(SharesGranted(tuple(shares), at=at), since=snapshot)
    before = {
        share: lease.holder
        for state in snapshot.gpus.values()
        for share, lease in state.leases.items()
        if lease.holder
    }
    holders = before | dict.fromkeys((it.id for it in shares), Holder("default", name, "main"))
    return after(LeasesObserved(holders, at=at + 1), since=granted)


def free(snapshot: Snapshot) -> list[Share]:
    """List what nobody holds."""
    return [
        share
        for state in snapshot.gpus.values()
        for share in state.shares
        if share.id not in state.leases
    ]


def named(shares: Sequence[Share]) -> set[str]:
    """Say of which instances shares are."""
    return {f"{share.gpu[-1]}:{share.id.partition('::')[2].partition('-p')[0]}" for share in shares}


def test_units_come_from_one_instance() -> None:
    """The fullest with room for all of them, or the emptiest where the pool says so."""
    snapshot = held(node(A, B), units(node(A, B), A, "3g.20gb@4", 0, 1, 2, 3))
    spread = backend(MpsTerms(units_per_instance=10, placement=Placement.SPREAD))

    assert named(backend().prefer(free(snapshot), (), 6, snapshot)) == {f"{A.id[-1]}:3g.20gb@4"}
    assert named(backend().prefer(free(snapshot), (), 7, snapshot)) == {f"{A.id[-1]}:3g.20gb@0"}
    assert named(spread.prefer(free(snapshot), (), 1, snapshot)) == {f"{A.id[-1]}:3g.20gb@0"}


def test_the_order_of_the_question_does_not_matter() -> None:
    """The kubelet's order is by chance; the same free units give the same choice."""
    snapshot = node(A, B)
    there, cutter = free(snapshot), backend()

    assert cutter.prefer(there[::-1], (), 3, snapshot) == cutter.prefer(there, (), 3, snapshot)


def test_an_instance_that_gives_none_comes_last() -> None:
    """One whose control daemon does not answer is taken only if the others do not suffice."""
    snapshot = node(A)
    shut = {share.id: "it hangs" for share in units(snapshot, A, "3g.20gb@0", *range(10))}
    snapshot = after(StockTold(A.id, "mig", Stock(paused=shut), at=1), since=snapshot)

    assert named(backend().prefer(free(snapshot), (), 4, snapshot)) == {f"{A.id[-1]}:3g.20gb@4"}
    assert len(backend().prefer(free(snapshot), (), 15, snapshot)) == 15


def test_an_instance_that_is_full_of_clients_comes_last() -> None:
    """Though it has units left, it takes nobody more."""
    cutter = backend(MpsTerms(units_per_instance=10, max_clients=3))
    snapshot = held(node(A, cutter=cutter), units(node(A), A, "3g.20gb@4", 0))

    assert named(cutter.prefer(free(snapshot), (), 1, snapshot)) == {f"{A.id[-1]}:3g.20gb@0"}


def test_what_is_required_is_kept() -> None:
    """Units of an init container are among those chosen, and the others are of their instance."""
    snapshot = node(A)
    must = units(snapshot, A, "3g.20gb@4", 7)
    chosen = backend().prefer(free(snapshot), must, 3, snapshot)

    assert must[0] in chosen
    assert named(chosen) == {f"{A.id[-1]}:3g.20gb@4"}


def test_units_of_two_instances_are_refused() -> None:
    """A process speaks to one control daemon; what is free where is told."""
    snapshot = held(node(A), units(node(A), A, "3g.20gb@4", 0, 1))
    asked = [*units(snapshot, A, "3g.20gb@0", 0), *units(snapshot, A, "3g.20gb@4", 5)]

    with pytest.raises(OneDeviceOnly) as caught:
        backend().check(asked, snapshot)
    assert str(caught.value) == (
        "nvidia.com/mig-3g.20gb.shared: 2 units do not fit: MPS serves a container on one MIG "
        "instance, and the kubelet chose GPU 0 3g.20gb@0: 1, GPU 0 3g.20gb@4: 1; free now: GPU 0 "
        "3g.20gb@0: 10, GPU 0 3g.20gb@4: 8. Ask for less, wait for a pod to end, or ask for larger "
        "instances"
    )


def test_one_container_too_many_is_refused() -> None:
    """Of one instance; another one has clients of its own."""
    cutter = backend(MpsTerms(units_per_instance=10, max_clients=3))
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
    made = dict.fromkeys((share.id for share in shares), Made("MIG-a", 1, 0))
    snapshot = after(StockTold(A.id, "mig", Stock(made), at=1), since=snapshot)
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
    """Where two pools offer one resource, the first one's backend gives what the second one cut."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: mig, layout: {3g.20gb: 2}, "
        "replicas: 2}]}\n"
        "  - {name: b, gpus: {index: 1}, backends: [{backend: mig, layout: {3g.20gb: 2}, "
        "mps: {unitsPerInstance: 4}}]}\n"
    )
    layout = laid_out(A, B, text=text)
    snapshot = after(GpusFound((A, B), at=0), layout.offered)
    [first] = layout.backends.values()
    shares = list(snapshot.gpus[B.id].shares)[:4]
    made = {share.id: Made("MIG-b", 1, 0) for share in shares}
    snapshot = after(StockTold(B.id, "mig", Stock(made), at=1), since=snapshot)

    assert first.prefer(free(snapshot), shares[:1], 3, snapshot) == shares[:3]
    quarter = await first.grant(shares[:1], snapshot)
    assert quarter.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"

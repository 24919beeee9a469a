"""The backend `whole`: shares, preference and grant."""

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.backends.whole.backend import WholeBackend, WholeOptions, best_connected, worth
from metagpu.core.grants.injection import CONTROL_NODES, DeviceListStrategy, Injection
from metagpu.core.model.gpu import (
    MIB,
    Connection,
    Gpu,
    GpuId,
    PciPath,
    Topology,
)
from metagpu.core.model.shares import ResourceName, Share, ShareId, gpu_of
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpuFaulted, SharesClaimed, TopologyRead
from metagpu.sim.machine.gpu_models import CUBE_MESH
from tests.rigs.build import after, gpu, offered, share, topology

GPU = ResourceName("nvidia.com/gpu")
CONFIG = "version: metagpu/v1\npools: [{name: all, backends: [{backend: whole}]}]\n"
A, B, C, D = (gpu(index) for index in range(4))


def whole(injection: Injection | None = None, **options: str) -> WholeBackend:
    """Create the backend with some options."""
    return WholeBackend(WholeOptions(backend="whole", **options), injection or Injection())


def near(a: Gpu, b: Gpu) -> Connection:
    """Connect two GPUs by one PCI switch."""
    return Connection(PciPath.SWITCH if a.index // 2 == b.index // 2 else PciPath.SYSTEM, 0)


def node(*gpus: Gpu) -> Snapshot:
    """Offer GPUs whose connections are known."""
    _, snapshot = offered(*gpus, text=CONFIG)
    return after(TopologyRead(topology(gpus, near)), since=snapshot)


def of(snapshot: Snapshot, *gpus: Gpu) -> list[Share]:
    """Return the shares of some GPUs."""
    return [part for wanted in gpus for part in snapshot.gpus[wanted.id].shares]


def test_a_gpu_is_one_share_with_its_own_id() -> None:
    """The share's id is the GPU's uuid, as NVIDIA's plugin names it, and its memory is all."""
    [share] = whole().shares(A)

    assert share == Share(
        id=ShareId(A.id),
        gpu=A.id,
        resource=GPU,
        backend="whole",
        number=0,
        footprint=frozenset({"whole"}),
        memory=40960 * MIB,
    )
    assert gpu_of(share.id) == A.id


def test_the_resource_may_have_another_name() -> None:
    """Pods ask for nvidia.com/gpu unless the pool says otherwise."""
    assert whole().resources == (GPU,)
    assert whole(resource="example.com/gpu").resources == ("example.com/gpu",)
    assert whole(resource="example.com/gpu").shares(A)[0].resource == "example.com/gpu"


def test_a_gpu_in_mig_mode_is_not_given() -> None:
    """CUDA sees only the instances of a GPU in MIG mode, so the whole GPU is not usable."""
    assert not whole().shares(replace(A, mig_enabled=True))
    assert len(whole().shares(replace(A, mig_enabled=False))) == 1


def test_several_gpus_are_the_best_connected() -> None:
    """Of four GPUs two are taken that are on one PCI switch, the required one among them."""
    snapshot = node(A, B, C, D)
    free = of(snapshot, D, A, C, B)

    assert whole().prefer(free, (), 2, snapshot) == of(snapshot, A, B)
    assert whole().prefer(free, of(snapshot, D), 2, snapshot) == of(snapshot, C, D)
    assert whole().prefer(of(snapshot, B, C, D), (), 1, snapshot) == of(snapshot, B)


def test_faulty_gpus_come_last() -> None:
    """A GPU out of service is taken only when there are no others, or when it is required."""
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=node(A, B, C, D))
    free = of(snapshot, A, B, C, D)

    assert whole().prefer(free, (), 3, snapshot) == of(snapshot, B, C, D)
    assert whole().prefer(free, (), 4, snapshot) == of(snapshot, B, C, D, A)
    assert whole().prefer(free, of(snapshot, A), 2, snapshot) == of(snapshot, A, B)


def test_gpus_of_other_backends_come_last() -> None:
    """A GPU that another backend has just taken is avoided, before the kubelet knows of it."""
    snapshot = node(A, B, C, D)
    taken = SharesClaimed((share(A, 0),), at=1)
    snapshot = after(taken, since=snapshot)

    assert whole().prefer(of(snapshot, A, B, C, D), (), 3, snapshot) == of(snapshot, B, C, D)


def test_a_preference_never_fails() -> None:
    """A request has an answer with too few GPUs and without a topology."""
    _, snapshot = offered(A, B, text=CONFIG)
    free = of(snapshot, B, A)

    assert whole().prefer(free, (), 2, snapshot) == of(snapshot, A, B)
    assert whole().prefer(free, (), 5, snapshot) == of(snapshot, A, B)
    assert whole().prefer((), (), 1, snapshot) == []
    assert whole().prefer(free, of(snapshot, A, B), 1, snapshot) == of(snapshot, A)


async def test_a_grant_gives_gpus_and_their_memory() -> None:
    """A container sees its GPUs in the order of their index, and nothing of MetaGPU's."""
    snapshot = node(A, B)
    present = frozenset([*CONTROL_NODES, "/dev/nvidia0", "/dev/nvidia1"])
    grant = await whole(Injection(device_nodes_present=present)).grant(of(snapshot, B, A), snapshot)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": f"{A.id},{B.id}",
        "METAGPU_MEMORY_MIB": f"{A.id}=40960,{B.id}=40960",
    }
    assert [device.host_path for device in grant.nodes] == [
        *CONTROL_NODES,
        "/dev/nvidia0",
        "/dev/nvidia1",
    ]


async def test_a_grant_has_the_injection_of_the_node() -> None:
    """A grant has the injection's mounts and CDI names."""
    snapshot = node(A)
    strategies = frozenset({DeviceListStrategy.CDI_CRI, DeviceListStrategy.VOLUME_MOUNTS})
    grant = await whole(Injection(strategies=strategies)).grant(of(snapshot, A), snapshot)

    assert grant.cdi_names == (f"metagpu.io/gpu={A.id}",)
    assert len(grant.mounts) == 1
    assert grant.nodes == ()


GPUS: Final = [gpu(index) for index in range(8)]


def path(a: Gpu, b: Gpu) -> PciPath:
    """Connect two GPUs by a PCI switch, and four by a NUMA node."""
    if a.index // 2 == b.index // 2:
        return PciPath.SWITCH
    return PciPath.NUMA_NODE if a.index // 4 == b.index // 4 else PciPath.SYSTEM


def dgx(a: Gpu, b: Gpu) -> Connection:
    """Connect GPUs as NVSwitches do."""
    return Connection(path(a, b), 12, switched=True)


def cube_mesh(a: Gpu, b: Gpu) -> Connection:
    """Connect GPUs as in a DGX-1, or two of them side by side."""
    near = a.index // 8 == b.index // 8
    return Connection(path(a, b), CUBE_MESH[a.index % 8][b.index % 8] if near else 0)


def pci_tree(a: Gpu, b: Gpu) -> Connection:
    """Connect GPUs over the PCI bus alone."""
    return Connection(path(a, b), 0)


def bridges(a: Gpu, b: Gpu) -> Connection:
    """Connect GPUs by an NVLink bridge between each two, not those of one PCI switch."""
    return Connection(path(a, b), 4 if abs(a.index - b.index) == 4 else 0)


MACHINES: Final = {"DGX": dgx, "cube mesh": cube_mesh, "PCI": pci_tree, "bridges": bridges}
Machine = Callable[[Gpu, Gpu], Connection]


def quality(chosen: Collection[Gpu], gpus: Sequence[Gpu], known: Topology) -> tuple[int, int]:
    """Return the connection of a set in itself, and its loss for the rest."""

    def total(pairs: Collection[tuple[Gpu, Gpu]]) -> int:
        return sum(worth(a, b, known.between(a.id, b.id)) for a, b in pairs)

    stay = [gpu for gpu in gpus if gpu not in chosen]
    return (
        total(list(combinations(chosen, 2))),
        -total([(a, b) for a in chosen for b in stay]),
    )


def best(size: int, gpus: Sequence[Gpu], required: set[GpuId], known: Topology) -> tuple[int, int]:
    """Find the quality of the best set by trying all of them."""
    return max(
        quality(chosen, gpus, known)
        for chosen in combinations(gpus, size)
        if required <= {gpu.id for gpu in chosen}
    )


def indices(gpus: Sequence[Gpu]) -> list[int]:
    """Return the indices of GPUs."""
    return [gpu.index for gpu in gpus]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_free_set_of_every_machine_is_served_best(machine: Machine) -> None:
    """For any free GPUs of eight and any number of them, no set is better."""
    known = topology(GPUS, machine)

    for count in range(1, 9):
        for free in combinations(GPUS, count):
            for size in range(1, count + 1):
                chosen = best_connected(size, free, (), known)
                assert len(chosen) == size
                assert quality(chosen, free, known) == best(size, free, set(), known), free


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_required_gpus_are_among_the_best_that_have_them(machine: Machine) -> None:
    """No set with the required GPUs is better."""
    known = topology(GPUS, machine)

    for count in range(1, 4):
        for must in combinations(GPUS, count):
            required = {gpu.id for gpu in must}
            for size in range(count, 9):
                chosen = best_connected(size, GPUS, required, known)
                assert required <= {gpu.id for gpu in chosen}
                assert quality(chosen, GPUS, known) == best(size, GPUS, required, known), must


CONNECTIONS = st.builds(
    Connection,
    st.sampled_from([None, *PciPath]),
    st.sampled_from([None, 0, 1, 2, 4]),
)


@given(st.data())
def test_any_topology_gives_a_set_of_the_size(data: st.DataObject) -> None:
    """On any topology the set has its size and the required GPUs, each time the same."""
    gpus = GPUS[: data.draw(st.integers(0, 8))]
    known = topology(gpus, lambda *_: data.draw(CONNECTIONS))
    size = data.draw(st.integers(0, 9))
    must = data.draw(st.sets(st.sampled_from([gpu.id for gpu in GPUS]), max_size=3))
    chosen = best_connected(size, gpus, must, known)
    ours = must & {gpu.id for gpu in gpus}

    assert len(set(chosen)) == min(size, len(gpus))
    assert set(chosen) <= set(gpus)
    assert ours <= {gpu.id for gpu in chosen} or len(ours) > size
    assert indices(chosen) == sorted(indices(chosen))
    assert chosen == best_connected(size, gpus, must, known)


@pytest.mark.parametrize(
    ("machine", "free", "size", "expected"),
    [
        # One GPU: the GPU whose partner is gone already, then the first.
        (pci_tree, range(8), 1, [0]),
        (pci_tree, [0, 1, 2, 4, 5], 1, [2]),
        (bridges, [0, 1, 2, 3, 4, 5, 6], 1, [3]),
        # Two: one switch, else one NUMA node, and no pair is broken for it.
        (pci_tree, [1, 2, 3, 4], 2, [2, 3]),
        (pci_tree, [0, 2, 4, 5], 2, [4, 5]),
        (pci_tree, [0, 2, 4], 2, [0, 2]),
        (bridges, range(8), 2, [0, 4]),
        (cube_mesh, range(8), 2, [2, 3]),
        (dgx, [1, 2, 3, 5], 2, [2, 3]),
        # Four: a NUMA node, in the mesh its four.
        (pci_tree, [0, 1, 2, 4, 5, 6, 7], 4, [4, 5, 6, 7]),
        (cube_mesh, range(8), 4, [0, 1, 2, 3]),
        (dgx, range(8), 8, list(range(8))),
    ],
)
def test_small_cases_have_the_evident_choice(
    machine: Machine, free: Sequence[int], size: int, expected: list[int]
) -> None:
    """Small cases that can be checked by looking at them."""
    known = topology(GPUS, machine)

    assert indices(best_connected(size, [GPUS[i] for i in free], (), known)) == expected


def test_nvlink_outweighs_any_path() -> None:
    """One NVLink more is better than the nearest places on the PCI bus."""
    far = Connection(PciPath.SYSTEM, 1)
    near = Connection(PciPath.BOARD, 0)

    assert worth(GPUS[0], GPUS[1], far) > 1000 * worth(GPUS[0], GPUS[1], near)


def test_numa_nodes_tell_where_nvml_is_silent() -> None:
    """Without a topology, GPUs of one NUMA node go together."""
    gpus = [gpu(index, numa_node=index % 2) for index in range(4)]

    assert indices(best_connected(2, gpus, (), Topology())) == [0, 2]
    assert indices(best_connected(2, gpus, {gpus[3].id}, Topology())) == [1, 3]


def test_without_any_knowledge_the_first_are_taken() -> None:
    """Without any topology the choice is the first GPUs, each time."""
    assert indices(best_connected(3, GPUS, (), Topology())) == [0, 1, 2]
    assert best_connected(3, (), (), Topology()) == []


def test_large_machines_are_served_too() -> None:
    """Sixteen GPUs, and as many as a node may have at all, are chosen without trying all sets."""
    for count in (16, 64):
        gpus = [gpu(index) for index in range(count)]
        chosen = best_connected(8, gpus, (), topology(gpus, cube_mesh))
        assert indices(chosen) == list(range(8))

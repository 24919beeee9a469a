"""The choice of GPUs, compared with the best of all choices."""

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.whole.placement import best_connected, worth
from metagpu.core.model.gpu import (
    Connection,
    Gpu,
    GpuId,
    PciPath,
    Topology,
)
from metagpu.sim.machine.gpu_models import CUBE_MESH
from tests.rigs.build import gpu, topology

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

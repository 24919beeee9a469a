"""NUMA hints, their merging, and the choice that follows (§1.5; cases 45-48)."""

import itertools
from pathlib import Path

import pytest

from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.device_manager import DeviceManagerState
from metagpu.sim.kubelet.kubelet import AdmissionError, SimContainer, SimKubelet
from metagpu.sim.kubelet.topology import (
    TopologyHint,
    merge_hints,
    split_by_affinity,
    topology_hints,
)
from tests.sim.kubelet.rig import GPU, Clock, FakePlugin, device, devices, pod

TWO_AND_TWO = [*devices("a b", 0), *devices("c d", 1)]


def manager_with(*listed: v1beta1.Device, allocated: str = "") -> DeviceManagerState:
    """Return a device manager that has received a list; ids in `allocated` are taken."""
    manager = DeviceManagerState(clock=Clock(), stop_grace=300)
    manager.replace_devices(GPU, listed)
    manager.allocated[GPU] = set(allocated.split())
    return manager


def ask(manager: DeviceManagerState, count: int, *, held: str = "", reusable: str = "") -> object:
    """Return the hints of a two-node machine, as {nodes: preferred}."""
    found = topology_hints(
        manager,
        GPU,
        count,
        numa_nodes=(0, 1),
        held=frozenset(held.split()) or None,
        reusable=reusable.split(),
    )
    return None if found is None else {tuple(sorted(h.nodes or ())): h.preferred for h in found}


def test_without_topology_there_is_no_preference() -> None:
    """The hint is None, not an empty list (case 47)."""
    assert ask(manager_with(*devices("a b")), 1) is None


def test_one_device_prefers_one_node() -> None:
    """The hint prefers a single node (case 47)."""
    assert ask(manager_with(*TWO_AND_TWO), 1) == {(0,): True, (1,): True, (0, 1): False}


def test_two_of_two_and_two_prefer_one_node() -> None:
    """The preferred size is the smallest possible, also when taken now (case 47)."""
    assert ask(manager_with(*TWO_AND_TWO), 2) == {(0,): True, (1,): True, (0, 1): False}
    taken = manager_with(*TWO_AND_TWO, allocated="a c")
    assert ask(taken, 2) == {(0, 1): False}


def test_more_than_a_node_has_goes_across() -> None:
    """A large request spans nodes (case 47)."""
    assert ask(manager_with(*TWO_AND_TWO), 3) == {(0, 1): True}


def test_more_than_available_gives_no_hint() -> None:
    """The hints are an empty list; only best-effort admits that (case 47)."""
    assert ask(manager_with(*TWO_AND_TWO, allocated="a b"), 3) == {}


def test_what_is_held_gives_the_same_hint_again() -> None:
    """A readmission gets the same hint; another number gets none (case 47)."""
    manager = manager_with(*TWO_AND_TWO, allocated="a b")
    assert ask(manager, 2, held="a b") == {(0,): True, (0, 1): False}
    assert ask(manager, 1, held="a b") == {}


def test_reusable_devices_must_be_in_the_set() -> None:
    """A node set without an init container's device is not in the hints."""
    manager = manager_with(*TWO_AND_TWO, allocated="a")
    assert ask(manager, 1, reusable="a") == {(0,): True, (0, 1): False}


def test_unknown_nodes_are_dropped() -> None:
    """Only nodes of the machine that carry devices are enumerated (case 48)."""
    assert ask(manager_with(device("a", 7), device("b", -1), device("c", 1)), 1) == {(1,): True}


def test_a_device_on_two_nodes_counts_for_each() -> None:
    """A request for two on one node is met by two devices that span both."""
    assert ask(manager_with(device("a", 0, 1), device("b", 0, 1)), 2) == {
        (0,): True,
        (1,): True,
        (0, 1): False,
    }


ZERO, ONE, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})


@pytest.mark.parametrize(
    ("policy", "hints", "nodes", "admitted"),
    [
        ("none", [[]], None, True),
        ("best-effort", [None], BOTH, True),
        ("best-effort", [[]], BOTH, True),
        ("restricted", [[]], BOTH, False),
        (
            "restricted",
            [[TopologyHint(ZERO, preferred=True), TopologyHint(BOTH, preferred=False)]],
            ZERO,
            True,
        ),
        ("restricted", [[TopologyHint(BOTH, preferred=True)]], BOTH, True),
        ("single-numa-node", [[TopologyHint(BOTH, preferred=True)]], None, False),
        (
            "single-numa-node",
            [[TopologyHint(ONE, preferred=True), TopologyHint(BOTH, preferred=False)]],
            ONE,
            True,
        ),
        ("single-numa-node", [None], None, True),
        (
            "best-effort",
            [[TopologyHint(ZERO, preferred=True)], [TopologyHint(ONE, preferred=True)]],
            BOTH,
            True,
        ),
        (
            "restricted",
            [[TopologyHint(ZERO, preferred=True)], [TopologyHint(ONE, preferred=True)]],
            BOTH,
            False,
        ),
        (
            "best-effort",
            [
                [TopologyHint(ZERO, preferred=True), TopologyHint(ONE, preferred=True)],
                [TopologyHint(ONE, preferred=True)],
            ],
            ONE,
            True,
        ),
        (
            "best-effort",
            [
                [TopologyHint(ZERO, preferred=False), TopologyHint(BOTH, preferred=False)],
                [TopologyHint(BOTH, preferred=True)],
            ],
            BOTH,
            True,
        ),
        (
            "best-effort",
            [[TopologyHint(ZERO, preferred=False), TopologyHint(BOTH, preferred=False)]],
            ZERO,
            True,
        ),
    ],
)
def test_hints_are_merged_as_the_policy_says(
    policy: str,
    hints: list[list[TopologyHint] | None],
    nodes: frozenset[int] | None,
    *,
    admitted: bool,
) -> None:
    """Policies differ in the pods they admit and in the merged hint."""
    assert merge_hints(policy, hints, (0, 1)) == (nodes, admitted)  # type: ignore[arg-type]


def test_devices_are_split_into_aligned_others_and_unaligned() -> None:
    """Aligned devices are taken first, those without topology last."""
    manager = manager_with(device("a", 0), device("b", 1), device("c"))
    assert split_by_affinity(manager, GPU, "abc", ZERO) == ({"a"}, {"b"}, {"c"})
    assert split_by_affinity(manager, GPU, "abc", None) == (set(), set(), {"a", "b", "c"})


async def test_an_aligned_set_is_offered_for_preference(tmp_path: Path) -> None:
    """Only aligned devices are available; others are ignored (cases 45, 46)."""
    plugin = FakePlugin(GPU, TWO_AND_TWO, prefer=lambda _: ["d"])
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="best-effort")
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
    assert sorted(plugin.questions[0].available_deviceIDs) == ["a", "b"]
    assert plugin.allocations[0][0] in "ab"


async def test_no_preference_is_asked_when_the_aligned_ones_are_just_enough(
    tmp_path: Path,
) -> None:
    """No call comes when there is nothing to choose (§1.5)."""
    plugin = FakePlugin(GPU, TWO_AND_TWO, prefer=lambda q: q.available_deviceIDs)
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="restricted")
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 2)))
    assert plugin.questions == []
    assert sorted(plugin.allocations[0]) == ["a", "b"]


async def test_across_nodes_the_aligned_ones_are_a_must(tmp_path: Path) -> None:
    """Aligned devices are required when there are too few of them (case 45)."""
    listed = [device("a", 0), device("b", 1), *devices("c d")]
    plugin = FakePlugin(GPU, listed, prefer=lambda _: ["d"])
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="best-effort")
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 3)))
    (question,) = plugin.questions
    assert sorted(question.must_include_deviceIDs) == ["a", "b"]
    assert question.allocation_size == 3
    assert sorted(plugin.allocations[0]) == ["a", "b", "d"]


async def test_a_pod_that_cannot_be_aligned_is_refused(tmp_path: Path) -> None:
    """The reason is TopologyAffinityError (§1.5)."""
    plugin = FakePlugin(GPU, TWO_AND_TWO)
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="single-numa-node")
    async with kubelet.running(), plugin.registered(kubelet):
        with pytest.raises(AdmissionError) as caught:
            await kubelet.admit(pod("p", ("main", 3)))
    assert caught.value.reason == "TopologyAffinityError"
    assert caught.value.message == "Resources cannot be allocated with Topology locality"
    assert plugin.allocations == []


async def test_an_init_containers_device_ties_the_app_to_its_node(tmp_path: Path) -> None:
    """Reuse goes before alignment, and the hints respect it."""
    plugin = FakePlugin(GPU, TWO_AND_TWO)
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="single-numa-node")
    one = pod("p", ("main", 2), init=[SimContainer("init", {GPU: 1})])
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(one)
        held = list(itertools.chain(*(c[GPU] for c in kubelet.devices(one).values())))
    assert set(held) in ({"a", "b"}, {"c", "d"})

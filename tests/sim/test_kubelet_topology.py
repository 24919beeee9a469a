"""NUMA hints, their merging, and the choice that follows (§1.5; cases 45-48)."""

import itertools
from pathlib import Path

import pytest

from metagpu.plugins.pb import v1beta1
from metagpu.sim.kubelet import AdmissionError, Container, SimKubelet
from metagpu.sim.kubelet.ledger import Ledger
from metagpu.sim.kubelet.topology import Hint, hints, merge_hints, split
from tests.sim.kubelet_rig import GPU, Clock, FakePlugin, device, devices, pod

TWO_AND_TWO = [*devices("a b", 0), *devices("c d", 1)]


def ledger_of(*listed: v1beta1.Device, allocated: str = "") -> Ledger:
    """Make a ledger that has received a list; ids in `allocated` are taken."""
    ledger = Ledger(clock=Clock(), stop_grace=300)
    ledger.received(GPU, listed)
    ledger.allocated[GPU] = set(allocated.split())
    return ledger


def ask(ledger: Ledger, count: int, *, held: str = "", reusable: str = "") -> object:
    """Ask for the hints of a two-node machine, as {nodes: preferred}."""
    found = hints(
        ledger,
        GPU,
        count,
        numa_nodes=(0, 1),
        held=frozenset(held.split()) or None,
        reusable=reusable.split(),
    )
    return None if found is None else {tuple(sorted(h.nodes or ())): h.preferred for h in found}


def test_without_topology_there_is_no_preference() -> None:
    """Case 47: None, not an empty list."""
    assert ask(ledger_of(*devices("a b")), 1) is None


def test_one_device_prefers_one_node() -> None:
    """Case 47: single."""
    assert ask(ledger_of(*TWO_AND_TWO), 1) == {(0,): True, (1,): True, (0, 1): False}


def test_two_of_two_and_two_prefer_one_node() -> None:
    """Case 47: the smallest node set that could ever do, also when it is taken now."""
    assert ask(ledger_of(*TWO_AND_TWO), 2) == {(0,): True, (1,): True, (0, 1): False}
    taken = ledger_of(*TWO_AND_TWO, allocated="a c")
    assert ask(taken, 2) == {(0, 1): False}


def test_more_than_a_node_has_goes_across() -> None:
    """Case 47: forced."""
    assert ask(ledger_of(*TWO_AND_TWO), 3) == {(0, 1): True}


def test_more_than_available_gives_no_hint() -> None:
    """Case 47: an empty list, which no policy but best-effort admits."""
    assert ask(ledger_of(*TWO_AND_TWO, allocated="a b"), 3) == {}


def test_what_is_held_gives_the_same_hint_again() -> None:
    """Case 47: at a readmission; with another number there is none."""
    ledger = ledger_of(*TWO_AND_TWO, allocated="a b")
    assert ask(ledger, 2, held="a b") == {(0,): True, (0, 1): False}
    assert ask(ledger, 1, held="a b") == {}


def test_reusable_devices_must_be_in_the_set() -> None:
    """A node set without an init container's device is no use."""
    ledger = ledger_of(*TWO_AND_TWO, allocated="a")
    assert ask(ledger, 1, reusable="a") == {(0,): True, (0, 1): False}


def test_unknown_nodes_are_dropped() -> None:
    """Case 48: only nodes of the machine that carry devices are enumerated."""
    assert ask(ledger_of(device("a", 7), device("b", -1), device("c", 1)), 1) == {(1,): True}


def test_a_device_on_two_nodes_counts_for_each() -> None:
    """A wish for two on one node can be met by two that span both."""
    assert ask(ledger_of(device("a", 0, 1), device("b", 0, 1)), 2) == {
        (0,): True,
        (1,): True,
        (0, 1): False,
    }


ZERO, ONE, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})


@pytest.mark.parametrize(
    ("policy", "wishes", "nodes", "admitted"),
    [
        ("none", [[]], None, True),
        ("best-effort", [None], BOTH, True),
        ("best-effort", [[]], BOTH, True),
        ("restricted", [[]], BOTH, False),
        ("restricted", [[Hint(ZERO, preferred=True), Hint(BOTH, preferred=False)]], ZERO, True),
        ("restricted", [[Hint(BOTH, preferred=True)]], BOTH, True),
        ("single-numa-node", [[Hint(BOTH, preferred=True)]], None, False),
        ("single-numa-node", [[Hint(ONE, preferred=True), Hint(BOTH, preferred=False)]], ONE, True),
        ("single-numa-node", [None], None, True),
        ("best-effort", [[Hint(ZERO, preferred=True)], [Hint(ONE, preferred=True)]], BOTH, True),
        ("restricted", [[Hint(ZERO, preferred=True)], [Hint(ONE, preferred=True)]], BOTH, False),
        (
            "best-effort",
            [[Hint(ZERO, preferred=True), Hint(ONE, preferred=True)], [Hint(ONE, preferred=True)]],
            ONE,
            True,
        ),
        (
            "best-effort",
            [
                [Hint(ZERO, preferred=False), Hint(BOTH, preferred=False)],
                [Hint(BOTH, preferred=True)],
            ],
            BOTH,
            True,
        ),
        ("best-effort", [[Hint(ZERO, preferred=False), Hint(BOTH, preferred=False)]], ZERO, True),
    ],
)
def test_wishes_are_merged_as_the_policy_says(
    policy: str, wishes: list[list[Hint] | None], nodes: frozenset[int] | None, *, admitted: bool
) -> None:
    """Policies differ in whom they admit, and in what a wish for everything becomes."""
    assert merge_hints(policy, wishes, (0, 1)) == (nodes, admitted)  # type: ignore[arg-type]


def test_devices_part_into_aligned_others_and_rootless() -> None:
    """The order in which they are taken."""
    ledger = ledger_of(device("a", 0), device("b", 1), device("c"))
    assert split(ledger, GPU, "abc", ZERO) == ({"a"}, {"b"}, {"c"})
    assert split(ledger, GPU, "abc", None) == (set(), set(), {"a", "b", "c"})


async def test_an_aligned_set_is_offered_for_preference(tmp_path: Path) -> None:
    """Cases 45 and 46: only the aligned ones are available; a preference outside is ignored."""
    plugin = FakePlugin(GPU, TWO_AND_TWO, prefer=lambda _: ["d"])
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="best-effort")
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
    assert sorted(plugin.questions[0].available_deviceIDs) == ["a", "b"]
    assert plugin.allocations[0][0] in "ab"


async def test_no_preference_is_asked_when_the_aligned_ones_are_just_enough(
    tmp_path: Path,
) -> None:
    """There is nothing to choose (§1.5)."""
    plugin = FakePlugin(GPU, TWO_AND_TWO, prefer=lambda q: q.available_deviceIDs)
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="restricted")
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 2)))
    assert plugin.questions == []
    assert sorted(plugin.allocations[0]) == ["a", "b"]


async def test_across_nodes_the_aligned_ones_are_a_must(tmp_path: Path) -> None:
    """Case 45, many nodes: with fewer aligned than needed they are taken first."""
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
    """Reuse goes before alignment, and hints know of it."""
    plugin = FakePlugin(GPU, TWO_AND_TWO)
    kubelet = SimKubelet(tmp_path, numa_nodes=(0, 1), topology_policy="single-numa-node")
    one = pod("p", ("main", 2), init=[Container("init", {GPU: 1})])
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(one)
        held = list(itertools.chain(*(c[GPU] for c in kubelet.devices(one).values())))
    assert set(held) in ({"a", "b"}, {"c", "d"})

"""Nodes in groups of equals: the same answers, for less work."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.translation import node_offers, plans
from metagpu.translation.choices import choose
from metagpu.translation.node_offers import NodeGroups, parts_of
from metagpu.translation.translate import explain, translate, translate_among
from metagpu.translation.values import NodeOffer, TranslationSettings
from tests.translation.nodes import node, pod

HAMI: Final = TranslationSettings()
KINDS: Final = [
    node("kind", model, backend)
    for model, backend in (
        ("a100-40gb", "fraction"),
        ("a100-80gb", "fraction"),
        ("a100-40gb", "mps"),
        ("a100-40gb", "mig"),
        ("a30", "mig"),
    )
]


def named(kind: NodeOffer, number: int, free: int = 100) -> NodeOffer:
    """Return a node of a kind with a part of its shares, in percent."""
    labels = {**kind.labels, "kubernetes.io/hostname": f"host-{number}", "parity": str(number % 2)}
    amounts = {name: amount * free // 100 for name, amount in kind.allocatable.items()}
    return replace(kind, name=f"gpu-{number}", labels=labels, allocatable=amounts)


states = st.builds(
    named, st.sampled_from(KINDS), st.integers(0, 5), st.sampled_from((0, 3, 50, 100))
)
changes = st.lists(states | st.builds("gpu-{}".format, st.integers(0, 5)), max_size=12)
asked = st.builds(
    pod,
    st.fixed_dictionaries({"nvidia.com/gpumem": st.sampled_from((3000, 8000, 30000))}),
    annotations=st.fixed_dictionaries(
        {}, optional={"hami.io/node-scheduler-policy": st.sampled_from(("spread", "binpack"))}
    ),
    nodeSelector=st.sampled_from(({}, {}, {"parity": "1"}, {"kubernetes.io/hostname": "host-3"})),
)


@given(changes, asked)
def test_nodes_that_come_and_go_are_those_that_are_there(
    changed: Sequence[NodeOffer | str], one: dict[str, Any]
) -> None:
    """After any changes a pod becomes what it becomes among the nodes that are left."""
    groups = NodeGroups()
    left: dict[str, NodeOffer] = {}
    for value in changed:
        if isinstance(value, str):
            groups.remove(value)
            left.pop(value, None)
        else:
            groups.put(value)
            left[value.name] = value

    assert groups.nodes == left
    assert groups.offered == {name for offer in left.values() for name in offer.allocatable}
    fresh = translate(one, left.values(), HAMI)
    found = translate_among(one, groups, HAMI)
    assert found.operations == fresh.operations
    assert (found.impossible is None) == (fresh.impossible is None)


@given(st.lists(states, max_size=6, unique_by=lambda value: value.name), asked)
def test_a_group_answers_as_its_nodes_do(nodes: list[NodeOffer], one: dict[str, Any]) -> None:
    """The chosen resource is that of the nodes that an explanation marks, looked at one by one."""
    outcome = translate(one, nodes, HAMI)
    marked = {way.text for way in explain(one, nodes, HAMI) if way.chosen}
    added = {
        f"{operation['value']} of {operation['path'].rsplit('/', 1)[1].replace('~1', '/')}"
        for operation in outcome.operations
        if "/limits/" in operation["path"] and operation["op"] == "add"
    }

    assert marked == added


def test_equal_nodes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand nodes of two kinds, each with other free shares, cost as much as two nodes."""
    looked = []

    def counted(*arguments: object) -> object:
        looked.append(arguments)
        return choose(*arguments)  # type: ignore[arg-type] # it passes them on

    monkeypatch.setattr(plans, "choose", counted)
    nodes = [named(KINDS[number % 2], number, number % 100) for number in range(1000)]
    outcome = translate(pod({"nvidia.com/gpumem": 8000}), nodes, HAMI)

    assert outcome.operations
    techniques = len(HAMI.order)
    assert 0 < len(looked) <= 2 * techniques


def test_a_node_that_changes_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of a node that changes are read again, and those of no other."""
    groups = NodeGroups(named(KINDS[0], number) for number in range(100))
    read = []

    def counted(one: NodeOffer) -> object:
        read.append(one.name)
        return parts_of(one)

    monkeypatch.setattr(node_offers, "parts_of", counted)
    groups.put(named(KINDS[0], 7, 3))
    for memory in range(1000, 1100):
        translate_among(pod({"nvidia.com/gpumem": memory}), groups, HAMI)

    assert read == ["gpu-7"]

"""Node affinities of pods, as the scheduler reads them."""

from collections.abc import Iterator
from typing import Any

import pytest

from metagpu.translation.affinity import NodeSelection
from metagpu.translation.hami_annotations import ORIGINAL, original_request


def missing(expressions: list[Any], labels: dict[str, str]) -> str:
    """Return what a term of these expressions misses at a node."""
    return NodeSelection({}, [{"matchExpressions": expressions}]).missing("node", labels)


@pytest.mark.parametrize("operator", ["Gt", "Lt"])
@pytest.mark.parametrize("bound", ["9" * 5000, str(2**63), str(-(2**63) - 1), "many"])
def test_a_bound_that_is_no_64_bit_number_matches_no_node(operator: str, bound: str) -> None:
    """A bound that the scheduler cannot parse matches no node, whatever its length."""
    expression = {"key": "memory", "operator": operator, "values": [bound]}
    assert missing([expression], {"memory": "5"})


def test_a_negative_bound_is_compared() -> None:
    """A bound below 0 is compared as the number that it is."""
    expression = {"key": "memory", "operator": "Lt", "values": ["-5"]}
    assert missing([expression], {"memory": "-9"}) == ""


def test_a_deeply_nested_original_request_is_none() -> None:
    """An annotation that is nested too deeply is ignored, as any that nobody of ours wrote."""
    assert original_request({"metadata": {"annotations": {ORIGINAL: "[" * 100_000}}}) == {}


class Values(list[str]):
    """Values that count how often they are gone through or sought in."""

    looks = 0

    def __iter__(self) -> Iterator[str]:
        """Count a walk through all values."""
        self.looks += 1
        return super().__iter__()

    def __contains__(self, value: object) -> bool:
        """Count a search, which may compare with all values."""
        self.looks += 1
        return super().__contains__(value)


@pytest.mark.parametrize("operator", ["In", "NotIn"])
def test_values_are_gone_through_once_for_all_nodes(operator: str) -> None:
    """The work for a long list of values does not grow with the nodes."""
    values = Values(f"v{number}" for number in range(100))
    selection = NodeSelection(
        {}, [{"matchExpressions": [{"key": "zone", "operator": operator, "values": values}]}]
    )
    found = [selection.missing(f"n{node}", {"zone": f"v{node}"}) for node in range(200)]

    assert [not text for text in found] == [
        (node < 100) is (operator == "In") for node in range(200)
    ]
    assert values.looks == 1


def test_a_long_list_of_values_is_cut_in_the_sentence() -> None:
    """A sentence lists ten values, and how many more there are."""
    expression = {"key": "zone", "operator": "In", "values": [f"v{number}" for number in range(12)]}
    shown = ", ".join(f"v{number}" for number in range(10))
    assert missing([expression], {}) == f"zone In ({shown}, 2 more)"

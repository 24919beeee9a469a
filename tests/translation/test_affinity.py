"""Node affinities of pods, as the scheduler reads them."""

import pytest

from metagpu.translation.affinity import missing_label
from metagpu.translation.hami_annotations import ORIGINAL, original_request


@pytest.mark.parametrize("operator", ["Gt", "Lt"])
@pytest.mark.parametrize("bound", ["9" * 5000, str(2**63), str(-(2**63) - 1), "many"])
def test_a_bound_that_is_no_64_bit_number_matches_no_node(operator: str, bound: str) -> None:
    """A bound that the scheduler cannot parse matches no node, whatever its length."""
    expression = {"key": "memory", "operator": operator, "values": [bound]}
    missing = missing_label({}, [{"matchExpressions": [expression]}], "node", {"memory": "5"})
    assert missing


def test_a_negative_bound_is_compared() -> None:
    """A bound below 0 is compared as the number that it is."""
    expression = {"key": "memory", "operator": "Lt", "values": ["-5"]}
    assert missing_label({}, [{"matchExpressions": [expression]}], "node", {"memory": "-9"}) == ""


def test_a_deeply_nested_original_request_is_none() -> None:
    """An annotation that is nested too deeply is ignored, as any that nobody of ours wrote."""
    assert original_request({"metadata": {"annotations": {ORIGINAL: "[" * 100_000}}}) == {}

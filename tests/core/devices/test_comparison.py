"""The comparison of slices: what counts as a difference, and what was dropped."""

import pytest

from metagpu.core.devices.comparison import comparable, dropped_fields


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("10000", "10k"),
        ("40960Mi", "40Gi"),
        ("1073741824", "1Gi"),
        ({"pool": {"generation": 1}}, {"pool": {"generation": 7}}),
        ([{"key": "a"}], [{"key": "a", "timeAdded": "2026-11-23T03:00:00Z"}]),
    ],
)
def test_another_spelling_is_no_difference(ours: object, theirs: object) -> None:
    """Values that the API server rewrites are equal: no comparison writes them again."""
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize(
    ("one", "other"), [("49", "50"), ("1Gi", "1G"), ("a100", "a10"), (["1", "2"], ["2", "1"])]
)
def test_another_content_is_a_difference(one: object, other: object) -> None:
    """Amounts, names and order count."""
    assert comparable(one) != comparable(other)


def test_dropped_fields_are_named_once() -> None:
    """A field that is missing in each of many devices is one path; an empty one is missing."""
    policy = {"default": "1"}
    sent = {
        "sharedCounters": [{"name": "gpu"}],
        "devices": [
            {"consumesCounters": [1], "capacity": {"n": {"value": "9", "requestPolicy": policy}}},
            {"consumesCounters": [1], "taints": [{"key": "k"}]},
        ],
    }
    answer = {
        "sharedCounters": None,
        "devices": [{"capacity": {"n": {"value": "9"}}}, {"taints": []}],
    }

    assert dropped_fields(sent, answer) == [
        "sharedCounters",
        "devices[].consumesCounters",
        "devices[].capacity.n.requestPolicy",
        "devices[].taints",
    ]
    assert dropped_fields(sent, sent) == []

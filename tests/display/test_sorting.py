"""The order of rows by a field, also of rows inside rows."""

from typing import Any

import pytest

from metagpu.display.sorting import UnknownField, sort_items

ROWS: list[dict[str, Any]] = [
    {"pod": "b", "used": 1, "parts": [{"mib": 5}, {"mib": 9}], "meta": {"x": 1}},
    {"pod": "a", "used": None, "parts": []},
    {"pod": "c", "used": 3, "parts": [{"mib": 7}, {"mib": None}]},
]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("pod", ["a", "b", "c"]),
        ("used", ["c", "b", "a"]),
        ("mib", ["b", "c", "a"]),
    ],
)
def test_the_order(field: str, expected: list[str]) -> None:
    """Texts go from a to z, numbers from the largest, what is unknown last."""
    assert [sort_item["pod"] for sort_item in sort_items(ROWS, field)] == expected


def test_rows_inside_rows_are_sorted_too() -> None:
    """The largest of the inner rows is the first, and no row is lost."""
    parts = {
        sort_item["pod"]: [each["mib"] for each in sort_item["parts"]]
        for sort_item in sort_items(ROWS, "mib")
    }
    assert parts == {"b": [9, 5], "c": [7, None], "a": []}


@pytest.mark.parametrize("field", ["uesd", "parts", "meta"])
def test_an_unknown_field_is_refused(field: str) -> None:
    """A field of plain values is needed; the error names the fields, or the nearest."""
    with pytest.raises(UnknownField, match=f"--sort-by {field}: "):
        sort_items(ROWS, field)


def test_no_rows_have_no_order() -> None:
    """A node without pods answers any field: there is nothing to sort."""
    assert sort_items([], "anything") == []

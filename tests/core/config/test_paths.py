"""Paths to values in a document."""

import pytest

from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigReason
from metagpu.core.config.paths import join_path, key_path, split_path, value_at

WRONG = ConfigReason.INVALID_VALUE

VALUE = {"a": [{"b.c": {"d": 1}}], "e": {2: 3}}


def test_a_path_is_taken_apart() -> None:
    """A path has keys, indices of lists, and keys in quotes."""
    assert split_path('a[0]["b.c"].d') == ["a", 0, "b.c", "d"]
    assert split_path("") == []


def test_a_value_is_found_by_its_path() -> None:
    """A missing value raises LookupError; a key that is no string has no name."""
    assert value_at(VALUE, 'a[0]["b.c"].d') == 1
    assert value_at(VALUE, "") is VALUE
    for nowhere in ("x", "a[1]", "e.2"):
        with pytest.raises(LookupError):
            value_at(VALUE, nowhere)


@pytest.mark.parametrize(
    ("path", "inner", "whole"),
    [("", "", ""), ("a", "", "a"), ("", "b", "b"), ("a", "b[0]", "a.b[0]"), ("a", "[0]", "a[0]")],
)
def test_paths_are_joined(path: str, inner: str, whole: str) -> None:
    """Keys are joined by a point; an index of a list has no point before it."""
    assert join_path(path, inner) == whole


def test_a_key_with_dots_is_quoted() -> None:
    """A key with dots stands in brackets and quotes, and its value is found by that path."""
    document = Document('profiles:\n  1g.5gb: {max: 7}\n  "a]b": 1\n', "f")

    assert key_path("profiles", "1g.5gb") == 'profiles["1g.5gb"]'
    assert key_path("", "profiles") == "profiles"
    assert document.at('profiles["1g.5gb"].max') == 7
    assert str(document.error('profiles["a]b"]', "wrong", WRONG)) == 'f: 3: profiles["a]b"]: wrong'

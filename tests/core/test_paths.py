"""Paths to values in a document."""

import pytest

from metagpu.core.document import Document
from metagpu.core.paths import below, joined, steps, value_at

VALUE = {"a": [{"b.c": {"d": 1}}], "e": {2: 3}}


def test_a_path_is_taken_apart() -> None:
    """Keys, places in lists, and keys in quotes."""
    assert steps('a[0]["b.c"].d') == ["a", 0, "b.c", "d"]
    assert steps("") == []


def test_a_value_is_found_by_its_path() -> None:
    """What is not there is told; a key that is no text has no name."""
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
    """With a point between keys, and none before a place in a list."""
    assert joined(path, inner) == whole


def test_a_key_with_dots_is_quoted() -> None:
    """A key that a path would take apart stands in brackets and quotes, and is found so."""
    document = Document('profiles:\n  1g.5gb: {max: 7}\n  "a]b": 1\n', "f")

    assert below("profiles", "1g.5gb") == 'profiles["1g.5gb"]'
    assert below("", "profiles") == "profiles"
    assert document.at('profiles["1g.5gb"].max') == 7
    assert str(document.error('profiles["a]b"]', "wrong")) == 'f: 3: profiles["a]b"]: wrong'

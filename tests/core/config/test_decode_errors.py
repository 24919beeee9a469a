"""Errors of msgspec, as messages about the YAML file."""

import msgspec
import pytest

from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """A struct inside another."""

    x: tuple[int, ...]


class Shelves(msgspec.Struct, forbid_unknown_fields=True):
    """Structs in lists and mappings."""

    books: list[Inner] = []
    boxes: dict[str, Inner] = {}
    sizes: dict[str, list[int]] = {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("books: [{x: [1, two]}]", "1: books[0].x[1]: expected a whole number, got a text"),
        ("books:\n- x: [1]\n  y: 2", "3: books[0].y: unknown key; allowed: x"),
        ("boxes: {blue: {}}", "1: boxes.blue: missing key `x`"),
        ("boxes:\n  red: {x: [1]}\n  blue: {y: 1}", "3: boxes.blue.y: unknown key; allowed: x"),
        ("boxes: {a.b: {x: [1, c]}}", '1: boxes["a.b"].x[1]: expected a whole number, got a text'),
        ("sizes:\n  b: [1]\n  a: [1, b]", "3: sizes.a[1]: expected a whole number, got a text"),
        ("sizes:\n  a: [1]\n  1: [1]", "3: sizes.1: the key: expected a text, got a whole number"),
    ],
)
def test_an_error_is_located_inside_lists_and_mappings(text: str, message: str) -> None:
    """The path of an error leads through lists and mappings to its place."""
    with pytest.raises(ConfigError) as caught:
        Document(text, "f").decode(Shelves)
    assert str(caught.value) == f"f: {message}"


@pytest.mark.parametrize(
    ("problem", "path"),
    [
        ("x has no end", "books[0].x"),
        ("`x`: 3 has no end", "books[0].x"),
        ("x and y contradict each other", "books[0]"),
        ("a book has no end", "books[0]"),
        ("y is missing", "books[0]"),
    ],
)
def test_a_check_of_a_struct_is_located_by_the_key_that_it_begins_with(
    problem: str, path: str
) -> None:
    """A check needs no path: its first word is the key, where the file has it there."""

    class Endless(Inner):
        def __post_init__(self) -> None:
            raise ValueError(problem)

    class Library(msgspec.Struct):
        books: list[Endless]

    with pytest.raises(ConfigError) as caught:
        Document("books: [{x: [1]}]", "f").decode(Library)
    assert str(caught.value) == f"f: 1: {path}: {problem}"


def test_of_very_many_keys_none_is_tried() -> None:
    """An error in a mapping that is too large to search names the whole mapping."""
    text = "sizes: {" + ", ".join(f"k{n}: [1]" for n in range(300)) + ", last: [x]}"

    with pytest.raises(ConfigError) as caught:
        Document(text, "f").decode(Shelves)
    assert str(caught.value) == "f: 1: sizes: expected a whole number, got a text"

"""YAML files become values with lines and paths."""

import re

import msgspec
import pytest
import yaml

from metagpu.core.config.document import MAX_TEXT, Document
from metagpu.core.config.errors import ConfigError, ConfigReason

WRONG = ConfigReason.INVALID_VALUE

TEXT = """\
first: 1
list:
  - a
  - {b: 2,
     c: 3}
deep:
  deeper:
    deepest: {x: [1, 2]}
"""


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """A struct inside another."""

    x: tuple[int, ...]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("", 1),
        ("first", 1),
        ("list", 2),
        ("list[0]", 3),
        ("list[1]", 4),
        ("list[1].b", 4),
        ("list[1].c", 5),
        ("deep.deeper.deepest.x[1]", 8),
        ("deep.nothing.there", 6),
        ("list[7]", 2),
        ("list.name", 2),
        ("deep[0]", 6),
        ("first.inner", 1),
        ("nothing", 1),
    ],
)
def test_an_error_names_the_nearest_line(path: str, line: int) -> None:
    """An error has the line of the key or of the list item, else the line of its parent."""
    assert str(Document(TEXT, "f").error(path, "wrong", WRONG)) == ": ".join(
        part for part in ("f", str(line), path, "wrong") if part
    )


def test_an_empty_document_has_no_lines() -> None:
    """An error in an empty document names the file alone."""
    assert str(Document("", "f").error("a.b", "wrong", WRONG)) == "f: a.b: wrong"


def test_values_are_found_by_path() -> None:
    """A path leads through mappings and lists."""
    document = Document(TEXT, "f")

    assert document.at("list[1].c") == 3
    assert document.at("deep.deeper.deepest.x[1]") == 2
    assert document.at("") == document.data


def test_a_part_can_be_decoded() -> None:
    """A value inside the document is decoded into the requested type."""
    assert Document(TEXT, "f").decode(Inner, "deep.deeper.deepest") == Inner((1, 2))


def test_a_path_inside_begins_at_the_top() -> None:
    """An error in a part that was decoded alone has its whole path."""
    with pytest.raises(ConfigError) as caught:
        Document("a:\n- b:\n    x: [two]", "f").decode(Inner, "a[0].b")
    assert str(caught.value) == "f: 3: a[0].b.x[0]: expected a whole number, got a text"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "3: a: the key is there twice, first in line 1; keep one of them"),
        (
            "l:\n- {}\n- x: 1\n  x: 2",
            "4: l[1].x: the key is there twice, first in line 3; keep one",
        ),
        ("a: {b: {c: 1, c: 1}}", "1: a.b.c: the key is there twice, first in line 1; keep one of"),
    ],
)
def test_a_repeated_key_is_refused(text: str, message: str) -> None:
    """A key twice in one mapping is a mistake; in two mappings it is not."""
    Document("a: {x: 1}\nb: {x: 1}", "f")
    with pytest.raises(ConfigError) as caught:
        Document(text, "f")
    assert str(caught.value).startswith(f"f: {message}")


def test_anchors_may_be_used_again() -> None:
    """A YAML alias may repeat a value that does not contain itself."""
    assert Document("a: &x {k: 1}\nb: *x\nc: [*x, *x]", "f").data == {
        "a": {"k": 1},
        "b": {"k": 1},
        "c": [{"k": 1}, {"k": 1}],
    }


def test_aliases_of_aliases_are_refused_unread() -> None:
    """A few lines of aliases that expand to billions of values cost no time."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]

    with pytest.raises(ConfigError) as caught:
        Document("\n".join(lines), "f")
    assert str(caught.value) == (
        "f: no usable YAML: with its aliases written out it has more than 50000 values; write less"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a: '{'x' * MAX_TEXT}'", "it has 1048581 characters; allowed: 1048576 at most"),
        (f"a: [{'1,' * 400_000}]", "in line 1 there are too many values; allowed: 1000 in a list"),
        ("\n".join(f"{n}: 1" for n in range(1002)), "in line 1001 there are too many values"),
        (
            "\n".join(f"{n}: [{'1,' * 900}]" for n in range(60)),
            "in line 56 there are too many values",
        ),
        ("[" * 1_000_000, "a value contains itself, or values are nested too deeply"),
    ],
)
def test_a_text_beyond_the_limits_is_refused_unread(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text costs more than a look at its first values: it is refused before it is composed."""
    monkeypatch.setattr(yaml, "compose", None)

    with pytest.raises(ConfigError, match=re.escape(f"f: no usable YAML: {message}")):
        Document(text, "f")


def test_a_number_of_very_many_digits_is_refused() -> None:
    """A number to the base of 60, which costs quadratic time, is not computed."""
    with pytest.raises(ConfigError, match="a number of 1000001 digits; put a text in quotes"):
        Document(f"a: 1{':1' * 500_000}", "f")


def test_json_may_be_indented_with_tabs() -> None:
    """JSON with tabs is read as JSON, with its lines; a tab inside a text of YAML stays."""
    document = Document('{\n\t"a": {\n\t\t"b":\t[1, 2]\n\t}\n}', "f")

    assert document.data == {"a": {"b": [1, 2]}}
    assert document.line("a.b") == 3
    assert Document('{a: "x\ty"}', "f").data == {"a": "x\ty"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1", "cannot start any token; indent with spaces, not with tabs"),
        ("a: 1\n---\na: 2", "found another document; keep one document in a file, without `---`"),
    ],
)
def test_a_yaml_mistake_is_reported_with_its_fix(text: str, message: str) -> None:
    """The commonest mistakes of YAML are reported with their fix."""
    with pytest.raises(ConfigError) as caught:
        Document(text, "f")
    assert str(caught.value).startswith("f: 2: no valid YAML: ")
    assert message in str(caught.value)


def test_a_part_of_a_file_keeps_the_files_lines() -> None:
    """A document that stands inside another file names the lines of that file."""
    with pytest.raises(ConfigError, match=r"^f: 11: no valid YAML"):
        Document("a: 1\nb: {", "f", first_line=10)
    with pytest.raises(ConfigError, match=r"^f: 11: a: the key is there twice, first in line 10"):
        Document("a: 1\na: 2", "f", first_line=10)
    assert Document("a: 1\nb: 2", "f", first_line=10).line("b") == 11


def test_a_document_without_a_value_keeps_its_lines_and_paths() -> None:
    """Errors about the rest are reported as in the whole document, items of lists too."""
    whole = Document("list:\n- {a: 1}\n- {a: 2}\n- {a: 3}\n- {a: 4, b: 5}", "f")
    first = whole.without("list[0]")
    assert first is not None
    third = first.without("list[2]")
    assert third is not None
    rest = third.without("list[3].b")
    assert rest is not None

    assert rest.data == {"list": [{"a": 2}, {"a": 4}]}
    assert str(rest.error("list[1].a", "wrong", WRONG)) == "f: 5: list[3].a: wrong"
    assert str(rest.error("list[0]", "wrong", WRONG)) == "f: 3: list[1]: wrong"
    assert rest.without("list[9]") is None
    assert rest.without("list[1].b") is None
    assert rest.without("") is None
    assert len(whole.data["list"]) == 4

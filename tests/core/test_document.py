"""YAML into values: lines and paths, of whatever shape the file is."""

import msgspec
import pytest

from metagpu.core.document import Document
from metagpu.core.errors import ConfigError

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
    """A value's line is where its key, or it itself in a list, stands; else its parent's."""
    assert str(Document(TEXT, "f").error(path, "wrong")) == ": ".join(
        part for part in ("f", str(line), path, "wrong") if part
    )


def test_an_empty_document_has_no_lines() -> None:
    """Where there is nothing, an error names the file alone."""
    assert str(Document("", "f").error("a.b", "wrong")) == "f: a.b: wrong"


def test_values_are_found_by_path() -> None:
    """A path leads through mappings and lists."""
    document = Document(TEXT, "f")

    assert document.at("list[1].c") == 3
    assert document.at("deep.deeper.deepest.x[1]") == 2
    assert document.at("") == document.data


def test_a_part_can_be_decoded() -> None:
    """A value inside the document becomes what is wanted."""
    assert Document(TEXT, "f").decode(Inner, "deep.deeper.deepest") == Inner((1, 2))


def test_a_path_inside_is_told_from_the_top() -> None:
    """A misfit in a part that was decoded alone has its whole path."""
    with pytest.raises(ConfigError) as caught:
        Document("a:\n- b:\n    x: [two]", "f").decode(Inner, "a[0].b")
    assert str(caught.value) == "f: 3: a[0].b.x[0]: expected a whole number, got a text"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "3: a: the key stands twice, first in line 1; keep one of them"),
        ("l:\n- {}\n- x: 1\n  x: 2", "4: l[1].x: the key stands twice, first in line 3; keep one"),
        ("a: {b: {c: 1, c: 1}}", "1: a.b.c: the key stands twice, first in line 1; keep one of"),
    ],
)
def test_a_repeated_key_is_refused(text: str, message: str) -> None:
    """A key twice in one mapping is a mistake; in two mappings it is not."""
    Document("a: {x: 1}\nb: {x: 1}", "f")
    with pytest.raises(ConfigError) as caught:
        Document(text, "f")
    assert str(caught.value).startswith(f"f: {message}")


def test_anchors_may_be_used_again() -> None:
    """A value may stand for others, as YAML has it, as long as it does not hold itself."""
    assert Document("a: &x {k: 1}\nb: *x\nc: [*x, *x]", "f").data == {
        "a": {"k": 1},
        "b": {"k": 1},
        "c": [{"k": 1}, {"k": 1}],
    }


def test_aliases_of_aliases_are_refused_unread() -> None:
    """A few lines that stand for thousands of millions of values cost nobody any time."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]

    with pytest.raises(ConfigError) as caught:
        Document("\n".join(lines), "f")
    assert str(caught.value) == (
        "f: no usable YAML: it has 12345679021 values, those that aliases stand for included; "
        "allowed: 100000 at most"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1", "cannot start any token; indent with spaces, not with tabs"),
        ("a: 1\n---\na: 2", "found another document; keep one document in a file, without `---`"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_mend(text: str, message: str) -> None:
    """The commonest mistakes of YAML come with what to do about them."""
    with pytest.raises(ConfigError) as caught:
        Document(text, "f")
    assert str(caught.value).startswith("f: 2: no valid YAML: ")
    assert message in str(caught.value)


def test_a_part_of_a_file_keeps_the_files_lines() -> None:
    """A document that stands inside another file names the lines of that file."""
    with pytest.raises(ConfigError, match=r"^f: 11: no valid YAML"):
        Document("a: 1\nb: {", "f", first_line=10)
    with pytest.raises(ConfigError, match=r"^f: 11: a: the key stands twice, first in line 10"):
        Document("a: 1\na: 2", "f", first_line=10)
    assert Document("a: 1\nb: 2", "f", first_line=10).line("b") == 11

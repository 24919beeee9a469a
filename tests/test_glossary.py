"""The language of the project: `docs/glossary.md` and the code belong together."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = ROOT / "metagpu" / "plugins" / "kubelet" / "pb"
MODULES: Final = sorted(
    file for file in (ROOT / "metagpu").rglob("*.py") if GENERATED not in file.parents
)
TESTS: Final = sorted(file for top in ("tests", "bench") for file in (ROOT / top).rglob("*.py"))
PAGES: Final = [
    ROOT / "README.md",
    *(it for it in sorted((ROOT / "docs").rglob("*.md")) if it.name != "glossary.md"),
]
GLOSSARY: Final = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
NOT_USED: Final = re.findall(r"^\| ([a-z]+)", GLOSSARY.split("## Words not used")[1], re.MULTILINE)
PRIVATE: Final = re.compile(rf"(?<![a-z])({'|'.join(NOT_USED)})s?(?![a-z])", re.IGNORECASE)
SEPARATE: Final = re.compile(r"(?<=[a-z])(?=[A-Z])|_")
CLASS: Final = re.compile(r"^class (\w+)", re.MULTILINE)
RIDDLES: Final = re.compile(
    r"(Whats?|Who|Whose|Whoever|It|Its|Those|These|That|Says?|Gives?|Tells?|Have|Let|Be|How|Why"
    r"|Whether|Where|Which|When)\b"
)
"""Beginnings of a docstring that name neither a subject nor an action."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements below it; expressions, most of a tree, have no docstring."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, ())
        for it in inner if isinstance(inner, list) else ():
            yield from statements(it)


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a file, each with its file and line."""
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def words(file: Path) -> Iterator[tuple[int, str]]:
    """Yield names, strings and comments of a file that has a private word, with their lines."""
    text = file.read_text(encoding="utf-8")
    if not PRIVATE.search(SEPARATE.sub(" ", text)):
        return  # no part of it has one either, and to cut it into parts takes the longest
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], SEPARATE.sub(" ", token.string)


def test_there_is_a_list_of_private_words() -> None:
    """The glossary's table is read; without it no test of this file could fail."""
    assert len(NOT_USED) > 15
    assert PRIVATE.search("class RivalMet".replace("lM", "l M"))


@pytest.mark.parametrize("file", MODULES, ids=lambda it: str(it.relative_to(ROOT)))
def test_no_private_word_comes_back_to_the_code(file: Path) -> None:
    """Names, strings and comments have no private word."""
    found = [f"{file.relative_to(ROOT)}:{line}: {text[:60]}" for line, text in words(file)
             if PRIVATE.search(text)]  # fmt: skip

    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda it: str(it.relative_to(ROOT)))
def test_no_private_word_comes_back_to_the_pages(page: Path) -> None:
    """The pages have no private word."""
    lines = page.read_text(encoding="utf-8").splitlines()

    assert [f"{n}: {line[:80]}" for n, line in enumerate(lines, 1) if PRIVATE.search(line)] == []


def test_no_class_name_stands_for_two_things() -> None:
    """Every class of the package has a name of its own."""
    names = Counter(
        name for file in MODULES for name in CLASS.findall(file.read_text(encoding="utf-8"))
    )

    assert names["Registry"] == 1
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("file", MODULES, ids=lambda it: str(it.relative_to(ROOT)))
def test_docstrings_have_a_subject(file: Path) -> None:
    """Each docstring begins with a verb or a named subject, in one short line."""
    found = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in docstrings(file)
        if RIDDLES.match(text) or len(text.splitlines()[0]) > 80
    ]

    assert found == []


def test_docstrings_of_tests_have_a_subject() -> None:
    """Tests and measurements begin theirs as the package does, with the promise that they keep."""
    found = [
        f"{place}: {text.splitlines()[0]}"
        for file in TESTS
        for place, text in docstrings(file)
        if RIDDLES.match(text)
    ]

    assert found == []


def test_a_package_is_a_charter_and_nothing_else() -> None:
    """An `__init__` has a charter and no code."""
    packages = [it for it in MODULES if it.name == "__init__.py" and it.parent.name != "metagpu"]
    code = [
        str(it.relative_to(ROOT))
        for it in packages
        if len(ast.parse(it.read_text("utf-8")).body) != 1
    ]
    short = [str(it.relative_to(ROOT)) for it in packages if len(it.read_text("utf-8")) < 60]

    assert (code, short) == ([], [])

"""The rules of names and docstrings, for `make lint` and the tests.

`python -m tests.language` prints what breaks one, and exits 1. CONTRIBUTING.md has the list.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = ("metagpu/plugins/kubelet/pb/", "metagpu/sim/allocation/pb/")
LONGEST: Final = 80
"""Characters of a docstring's first line."""
SHORTEST: Final = 60
"""Characters of a charter."""
_SEPARATE: Final = re.compile(r"(?<=[a-z])(?=[A-Z])|_")
_CLASS: Final = re.compile(r"^class (\w+)", re.MULTILINE)
_NO_SUBJECT: Final = re.compile(
    r"(Whats?|Who|Whose|Whoever|It|Its|Those|These|That|Says?|Gives?|Tells?|Have|Let|Be|How|Why"
    r"|Whether|Where|Which|When)\b"
)
"""Beginnings of a docstring that name neither a subject nor an action."""
_IT: Final = re.compile(r"\bit\b *(,|\)|:| in\b|=)")


def words_not_used(root: Path) -> re.Pattern[str]:
    """Return a pattern of the words that are not used."""
    table = (root / WORDS).read_text(encoding="utf-8")
    words = re.findall(r"^\| ([a-z]+)", table, re.MULTILINE)
    return re.compile(rf"(?<![a-z])({'|'.join(words)})s?(?![a-z])", re.IGNORECASE)


WORDS: Final = "docs/development/words.md"


def private_words_of_code(root: Path) -> Iterator[str]:
    """Yield names, strings and comments of the package that have a word of no use."""
    private = words_not_used(root)
    for file in _modules(root):
        text = file.read_text(encoding="utf-8")
        if not private.search(_SEPARATE.sub(" ", text)):
            continue  # no part of it has one either, and to cut it into parts takes the longest
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
                words = _SEPARATE.sub(" ", token.string)
                if private.search(words):
                    yield f"{file.relative_to(root)}:{token.start[0]}: {words[:60]}"


def private_words_of_pages(root: Path) -> Iterator[str]:
    """Yield lines of README.md and docs that have a word of no use."""
    private = words_not_used(root)
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        if page.name != "words.md":
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
                if private.search(line):
                    yield f"{page.relative_to(root)}:{number}: {line[:80]}"


def classes_of_one_name(root: Path) -> Iterator[str]:
    """Yield names that several classes of the package have."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in _modules(root):
        for name in _CLASS.findall(file.read_text(encoding="utf-8")):
            places[name].append(str(file.relative_to(root)))
    for name, files in places.items():
        if len(files) > 1:
            yield f"{', '.join(files)}: {name}"


def long_first_lines(root: Path) -> Iterator[str]:
    """Yield docstrings of the package whose first line is too long."""
    for file in _modules(root):
        for place, line in _first_lines(root, file):
            if len(line) > LONGEST:
                yield f"{place}: {line}"


def docstrings_without_a_subject(root: Path) -> Iterator[str]:
    """Yield docstrings that begin neither with a verb nor with a named subject."""
    for file in (*_modules(root), *_others(root)):
        for place, line in _first_lines(root, file):
            if _NO_SUBJECT.match(line):
                yield f"{place}: {line}"


def locals_named_it(root: Path) -> Iterator[str]:
    """Yield variables and parameters with the name `it`, which does not say what they hold."""
    for file in (*_modules(root), *_others(root)):
        text = file.read_text(encoding="utf-8")
        if _IT.search(text):  # most files have none, and to parse them takes the longest
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Name("it", ast.Store()) | ast.arg("it"):
                        yield f"{file.relative_to(root)}:{node.lineno}"


def packages_without_a_charter(root: Path) -> Iterator[str]:
    """Yield packages whose `__init__` has code, or says too little."""
    for file in _modules(root):
        if file.name == "__init__.py" and file.parent.name != "metagpu":
            text = file.read_text(encoding="utf-8")
            if len(ast.parse(text).body) != 1 or len(text) < SHORTEST:
                yield f"{file.relative_to(root)}: {text[:60]!r}"


RULES: Final[Mapping[str, Callable[[Path], Iterator[str]]]] = {
    "a word of words.md": private_words_of_code,
    "a word of words.md, on a page": private_words_of_pages,
    "a class name for two things": classes_of_one_name,
    f"a docstring whose first line has more than {LONGEST} characters": long_first_lines,
    "a docstring that begins with neither a verb nor a named subject": docstrings_without_a_subject,
    "a variable named `it`": locals_named_it,
    "an __init__ is a charter and nothing else": packages_without_a_charter,
}


def _modules(root: Path) -> Iterator[Path]:
    for file in sorted((root / "metagpu").rglob("*.py")):
        if not str(file.relative_to(root)).startswith(GENERATED):
            yield file


def _others(root: Path) -> Iterator[Path]:
    return (file for top in ("tests", "bench") for file in sorted((root / top).rglob("*.py")))


def _first_lines(root: Path, file: Path) -> Iterator[tuple[str, str]]:
    """Yield the first line of each docstring of a file, with its place."""
    for node in _statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            yield f"{file.relative_to(root)}:{getattr(node, 'lineno', 1)}", text.splitlines()[0]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements below it; expressions, most of a tree, have no docstring."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, ())
        for value in inner if isinstance(inner, list) else ():
            yield from _statements(value)


def main() -> int:
    """Print what breaks a rule; return 1 if anything does."""
    found = [f"{place} ({rule})" for rule, find in RULES.items() for place in find(ROOT)]
    sys.stderr.writelines(f"{name}\n" for name in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

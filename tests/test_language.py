"""The language of the project: `docs/development/words.md` and the code belong together."""

from pathlib import Path
from typing import Final

import pytest

from tests.language import ROOT, RULES, WORDS, words_not_used

BROKEN: Final = {
    "a word of words.md": (
        "metagpu/planted.py",
        "class NodeLedger: ...",
    ),
    "a word of words.md, on a page": (
        "docs/planted.md",
        "Three rivals.",
    ),
    "a class name for two things": ("metagpu/planted.py", "class Twice: ...\nclass Twice: ..."),
    "a docstring whose first line has more than 80 characters": (
        "metagpu/planted.py",
        f'"""A {"very " * 16}long line."""',
    ),
    "a docstring that begins with neither a verb nor a named subject": (
        "tests/planted.py",
        'def f():\n    if x:\n        def g():\n            """What it does."""',
    ),
    "a variable named `it`": ("tests/planted.py", "def f(gpus):\n    return [it for it in gpus]"),
    "an __init__ is a charter and nothing else": (
        "metagpu/planted/__init__.py",
        f'"""A charter {"of words " * 9}."""\nx = 1',
    ),
}
"""For each rule, a file that breaks it."""


def test_there_is_a_list_of_private_words() -> None:
    """The table of words is read; without it no test of this file could fail."""
    private = words_not_used(ROOT)

    assert private.pattern.count("|") > 10
    assert private.search("the rivals of a daemon")


@pytest.mark.parametrize("rule", RULES)
def test_the_project_keeps_its_rules(rule: str) -> None:
    """Each rule holds for the package, its tests, its measurements and its pages."""
    assert list(RULES[rule](ROOT)) == []


@pytest.mark.parametrize("rule", RULES)
def test_what_breaks_a_rule_is_found(rule: str, tmp_path: Path) -> None:
    """A planted file breaks its rule, and is named with its line."""
    name, text = BROKEN[rule]
    for folder in ("metagpu", "tests", "bench", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").touch()
    words = (ROOT / WORDS).read_text(encoding="utf-8")
    (tmp_path / WORDS).parent.mkdir()
    (tmp_path / WORDS).write_text(words, encoding="utf-8")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")

    assert next(RULES[rule](tmp_path)).startswith(name)

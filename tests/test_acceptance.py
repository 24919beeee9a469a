"""Pages that name tests, and the tests, belong together."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ACCEPTANCE = ROOT / "docs" / "development" / "acceptance.md"
THREATS = ROOT / "docs" / "development" / "threats.md"
LAWS = ROOT / "docs" / "development" / "laws.md"


@cache
def functions_in(file: Path) -> set[str]:
    """Return the names of the test functions of a file, without running the file."""
    if not file.is_file():
        return set()

    module = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }


@pytest.mark.parametrize("page", [ACCEPTANCE, THREATS, LAWS], ids=lambda value: value.stem)
def test_every_named_test_exists(page: Path) -> None:
    """Every test that a page names exists under that name."""
    named = re.findall(r"`(tests/[^`:]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    missing = [f"{file}::{name}" for file, name in named if name not in functions_in(ROOT / file)]

    assert named
    assert missing == []


def test_every_case_stands_in_one_table() -> None:
    """Each case of the contract is in exactly one table."""
    text = ACCEPTANCE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", text, re.MULTILINE)

    assert sorted(int(number) for row in rows for number in row.split(",")) == list(range(1, 66))

"""`docs/acceptance.md` and the tests it names belong together."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACCEPTANCE = ROOT / "docs" / "acceptance.md"


def functions_in(file: Path) -> set[str]:
    """Name the test functions that stand in a file, without running it."""
    if not file.is_file():
        return set()

    module = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }


def test_every_named_test_exists() -> None:
    """A promise is proven by a test that is there under the name the document gives."""
    named = re.findall(r"`(tests/[^`:]+\.py)::(\w+)`", ACCEPTANCE.read_text(encoding="utf-8"))
    missing = [f"{file}::{name}" for file, name in named if name not in functions_in(ROOT / file)]

    assert named
    assert missing == []


def test_every_case_stands_in_one_table() -> None:
    """No case is lost, and none has two places."""
    text = ACCEPTANCE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", text, re.MULTILINE)

    assert sorted(int(number) for row in rows for number in row.split(",")) == list(range(1, 66))

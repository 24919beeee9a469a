"""The budget refuses a capability or a house that grows beyond its limit."""

from pathlib import Path

import pytest

from tests import budget


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a small checkout: two modules, of which one imports the other, and a page."""
    files = {
        "metagpu/kubectl/fit.py": "import metagpu.kubectl.pods\n" + "x = 1\n" * 9,
        "metagpu/kubectl/pods.py": "class GpuState:\n    gpu: int\n",
        "tests/test_fit.py": "\n",
        "README.md": "three words more\n",
        "docs/decisions/0001-one.md": "\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_an_excess_is_refused(tree: Path) -> None:
    """A line more than its ceiling is beyond a capability; its last one is not."""
    rows = {
        ceiling: budget.measure_capabilities(
            tree, [budget.Capability("kubectl", ceiling, ("kubectl/*",))]
        )
        for ceiling in (11, 12)
    }

    assert [[(row.now, row.exceeded) for row in rows[n]] for n in rows] == [
        [(12, True)],
        [(12, False)],
    ]


def test_a_file_without_a_capability_is_refused(tree: Path) -> None:
    """A new folder needs its row."""
    with pytest.raises(LookupError, match=r"no capability for metagpu/kubectl/fit\.py"):
        list(budget.measure_capabilities(tree, []))


def test_the_house_is_measured(tree: Path) -> None:
    """Modules, importers, GpuState, decisions and words are counted; the median may not fall."""
    figures = {row.name: row for row in budget.measure_house(tree)}

    assert [figure.name for figure in figures.values() if figure.exceeded] == [
        "lines of a module, the median"
    ]
    assert {name: row.now for name, row in figures.items() if row.now} == {
        "modules without the simulator": 2,
        "lines of a module, the median": 6,
        "modules with one importer, in their own folder": 1,
        "product lines": 12,
        "test lines": 1,
        "fields of GpuState": 1,
        "decisions": 1,
        "words of README.md, docs/*.md and docs/backends/*.md": 3,
    }


def test_the_command_fails_with_the_sentence(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` exits 1 and says what exceeds what; without it all figures are printed."""
    assert budget.main(["--tree", str(tree)]) == 0
    assert "  kubectl " in capsys.readouterr().out
    assert budget.main(["--tree", str(tree), "--check"]) == 1
    assert capsys.readouterr().err.startswith("lines of a module, the median: 6, and the limit is")

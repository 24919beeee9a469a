"""The amounts of every file and node of `nvidia_answers` are those of NVIDIA's plugin."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from metagpu.cli.metagpu import main
from tests.compat.nvidia_answers import ANSWERS, DEVIATIONS


def offered(options: list[str], capsys: pytest.CaptureFixture[str]) -> Mapping[str, int]:
    """Return the resources that `explain` shows, with their amounts."""
    assert main(["explain", *options, "--json"]) == 0
    resources = json.loads(capsys.readouterr().out)["resources"]
    return {name: each["capacity"] for name, each in resources.items() if each["capacity"]}


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_the_amounts_are_nvidias(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node offers what it would offer with NVIDIA's plugin, or what a deviation says."""
    answer = ANSWERS[number]
    deviations = [it.offers(answer) for it in DEVIATIONS if it.applies(answer)]
    expected = deviations[0] if deviations else answer.resources or {}

    assert offered(answer.options(tmp_path), capsys) == expected


def test_every_deviation_is_one_and_is_documented() -> None:
    """Each deviation changes the amounts of an answer, and docs/compat.md has its row."""
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")

    for it in DEVIATIONS:
        assert any(it.applies(one) and it.offers(one) != (one.resources or {}) for one in ANSWERS)
        assert f"| {it.there} | {it.here} |" in page

"""The amounts of every file and node of `nvidia_answers` are those of NVIDIA's plugin."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from metagpu.cli.metagpu import main
from tests.compat.nvidia_answers import ANSWERS

DIFFERENT: Final = """
0 2 5 10 13 14 17 18 20 21 24 30 36 37 38 41 44 46 48 51 54 57 59 61 62 64 66 69 73 91 92 103
105 114 119 123 127 130 131 132 133 137 138 140 141 142 143 144 147 148 149 157 158 159 163 164
165 166 169 179 180 181 183 193 194 195 198 199 204 205 212 214 215
"""
NOT_YET: Final = frozenset(map(int, DIFFERENT.split()))
"""The lines whose amounts differ."""


def offered(options: list[str], capsys: pytest.CaptureFixture[str]) -> Mapping[str, int]:
    """Return the resources that `explain` shows, with their amounts."""
    assert main(["explain", *options, "--json"]) == 0
    resources = json.loads(capsys.readouterr().out)["resources"]
    return {name: each["capacity"] for name, each in resources.items() if each["capacity"]}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(it, marks=[pytest.mark.xfail(strict=True)] if it in NOT_YET else [])
        for it in range(len(ANSWERS))
    ],
)
def test_the_amounts_are_nvidias(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node offers what it would offer with NVIDIA's plugin, which may be nothing."""
    answer = ANSWERS[number]

    assert offered(answer.options(tmp_path), capsys) == (answer.resources or {})

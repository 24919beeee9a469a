"""The labels of each file and node of `nvidia_answers` are those of GPU Feature Discovery."""

import json
from pathlib import Path

import pytest

from metagpu.cli.metagpu import main
from tests.compat.nvidia_answers import ANSWERS
from tests.compat.test_nvidia_answers import NOT_YET

BY_CHANCE = {106, 145}
"""Nodes of two products, of which NVIDIA's code chose the one that it mostly does not choose."""
ANSWERED = [
    number
    for number, answer in enumerate(ANSWERS)
    if answer.labels is not None and number not in BY_CHANCE
]
"""NVIDIA's code fails, and writes no labels, where MPS is asked for on a node with MIG mode."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(it, marks=[pytest.mark.xfail(strict=False)] if it in NOT_YET else [])
        for it in ANSWERED
    ],
)
def test_the_labels_are_nvidias(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node has each label that GPU Feature Discovery gives it, and no other of its name."""
    answer = ANSWERS[number]
    assert main(["explain", *answer.options(tmp_path), "--json"]) == 0
    labels = json.loads(capsys.readouterr().out)["labels"]
    own = {it: value for it, value in labels.items() if it.startswith("nvidia.com/")}
    own.pop("nvidia.com/vgpu.present", None)

    assert own == answer.labels

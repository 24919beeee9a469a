"""The labels of each file and node of `nvidia_answers` are those of GPU Feature Discovery."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from metagpu.cli.metagpu import main
from tests.compat import nvidia_answers
from tests.compat.nvidia_answers import ANSWERS, Answer


class Deviation(NamedTuple):
    """A kind of label that differs here on purpose; docs/compat.md has a row for each.

    Attributes:
        there: what NVIDIA's code says; `here` what metagpu does.
        applies: whether an answer is of the kind.
    """

    there: str
    here: str
    applies: Callable[[Answer], bool]


def _is_first_of_two(answer: Answer) -> bool:
    """Return whether the first entry of the GPUs is not the largest, and whole GPUs are shared."""
    counts = [entry["replicas"] for entry in answer.gpu_entries]
    whole = (answer.labels or {}).get("nvidia.com/gpu.sharing-strategy", "none") != "none"
    return whole and counts != [] and counts[0] < max(counts)


def _has_idle_mps(answer: Answer) -> bool:
    """Return whether a file shares by MPS what the node does not have."""
    labels = answer.labels or {}
    strategies = [value for name, value in labels.items() if name.endswith("sharing-strategy")]
    return labels.get("nvidia.com/mps.capable") == "true" and "mps" not in strategies


DEVIATIONS: Final = (
    Deviation(
        "GPU Feature Discovery writes no label of a node with MPS and a GPU in MIG mode",
        "all labels are written",
        lambda answer: answer.labels is None,
    ),
    Deviation(
        "labels of a node of several products are those of one, chosen by chance",
        "of the last product with a GPU that is not in MIG mode, the most frequent choice there",
        lambda answer: ANSWERS.index(answer) in {106, 145},
    ),
    Deviation(
        "`gpu.replicas` is that of the first of two entries, `mps.capable` that of the file",
        "they are those of what is offered",
        lambda answer: _is_first_of_two(answer) or _has_idle_mps(answer),
    ),
    Deviation(
        "a label of more than 63 characters is written, which Kubernetes refuses",
        "it is not written",
        lambda answer: any(len(value) > 63 for value in (answer.labels or {}).values()),
    ),
)
ALL: Final = (*nvidia_answers.DEVIATIONS, *DEVIATIONS)
"""Also those of amounts: labels describe the offer."""
ALIKE: Final = [
    number
    for number, answer in enumerate(ANSWERS)
    if not any(deviation.applies(answer) for deviation in ALL)
]


def labels_of(
    answer: Answer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> Mapping[str, str]:
    """Return the labels under NVIDIA's names that `explain` shows."""
    assert main(["explain", *answer.options(folder), "--json"]) == 0
    labels = json.loads(capsys.readouterr().out)["labels"]
    labels.pop("nvidia.com/vgpu.present", None)  # of the machine
    return {name: value for name, value in labels.items() if name.startswith("nvidia.com/")}


@pytest.mark.parametrize("number", ALIKE)
def test_the_labels_are_nvidias(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node has each label that GPU Feature Discovery gives it, and no other of its name."""
    assert labels_of(ANSWERS[number], tmp_path, capsys) == ANSWERS[number].labels


def test_labels_describe_the_offer_where_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instances that are offered beside GPUs that are not have all labels."""
    [node] = [
        answer
        for answer in ANSWERS
        if [(gpu["model"], gpu.get("mig")) for gpu in answer.node]
        == [("v100-32gb", None), ("h200", True), ("v100-32gb", None)]
    ]
    labels = labels_of(node, tmp_path, capsys)
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H200-MIG-3g.71gb"
    assert labels["nvidia.com/gpu.count"] == "2"
    assert labels["nvidia.com/gpu.family"] == "hopper"


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda deviation: deviation.there)
def test_every_deviation_is_one_and_is_documented(
    deviation: Deviation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each deviation changes the labels of each of its answers, and docs/compat.md has its row."""
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
    assert f"| {deviation.there} | {deviation.here} |" in page
    different = [answer for answer in ANSWERS if deviation.applies(answer)]
    assert different
    for answer in different:
        assert labels_of(answer, tmp_path, capsys) not in ({}, answer.labels)

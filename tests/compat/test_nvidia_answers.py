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
    deviations = [deviation.offers(answer) for deviation in DEVIATIONS if deviation.applies(answer)]
    expected = deviations[0] if deviations else answer.resources or {}

    assert offered(answer.options(tmp_path), capsys) == expected


def test_every_deviation_is_one_and_is_documented() -> None:
    """Each deviation changes the amounts of an answer, and docs/compat.md has its row."""
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")

    for deviation in DEVIATIONS:
        assert any(
            deviation.applies(one) and deviation.offers(one) != (one.resources or {})
            for one in ANSWERS
        )
        assert f"| {deviation.there} | {deviation.here} |" in page


def test_an_amount_of_0_has_the_true_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A remark names the sizes under single, and what keeps whole GPUs back."""
    gpus = [
        {"model": "a100-40gb", "mig": True, "instances": ["1g.5gb@0", "2g.10gb@2"]},
        {"model": "t4"},
    ]
    node = tmp_path / "node.json"
    node.write_text(json.dumps({"gpus": gpus}), encoding="utf-8")
    config = tmp_path / "plugin.json"
    config.write_text('{"flags": {"migStrategy": "single"}}', encoding="utf-8")
    assert main(["explain", "--config", str(config), "--simulate", str(node), "--json"]) == 0

    [remark] = json.loads(capsys.readouterr().out)["remarks"]
    assert remark["text"] == (
        "nvidia.com/gpu has the amount 0, because no GPU provides it; GPU 0: nvidia.com/gpu is for "
        "instances of one size, and its pool has 1g.5gb, 2g.10gb; MIG mode is on; GPU 1: other "
        "devices of this node have the name of its resource; a resource is of one kind"
    )

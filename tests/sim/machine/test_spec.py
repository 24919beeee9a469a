"""The forms of `--simulate`."""

from pathlib import Path

import pytest

from metagpu.core.config.errors import ConfigError
from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.model.gpu import MIB
from metagpu.sim.machine.spec import build_node

FILE = """
driver: "570.86.15"
gpus:
  - model: h100-80gb
    count: 2
  - model: t4
    uuid: GPU-5f2e1a3c-0000-0000-0000-00000000beef
    numa: 1
    recoveryAction: gpu-reset
    processes:
      - {pid: 4242, memory: 8Gi}
      - {pid: 4243, gi: 1, ci: 0}
"""


def written(folder: Path, text: str) -> str:
    """Write a file; return its path."""
    path = folder / "node.yaml"
    path.write_text(text)
    return str(path)


def test_the_short_form_may_name_the_driver() -> None:
    """`driver=VERSION` beside the models is the driver of the node, in any place."""
    assert build_node("driver=535.104.05,t4:2").driver_branch == 535
    node = build_node("t4:2,driver=570.86.15")

    assert node.driver == "570.86.15"
    assert len(node.gpus) == 2


@pytest.mark.parametrize(
    ("argument", "models"),
    [
        ("a100-40gb", ["a100-40gb"]),
        ("a100-40gb:2", ["a100-40gb"] * 2),
        ("a100-40gb:1, t4:2", ["a100-40gb", "t4", "t4"]),
    ],
)
def test_models_in_a_line(argument: str, models: list[str]) -> None:
    """Models and counts make a node, in this order."""
    assert [gpu.model.key for gpu in build_node(argument).gpus] == models


def test_the_same_line_has_the_same_uuids() -> None:
    """A simulated daemon finds the same GPUs after a restart."""
    first, second = build_node("a100-40gb:8"), build_node("a100-40gb:8")

    assert [gpu.id for gpu in first.gpus] == [gpu.id for gpu in second.gpus]


def test_a_file_says_everything(tmp_path: Path) -> None:
    """Driver, uuid, NUMA node, recovery action and processes come from the file."""
    node = build_node(written(tmp_path, FILE))
    gpu = node.gpu("GPU-5f2e1a3c-0000-0000-0000-00000000beef")

    assert node.driver == "570.86.15"
    assert [gpu.model.key for gpu in node.gpus] == ["h100-80gb", "h100-80gb", "t4"]
    assert (gpu.slot, gpu.numa, gpu.recovery_action) == (2, 1, RecoveryAction.GPU_RESET)
    assert gpu.used == 8192 * MIB
    assert (4243, 1, 0) in gpu.processes


def test_a_file_may_wire_the_gpus(tmp_path: Path) -> None:
    """PCI switches, and NVLinks to NVSwitches and between GPUs, may differ from the models'."""
    node = build_node(
        written(
            tmp_path,
            "gpus:\n"
            "  - {model: a30, count: 2, pciSwitch: 7}\n"
            "  - {model: h100-80gb, nvswitchLinks: 0}\n"
            "nvlinks: [{gpus: [0, 1], links: 4}]\n",
        )
    )
    left, right, alone = node.gpus

    assert (left.pci_switch, right.pci_switch, alone.pci_switch) == (7, 7, 1)
    assert node.nvlinks(left) == [right] * 4
    assert node.nvlinks(right) == [left] * 4
    assert node.nvlinks(alone) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "a100:8",
            r"^--simulate: gpus\[0\].model: no GPU model 'a100'; .*; did you mean a100-40gb\?$",
        ),
        ("a100-40gb:0", "must be at least 1"),
        ("a100-40gb:65", "a node has 64 at most"),
        ("a100-40gb:x", "not MODEL:COUNT .* models: v100-16gb, "),
        ("", "not MODEL:COUNT"),
        ("nowhere/node.yaml", "nowhere/node.yaml: cannot be read: No such file"),
    ],
)
def test_a_line_that_makes_no_sense(argument: str, message: str) -> None:
    """One line names the mistake and the allowed values."""
    with pytest.raises(ConfigError, match=message) as caught:
        build_node(argument)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: [{model: t5}]", r"node.yaml: 1: gpus\[0\].model: no GPU model 't5'; allowed: .*t4"),
        ("gpus:\n  - model: t4\n    cuont: 2", r"yaml: 3: gpus\[0\].cuont: unknown key; .*count"),
        ("gpus: [{model: t4, recoveryAction: reset}]", "allowed: none, gpu-reset"),
        ("gpus: [{model: t4, uuid: GPU-1}]", "is not a GPU-xxxxxxxx"),
        (
            "gpus: [{model: t4, count: 2, uuid: GPU-5f2e1a3c-0000-0000-0000-00000000beef}]",
            "stands for one GPU",
        ),
        ("gpus: [{model: t4, count: -2}]", r"yaml: 1: gpus\[0\].count: must be at least 1$"),
        ("gpus:\n- model: t4\n- model: t4\n  mig: true", r"yaml: 3: gpus\[1\]: t4 has no MIG$"),
        ("gpus: [{model: t4, processes: [{pid: 0}]}]", r"processes\[0\].pid: must be 1 to 41943"),
        ("gpus: [{model: t4, numa: 9999999}]", r"numa: must be at most 1000000"),
        ("gpus: [{model: t4, numa: -1}]", r"gpus\[0\].numa: must be at least 0"),
        ("gpus: [{model: t4, pciSwitch: -1}]", r"gpus\[0\].pciSwitch: must be at least 0"),
        ("gpus: [{model: t4, nvswitchLinks: 37}]", r"nvswitchLinks: must be at most 36"),
        (
            "gpus: [{model: a30, count: 2}]\nnvlinks: [{gpus: [0, 2], links: 4}]",
            r"yaml: 2: nvlinks\[0\].gpus: must be two GPUs of 0 to 1",
        ),
        (
            "gpus: [{model: a30, count: 2}]\nnvlinks: [{gpus: [1, 1], links: 4}]",
            r"nvlinks\[0\].gpus: must be two GPUs",
        ),
        (
            "gpus: [{model: a30, count: 2}]\nnvlinks: [{gpus: [0, 1], links: 37}]",
            r"nvlinks\[0\].links: must be 0 to 36",
        ),
        ("gpus: [{model: t4, processes: [{pid: 1, memory: 99Gi}]}]", "MiB left"),
        ("gpus: [{model: t4, processes: [{pid: 1, memory: lots}]}]", "not an amount of memory"),
        ("driver: newest\ngpus: []", "yaml: 1: driver: 'newest' is not a driver version"),
        ("boards: []", "unknown key"),
        ("gpus: [{model: t4, mig: true}]", "t4 has no MIG"),
        (
            "gpus: [{model: a30, instances: [1g.6gb@0]}]",
            "no 1g.6gb@0 on GPU-.*: its MIG mode is off",
        ),
        ("gpus: [{model: a30, mig: true, instances: [1g.5gb@0]}]", "it has: 1g.6gb, 1g.6gb"),
        (
            "gpus: [{model: a30, provisioning: {failures: -1}}]",
            r"provisioning\.failures: must be at least 0",
        ),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file, the line and the key."""
    with pytest.raises(ConfigError, match=message):
        build_node(written(tmp_path, text))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    """The error names the wrong encoding."""
    file = tmp_path / "node.yaml"
    file.write_bytes(b"gpus: [{model: caf\xe9}]")

    with pytest.raises(ConfigError) as caught:
        build_node(str(file))
    assert str(caught.value) == f"{file}: cannot be read: not a text in UTF-8"

"""The answers of NVIDIA's own code to 370 files on nodes, as data.

`nvidia-answers.jsonl.gz` has a line of JSON for each file of the device plugin (`config`)
and node (`node`, as `--simulate` reads it, with the MIG instances that are there): the amounts of
the device plugin (`resources`), or why it does not start (`refused`), and the labels of GPU Feature
Discovery (`labels`) but for time stamps and those of the machine. Source: k8s-device-plugin 0.20
with its label code, asked on 2026-11-28 (the first 220) and 2026-11-29; the loop that fed GPUs and
instances to that code was ours. It left out what the plugin's program checks of its flags, and
labels that chance decides.
"""

import gzip
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec


class Answer(msgspec.Struct, frozen=True):
    """A file, a node, and what NVIDIA's code makes of them."""

    config: Mapping[str, Any]
    node: tuple[Mapping[str, Any], ...]
    driver: str
    refused: str | None
    resources: Mapping[str, int] | None
    labels: Mapping[str, str] | None

    @property
    def sharing(self) -> Mapping[str, Any]:
        """The way of sharing that counts; it is empty without any."""
        sharing = self.config.get("sharing") or {}
        way: Mapping[str, Any] = sharing.get("mps") or sharing.get("timeSlicing") or {}
        return way

    @property
    def gpu_entries(self) -> Sequence[Mapping[str, Any]]:
        """The entries of `nvidia.com/gpu`."""
        return [
            entry
            for entry in self.sharing.get("resources", ())
            if entry["name"].removeprefix("nvidia.com/") == "gpu"
        ]

    @property
    def whole_in_mig_mode(self) -> bool:
        """Return whether the strategy is `none` and a GPU is in MIG mode."""
        strategy = self.config.get("flags", {}).get("migStrategy", "none")
        return strategy == "none" and any(gpu.get("mig") for gpu in self.node)

    def options(self, folder: Path) -> list[str]:
        """Write the file and the node to a folder; return the options that name them."""
        config, node = folder / "plugin.json", folder / "node.json"
        config.write_bytes(msgspec.json.encode(self.config))
        node.write_bytes(msgspec.json.encode({"driver": self.driver, "gpus": self.node}))
        return ["--config", str(config), "--simulate", str(node)]


_FILE: Final = Path(__file__).with_name("nvidia-answers.jsonl.gz")
_LINES: Final = gzip.decompress(_FILE.read_bytes()).splitlines()
ANSWERS: Final = [msgspec.json.decode(line, type=Answer) for line in _LINES]


class Deviation(NamedTuple):
    """A kind of answer that differs here on purpose; docs/compat.md has a row for each.

    Attributes:
        there: what NVIDIA's code says.
        here: what metagpu does, and why.
        applies: whether an answer is of the kind.
        offers: returns the amounts here.
    """

    there: str
    here: str
    applies: Callable[[Answer], bool]
    offers: Callable[[Answer], Mapping[str, int]]


_NOT_SINGLE: Final = ("the same migEnabled value", "has no MIG devices configured")


def _suiting_single(answer: Answer) -> Mapping[str, int]:
    """Count the instances of a node, if all are of one profile; without any, the whole GPUs."""
    profiles = Counter(
        instance.partition("@")[0] for gpu in answer.node for instance in gpu.get("instances", ())
    )
    if len(profiles) > 1:
        return {}
    devices = profiles.total() or sum(not gpu.get("mig") for gpu in answer.node)
    replicas = max((entry["replicas"] for entry in answer.gpu_entries), default=1)
    renamed = answer.gpu_entries and answer.sharing.get("renameByDefault")
    name = f"nvidia.com/gpu{'.shared' if renamed else ''}"
    return {name: devices * replicas} if devices else {}


def _out_of_mig_mode(answer: Answer) -> Mapping[str, int]:
    """Return the part of the amount that is of GPUs out of MIG mode."""
    usable = sum(not gpu.get("mig") for gpu in answer.node)
    amounts = (answer.resources or {}).items()
    return {name: count * usable // len(answer.node) for name, count in amounts if usable}


DEVIATIONS: Final = (
    Deviation(
        "`single`, and GPUs without MIG mode or without instances: the plugin does not start",
        "the instances are offered, and those GPUs are not, with the reason",
        lambda answer: any(name in (answer.refused or "") for name in _NOT_SINGLE),
        _suiting_single,
    ),
    Deviation(
        "`none`, and a GPU in MIG mode: offered whole, where CUDA finds one instance or nothing",
        "not offered, with the reason",
        lambda answer: answer.whole_in_mig_mode,
        _out_of_mig_mode,
    ),
)

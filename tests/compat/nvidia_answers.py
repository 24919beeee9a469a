"""The answers of NVIDIA's own code to 220 files on nodes, as data.

`nvidia-answers.jsonl.gz` has a line of JSON for each file of the device plugin (`config`)
and node (`node`, as `--simulate` reads it, with the MIG instances that are there): the amounts of
the device plugin (`resources`), or why it does not start (`refused`), and the labels of GPU Feature
Discovery (`labels`) but for time stamps and those of the machine. Source: k8s-device-plugin 0.20
with its label code, asked on 2026-11-28; the loop that fed GPUs and instances to that code was
ours.
"""

import gzip
from collections import Counter
from collections.abc import Callable, Mapping
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
    sharing = answer.config.get("sharing", {})
    [way] = sharing.values() or [{"resources": ()}]
    entries = [
        resource
        for resource in way["resources"]
        if resource["name"].removeprefix("nvidia.com/") == "gpu"
    ]
    replicas = max((entry["replicas"] for entry in entries), default=1)
    shared = ".shared" if entries and way.get("renameByDefault") else ""
    return {f"nvidia.com/gpu{shared}": devices * replicas}


DEVIATIONS: Final = (
    Deviation(
        "`single`, and GPUs without MIG mode or without instances: the plugin does not start",
        "the instances are offered, and those GPUs are not, with the reason",
        lambda answer: any(name in (answer.refused or "") for name in _NOT_SINGLE),
        _suiting_single,
    ),
)

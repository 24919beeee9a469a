"""The answers of NVIDIA's own code to 220 files on nodes, as data.

`files/nvidia-answers.jsonl.gz` has a line of JSON for each file of the device plugin (`config`)
and node (`node`, as `--simulate` reads it, with the MIG instances that are there): the amounts of
the device plugin (`resources`), or why it does not start (`refused`), and the labels of GPU Feature
Discovery (`labels`) but for time stamps and those of the machine. Source: k8s-device-plugin 0.20
with its label code, asked on 2026-11-28; the loop that fed GPUs and instances to that code was
ours.
"""

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.compat.rig import FILES


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


_LINES: Final = gzip.decompress((FILES / "nvidia-answers.jsonl.gz").read_bytes()).splitlines()
ANSWERS: Final = [msgspec.json.decode(line, type=Answer) for line in _LINES]

"""CDI's words: the specification that container runtimes read, and the names in it. Pure.

By the Container Device Interface a runtime is told names such as `metagpu.io/gpu=GPU-<uuid>`, and
finds in files of /etc/cdi and /var/run/cdi what to do to a container for each. The rules kept here
are those of CDI's specification and of its Go library (tags.cncf.io/container-device-interface),
which all runtimes use: a file that breaks one is passed over as a whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from metagpu.core.grant import DeviceNode, Grant
from metagpu.core.model import ShareId

KIND: Final = "metagpu.io/gpu"
"""Vendor and class of our names. Not NVIDIA's: a name that two files have is in neither."""
FILE_NAME: Final = "metagpu.io-gpu.json"
"""As CDI recommends: vendor, class, and an ending by which runtimes know it."""
DEFAULT_DIR: Final = Path("/var/run/cdi")
"""One of the two folders in which every runtime looks; the other is for what is written by hand."""
ANNOTATIONS: Final = "cdi.k8s.io/"
"""Begins the annotations that name devices to a runtime."""

_LEAST: Final = (0, 3, 0)
"""The oldest version of CDI that its library takes."""
_HOST_PATH: Final = (0, 5, 0)
"""The version from which on a node may stand elsewhere on the host."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_IN_NAMES: Final = str.maketrans({"@": ":", "+": "_"})
"""What ids have and CDI's names may not; neither `:` nor `_` is in the slot of an instance."""


class Edits(msgspec.Struct, frozen=True):
    """What is done to every container that is given any device: the driver's libraries, hooks.

    Attributes:
        edits: CDI's `containerEdits`, as it was read.
        version: the version of CDI that has all of it.
    """

    edits: Mapping[str, Any] = msgspec.field(default_factory=dict)
    version: tuple[int, int, int] = _LEAST


def device_name(share: ShareId) -> str:
    """Name what stands for a share, whatever its uuid: `GPU-<uuid>::2g.10gb:4`."""
    return share.translate(_IN_NAMES)


def names_in(grant: Grant) -> frozenset[str]:
    """Give the devices of ours that a grant names, in either of the two ways, without the kind."""
    told = list(grant.cdi_names)
    for key, names in grant.annotations.items():
        if key.startswith(ANNOTATIONS):
            told += names.split(",")
    own = f"{KIND}="
    return frozenset(name.removeprefix(own) for name in told if name.startswith(own))


def edits_in(printed: str) -> Edits:
    """Read the common edits of a specification in JSON, with a program's log around it.

    Raises:
        ValueError: if there is none; says what is missing.
    """
    # A log line never begins with a brace, a specification does.
    start = re.search(r"^\{", printed, re.MULTILINE)
    if start is None:
        raise ValueError("it printed no CDI specification")
    try:
        spec, _ = json.JSONDecoder().raw_decode(printed, start.start())
    except json.JSONDecodeError as error:
        raise ValueError(f"what it printed is no JSON: {error}") from None

    version = _VERSION.fullmatch(str(spec.get("cdiVersion")))
    edits = spec.get("containerEdits")
    if version is None or not isinstance(edits, dict):
        raise ValueError("what it printed has no cdiVersion or no containerEdits")
    major, minor, patch = map(int, version.groups())
    return Edits(edits, (major, minor, patch))


def specification(
    devices: Mapping[str, Sequence[DeviceNode]], common: Sequence[DeviceNode], edits: Edits
) -> str:
    """Write what a runtime reads, as JSON.

    Args:
        devices: the nodes of each device, by its name; none without a node, nor without a device:
            runtimes would pass over the file.
        common: nodes that belong to all of them.
        edits: what else is done to a container with any of them.
    """
    nodes = [*common, *(node for those in devices.values() for node in those)]
    elsewhere = any(node.host_path != node.container_path for node in nodes)
    ours = {node.container_path for node in common}
    others = [it for it in edits.edits.get("deviceNodes") or () if it.get("path") not in ours]

    spec = {
        "cdiVersion": ".".join(
            map(str, max(edits.version, _HOST_PATH if elsewhere else _LEAST)),
        ),
        "kind": KIND,
        "devices": [
            {"name": name, "containerEdits": {"deviceNodes": list(map(_node, those))}}
            for name, those in devices.items()
        ],
        "containerEdits": {**edits.edits, "deviceNodes": [*map(_node, common), *others]},
    }
    return json.dumps(spec, indent=2) + "\n"


def _node(it: DeviceNode) -> Mapping[str, str]:
    elsewhere = {"hostPath": it.host_path} if it.host_path != it.container_path else {}
    return {"path": it.container_path, **elsewhere, "permissions": it.permissions}

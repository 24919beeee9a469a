"""CDI specifications for container runtimes, and their device names. Pure.

The Container Device Interface gives a runtime names such as `metagpu.io/gpu=GPU-<uuid>`; files in
/etc/cdi and /var/run/cdi describe the edits of a container for each name. The rules here are those
of CDI's specification and of its Go library (tags.cncf.io/container-device-interface), which all
runtimes use: the library ignores a file that breaks a rule.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from metagpu.core.grants.grant import DeviceNode, Grant, Mount
from metagpu.core.model import resource_claims
from metagpu.core.model.driver_roots import Folder
from metagpu.core.model.shares import ShareId

KIND: Final = "metagpu.io/gpu"
"""Vendor and class of our names. Not NVIDIA's: runtimes ignore a name that two files have."""
CLAIM_KIND: Final = resource_claims.KIND
CLAIM_FILES: Final = "metagpu.io-claim-*.json"
"""The files of ResourceClaims, each with the claim's uid."""
FILE_NAME: Final = "metagpu.io-gpu.json"
"""CDI recommends vendor and class; runtimes read files with this suffix only."""
"""One of the two folders that every runtime reads; the other is for files written by hand."""
ANNOTATION_PREFIX: Final = "cdi.k8s.io/"
"""The prefix of the annotations that name devices to a runtime."""

MONITOR_KIND: Final = "metagpu.io/monitor"
MONITOR_FILE: Final = "metagpu.io-monitor.json"
"""GPUs for who looks at them alone: ResourceClaims with `adminAccess`."""

_OLDEST: Final = (0, 3, 0)
"""The oldest version of CDI that its library accepts."""
_HOST_PATH: Final = (0, 5, 0)
"""The first version with a `hostPath` of device nodes."""
_DIGIT_FIRST: Final = (0, 5, 0)
"""The first version with names that begin with a digit, as uids do."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
HOOK_NAME: Final = "metagpu-hook"
"""The name by which `mgctl` is a hook (mgctl/hook.h), and that of its file."""
_IN_CONTAINER: Final = frozenset({"createContainer", "startContainer"})
"""Hooks whose arguments are paths in the container."""
_IN_NAMES: Final = str.maketrans({"@": ":", "+": "_"})
"""Characters of ids that CDI names may not have; no slot of an instance has `:` or `_`."""


class ContainerEdits(msgspec.Struct, frozen=True):
    """The edits of every container with any device: the driver's libraries, hooks.

    Attributes:
        edits: CDI's `containerEdits`, as read.
        version: the version of CDI that has all of these edits.
    """

    edits: Mapping[str, Any] = msgspec.field(default_factory=dict)
    version: tuple[int, int, int] = _OLDEST


def device_name(share: ShareId) -> str:
    """Return the CDI name of a share, as `GPU-<uuid>::2g.10gb:4`.

    The name stays when the share's device gets another uuid.
    """
    return share.translate(_IN_NAMES)


def device_names(grant: Grant) -> frozenset[str]:
    """Return the names of our CDI devices in a grant, without the kind.

    The names are in the grant's CDI field or in its annotations.
    """
    qualified = list(grant.cdi_names)
    for key, names in grant.annotations.items():
        if key.startswith(ANNOTATION_PREFIX):
            qualified += names.split(",")
    own = f"{KIND}="
    return frozenset(name.removeprefix(own) for name in qualified if name.startswith(own))


def parse_edits(printed: str) -> ContainerEdits:
    """Read the common edits of a JSON specification in a program's output.

    Raises:
        ValueError: there is no specification, or a part of it is missing.
    """
    # A log line never begins with a brace, a specification does.
    start = re.search(r"^\{", printed, re.MULTILINE)
    if start is None:
        raise ValueError("it printed no CDI specification")
    try:
        spec, _ = json.JSONDecoder().raw_decode(printed, start.start())
    except json.JSONDecodeError as error:
        raise ValueError(f"its output is not valid JSON: {error}") from None

    version = _VERSION.fullmatch(str(spec.get("cdiVersion")))
    edits = spec.get("containerEdits")
    if version is None or not isinstance(edits, dict):
        raise ValueError("its output has no cdiVersion or no containerEdits")
    major, minor, patch = map(int, version.groups())
    return ContainerEdits(edits, (major, minor, patch))


def with_host_paths(edits: ContainerEdits, folders: Sequence[Folder]) -> ContainerEdits:
    """Replace paths of this process by the host's.

    `nvidia-ctk cdi transform root` does the same. Arguments of hooks that run in the container,
    and paths in the container, stay.
    """
    folders = sorted(folders, key=lambda folder: len(folder.here), reverse=True)

    def host_path(path: str) -> str:
        for folder in folders:
            here = folder.here.rstrip("/")
            if path == here or path.startswith(f"{here}/"):
                return f"{folder.prefix}{path[len(here) :]}" or "/"
        return path

    def argument(text: str) -> str:
        return "::".join(host_path(part) for part in text.split("::", 1))

    def moved(edit: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**edit, **({"hostPath": host_path(edit["hostPath"])} if "hostPath" in edit else {})}

    def moved_hook(hook: Mapping[str, Any]) -> Mapping[str, Any]:
        if hook.get("hookName") in _IN_CONTAINER:
            return hook
        return {**hook, "args": [argument(text) for text in hook.get("args") or ()]}

    change = {"deviceNodes": moved, "mounts": moved, "hooks": moved_hook}
    changed = {
        name: [change[name](entry) for entry in value or ()] if name in change else value
        for name, value in edits.edits.items()
    }
    return replace(edits, edits=changed)


def build_spec(
    devices: Mapping[str, Sequence[DeviceNode]],
    common: Sequence[DeviceNode],
    edits: ContainerEdits,
    kind: str = KIND,
    hook: Sequence[str] = (),
) -> str:
    """Build the JSON text of a specification.

    Args:
        devices: the device nodes of each device, by its name. Runtimes ignore a file without a
            device, or with a device without a node.
        common: device nodes of all devices.
        edits: further edits of a container with any of the devices.
        kind: vendor and class of the names.
        hook: our program that starts before a container's first process, and its arguments.
    """
    nodes = [*common, *(node for those in devices.values() for node in those)]
    host_paths = any(node.host_path != node.container_path for node in nodes)
    ours = {node.container_path for node in common}
    others = [node for node in edits.edits.get("deviceNodes") or () if node.get("path") not in ours]

    spec = {
        "cdiVersion": ".".join(
            map(str, max(edits.version, _HOST_PATH if host_paths else _OLDEST)),
        ),
        "kind": kind,
        "devices": [
            {"name": name, "containerEdits": {"deviceNodes": list(map(_node, those))}}
            for name, those in devices.items()
        ],
        "containerEdits": {
            **edits.edits,
            "deviceNodes": [*map(_node, common), *others],
            **({"hooks": [_hook(hook), *(edits.edits.get("hooks") or ())]} if hook else {}),
        },
    }
    return json.dumps(spec, indent=2) + "\n"


def build_monitor_spec(
    devices: Mapping[str, Sequence[DeviceNode]],
    common: Sequence[DeviceNode],
    edits: ContainerEdits,
    variables: Mapping[str, str],
) -> str:
    """Build the JSON text of the specification of GPUs for monitoring.

    Of the driver's edits it has libraries and hooks, and no device node: those are for programs
    that compute.
    """
    env = [*(edits.edits.get("env") or ()), *(f"{key}={value}" for key, value in variables.items())]
    changed = {**edits.edits, "deviceNodes": [], "env": env}
    return build_spec(devices, common, replace(edits, edits=changed), MONITOR_KIND)


def _hook(command: Sequence[str]) -> Mapping[str, Any]:
    """Return a hook without a deadline, by which a runtime fails the container."""
    program, *arguments = command
    return {
        "hookName": "createRuntime",
        "path": program,
        "args": [HOOK_NAME, *arguments],
    }


def without_start_hook(text: str) -> str:
    """Return the JSON text of a specification of ours without our hook."""
    spec = json.loads(text)
    edits = spec["containerEdits"]
    hooks = edits.get("hooks") or []
    edits["hooks"] = [hook for hook in hooks if (hook.get("args") or [])[:1] != [HOOK_NAME]]
    return json.dumps(spec, indent=2) + "\n"


def _node(node: DeviceNode) -> Mapping[str, str]:
    host_path = {"hostPath": node.host_path} if node.host_path != node.container_path else {}
    return {"path": node.container_path, **host_path, "permissions": node.permissions}


def build_claim_spec(devices: Mapping[str, Grant]) -> str:
    """Build the JSON text of a specification of a ResourceClaim's devices.

    A device has what the grant has beside GPUs: variables and mounts. The GPUs themselves are
    devices of the node's specification.
    """
    spec = {
        "cdiVersion": ".".join(map(str, _DIGIT_FIRST)),
        "kind": CLAIM_KIND,
        "devices": [
            {
                "name": name,
                "containerEdits": {
                    "env": [f"{key}={value}" for key, value in sorted(grant.envs.items())],
                    "mounts": list(map(_mount, grant.mounts)),
                },
            }
            for name, grant in devices.items()
        ],
    }
    return msgspec.json.format(msgspec.json.encode(spec), indent=2).decode() + "\n"


def _mount(mount: Mount) -> Mapping[str, Any]:
    access = "ro" if mount.read_only else "rw"
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": [access, "rbind", "rprivate"],
    }

"""A container runtime's view of CDI: its rules for a file, and the names that it resolves.

The rules are those of CDI's Go library (`Spec.validate`, `ContainerEdits.Validate` and
`MinimumRequiredVersion` of tags.cncf.io/container-device-interface 1.1); and nodes have to exist.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from metagpu.sim.machine.containers import make_device_nodes

VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
_VENDOR: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CLASS: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_HOOKS: Final = {
    *("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"),
}
_EDITS: Final = {
    *("env", "deviceNodes", "hooks", "mounts", "intelRdt", "additionalGids", "netDevices"),
}


class CdiRefusedError(Exception):
    """A runtime refuses a file, or does not find a device."""


def check_spec(text: str) -> dict[str, Any]:
    """Check a specification as a runtime does.

    Raises:
        CdiRefusedError: if it breaks a rule.
    """
    spec: dict[str, Any] = json.loads(text)
    _require(set(spec) <= {"cdiVersion", "kind", "annotations", "devices", "containerEdits"}, spec)
    version = spec["cdiVersion"]
    _require(version in VERSIONS, version)

    vendor, _, class_name = spec["kind"].partition("/")
    _require(bool(_VENDOR.fullmatch(vendor)) and bool(_CLASS.fullmatch(class_name)), spec["kind"])
    _require(bool(spec["devices"]), "no devices")
    names = [device["name"] for device in spec["devices"]]
    _require(len(names) == len(set(names)), "a device twice")
    for device in spec["devices"]:
        _require(set(device) <= {"name", "annotations", "containerEdits"}, device)
        _require(bool(_DEVICE.fullmatch(device["name"])), device["name"])
        _require(any(device["containerEdits"].values()), f"empty edits of {device['name']}")
    for edits in _all_edits(spec):
        _check(edits)

    least = max(map(VERSIONS.index, _required_versions(spec)))
    _require(VERSIONS.index(version) >= least, f"{version} is older than {VERSIONS[least]}")
    return spec


def resolve_nodes(folder: Path, *names: str, kind: str = "metagpu.io/gpu") -> list[str]:
    """Return the host's nodes that a container with these devices gets; all of them exist.

    Raises:
        CdiRefusedError: if a runtime would not start the container.
    """
    found: dict[str, Mapping[str, Any]] = {}
    common: dict[str, Mapping[str, Any]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix not in {".json", ".yaml"}:
            continue
        spec = check_spec(file.read_text())
        for device in spec["devices"]:
            name = f"{spec['kind']}={device['name']}"
            _require(name not in found, f"{name} is in two files")
            found[name] = device["containerEdits"]
            common[name] = spec.get("containerEdits", {})

    nodes: dict[str, None] = {}
    for name in names:
        full = name if "=" in name else f"{kind}={name}"
        _require(full in found, f"unresolvable CDI devices {full}")
        for edits in (common[full], found[full]):
            paths = [node.get("hostPath", node["path"]) for node in edits.get("deviceNodes", ())]
            nodes.update(dict.fromkeys(paths))
    for path in nodes:
        _require(Path(path).exists(), f"no node {path}")
    return list(nodes)


def host(root: Path, gpus: int = 1) -> None:
    """Create NVIDIA's nodes below a root, as plain files, and the driver's list of MIG minors."""
    make_device_nodes(root, gpus)


def _check(edits: Mapping[str, Any]) -> None:
    _require(set(edits) <= _EDITS, edits)
    for variable in edits.get("env", ()):
        _require(variable.find("=") > 0, variable)
    for node in edits.get("deviceNodes", ()):
        _require(node["path"].startswith("/"), node)
        _require(node.get("type", "") in {"", "b", "c", "u", "p"}, node)
        _require(not set(node.get("permissions", "")) - set("rwm"), node)
    for hook in edits.get("hooks", ()):
        _require(hook["hookName"] in _HOOKS and bool(hook["path"]), hook)
    for mount in edits.get("mounts", ()):
        _require(bool(mount["hostPath"]) and bool(mount["containerPath"]), mount)


def _required_versions(spec: Mapping[str, Any]) -> Iterator[str]:
    """Return the versions that the parts of a specification require."""
    yield VERSIONS[0]
    if spec.get("annotations") or "." in spec["kind"].partition("/")[2]:
        yield "0.6.0"
    if any(device["name"][0].isdigit() for device in spec["devices"]):
        yield "0.5.0"
    for edits in _all_edits(spec):
        if any("hostPath" in node for node in edits.get("deviceNodes", ())):
            yield "0.5.0"
        if any("type" in mount for mount in edits.get("mounts", ())):
            yield "0.4.0"
        if edits.get("additionalGids") or edits.get("intelRdt"):
            yield "0.7.0"
        if edits.get("netDevices"):
            yield "1.1.0"


def _all_edits(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return [
        spec.get("containerEdits", {}),
        *(device["containerEdits"] for device in spec["devices"]),
    ]


def _require(holds: bool, what: object) -> None:  # noqa: FBT001 - a rule holds, or it does not
    if not holds:
        raise CdiRefusedError(str(what))

"""What a container runtime does with CDI: rules by which it takes a file, and names it resolves.

The rules are those of CDI's Go library (`Spec.validate`, `ContainerEdits.Validate` and
`MinimumRequiredVersion` of tags.cncf.io/container-device-interface 1.1); and nodes have to exist.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

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
    """A runtime does not take a file, or does not find a device."""


def checked(text: str) -> dict[str, Any]:
    """Take a specification as a runtime does.

    Raises:
        CdiRefusedError: if it breaks a rule.
    """
    spec: dict[str, Any] = json.loads(text)
    _want(set(spec) <= {"cdiVersion", "kind", "annotations", "devices", "containerEdits"}, spec)
    version = spec["cdiVersion"]
    _want(version in VERSIONS, version)

    vendor, _, class_name = spec["kind"].partition("/")
    _want(bool(_VENDOR.fullmatch(vendor)) and bool(_CLASS.fullmatch(class_name)), spec["kind"])
    _want(bool(spec["devices"]), "no devices")
    names = [device["name"] for device in spec["devices"]]
    _want(len(names) == len(set(names)), "a device twice")
    for device in spec["devices"]:
        _want(set(device) <= {"name", "annotations", "containerEdits"}, device)
        _want(bool(_DEVICE.fullmatch(device["name"])), device["name"])
        _want(any(device["containerEdits"].values()), f"empty edits of {device['name']}")
    for edits in _all_edits(spec):
        _check(edits)

    least = max(map(VERSIONS.index, _needed(spec)))
    _want(VERSIONS.index(version) >= least, f"{version} is older than {VERSIONS[least]}")
    return spec


def resolved(folder: Path, *names: str, kind: str = "metagpu.io/gpu") -> list[str]:
    """Give the host's nodes that a container gets that is told these devices; all of them exist.

    Raises:
        CdiRefusedError: if a runtime would not start the container.
    """
    found: dict[str, Mapping[str, Any]] = {}
    common: dict[str, Mapping[str, Any]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix not in {".json", ".yaml"}:
            continue
        spec = checked(file.read_text())
        for device in spec["devices"]:
            name = f"{spec['kind']}={device['name']}"
            _want(name not in found, f"{name} is in two files")
            found[name], common[name] = device["containerEdits"], spec["containerEdits"]

    nodes: dict[str, None] = {}
    for name in names:
        full = name if "=" in name else f"{kind}={name}"
        _want(full in found, f"unresolvable CDI devices {full}")
        for edits in (common[full], found[full]):
            paths = [node.get("hostPath", node["path"]) for node in edits.get("deviceNodes", ())]
            nodes.update(dict.fromkeys(paths))
    for path in nodes:
        _want(Path(path).exists(), f"no node {path}")
    return list(nodes)


def host(root: Path, gpus: int = 1) -> None:
    """Put NVIDIA's nodes below a root, as plain files, and the driver's list of MIG's numbers."""
    caps = root / "dev/nvidia-caps"
    caps.mkdir(parents=True)
    paths = ["nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))]
    for path in paths:
        (root / "dev" / path).touch()

    lines = ["config 1", "monitor 2"]
    minor = 2
    for gpu in range(gpus):
        for instance in range(15):
            for part in ("access", *(f"ci{number}/access" for number in range(8))):
                minor += 1
                lines.append(f"gpu{gpu}/gi{instance}/{part} {minor}")
                (caps / f"nvidia-cap{minor}").touch()
    minors = root / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text("\n".join(lines) + "\n")


def _check(edits: Mapping[str, Any]) -> None:
    _want(set(edits) <= _EDITS, edits)
    for variable in edits.get("env", ()):
        _want(variable.find("=") > 0, variable)
    for node in edits.get("deviceNodes", ()):
        _want(node["path"].startswith("/"), node)
        _want(node.get("type", "") in {"", "b", "c", "u", "p"}, node)
        _want(not set(node.get("permissions", "")) - set("rwm"), node)
    for hook in edits.get("hooks", ()):
        _want(hook["hookName"] in _HOOKS and bool(hook["path"]), hook)
    for mount in edits.get("mounts", ()):
        _want(bool(mount["hostPath"]) and bool(mount["containerPath"]), mount)


def _needed(spec: Mapping[str, Any]) -> Iterator[str]:
    """Say which versions the parts of a specification need."""
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
    return [spec.get("containerEdits", {}), *(it["containerEdits"] for it in spec["devices"])]


def _want(holds: bool, what: object) -> None:  # noqa: FBT001 - a rule holds, or it does not
    if not holds:
        raise CdiRefusedError(str(what))

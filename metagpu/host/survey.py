"""What can be seen of a node without changing anything: the facts of `mgctl doctor`. Blocks."""

import base64
import binascii
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from metagpu.core import cdi
from metagpu.core.doctor import NodeFacts
from metagpu.host.linux import sees_host
from metagpu.host.nodes import device_nodes

_CAP_KILL: Final = 5
"""linux/capability.h."""
_PATIENCE: Final = 2.0
"""Seconds for a socket to take a connection."""
_NVIDIAS: Final = re.compile(r"nvidia-[a-z0-9.-]+\.sock")
"""NVIDIA's device plugin names its sockets so, by resource."""
_ENVVAR: Final = re.compile(
    r"^\s*accept-nvidia-visible-devices-envvar-when-unprivileged\s*=\s*false", re.MULTILINE
)


class Where(msgspec.Struct, frozen=True):
    """Where things are; `root` is the host's root, as seen from here."""

    root: Path
    kubelet_dir: Path
    pod_resources: Path
    pod_dir: Path


def survey(where: Where, status: Mapping[str, Any] | None, no_status: str) -> NodeFacts:
    """Look at everything once; beside it stands what the daemon said, or why it did not."""
    proc, client = where.root / "proc", where.pod_dir / "mgctl"

    return NodeFacts(
        uid=os.geteuid(),
        can_kill=bool(_capabilities(proc) >> _CAP_KILL & 1),
        sees_host=sees_host(proc),
        names_containers=(where.root / "var/log/containers").is_dir(),
        driver=_driver(proc),
        nodes=device_nodes(where.root).present,
        kubelet=_refusal(where.kubelet_dir / "kubelet.sock"),
        pod_resources=_refusal(where.pod_resources),
        rivals=dict(_rivals(where.kubelet_dir)),
        status=status,
        no_status=no_status,
        pod_dir=str(where.pod_dir),
        client=client.is_file() and os.access(client, os.X_OK),
        noexec=client.is_file() and bool(os.statvfs(client).f_flag & os.ST_NOEXEC),
        pod_socket=_refusal(where.pod_dir / "mgctl.sock"),
        envvar_refused=_ENVVAR.search(
            _text(where.root / "etc/nvidia-container-runtime/config.toml")
        )
        is not None,
        cdi=tuple(_cdi(where.root)),
        mps=shutil.which("nvidia-cuda-mps-control") or "",
    )


def _capabilities(proc: Path) -> int:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(proc / "self/status"), re.MULTILINE)
    return int(found[1], 16) if found else 0


def _driver(proc: Path) -> str:
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _text(proc / "driver/nvidia/version"))
    return found[0] if found else ""


def _refusal(path: Path) -> str:
    """Say why a socket does not take a connection; empty if it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE)
        try:
            connection.connect(str(path))
        except OSError as error:
            return f"{path} ({error.strerror or error})"
    return ""


def _rivals(folder: Path) -> Iterator[tuple[str, str]]:
    """Name other plugins by their sockets; one on which nobody answers is nobody's rival."""
    for path in sorted(folder.glob("*")):
        if (name := _rival(path.name)) and not _refusal(path):
            yield name, path.name


def _rival(name: str) -> str:
    if _NVIDIAS.fullmatch(name):
        return "NVIDIA's device plugin"
    try:
        resource = base64.b64decode(name, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    # MetaGPU's sockets are called after their resource, in base64.
    return "MetaGPU" if re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", resource) else ""


def _cdi(root: Path) -> Iterator[str]:
    for folder in ("etc/cdi", "var/run/cdi"):
        for path in sorted((root / folder).glob("*")):
            text = _text(path) if path.suffix in {".yaml", ".json"} else ""
            if "nvidia.com/" in text or cdi.KIND in text:
                yield f"/{folder}/{path.name}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

"""The facts of `mgctl doctor` about a node, read without changing it. Blocks."""

import base64
import binascii
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.grants import cdi
from metagpu.core.model.driver_roots import Folder, RootOptions
from metagpu.core.reports.doctor import NodeFacts
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.status import roots_report
from metagpu.core.runtime.files import is_noexec
from metagpu.host.device_nodes import device_nodes, missing_links
from metagpu.host.driver_roots import PROGRAMS, find_roots, program_roots
from metagpu.host.linux import sees_host

_CONNECT_TIMEOUT: Final = 2.0
"""Seconds for a socket to take a connection."""
_NVIDIAS: Final = re.compile(r"nvidia-[a-z0-9.-]+\.sock")
"""NVIDIA's device plugin names its sockets so, by resource."""
_TOOLKIT: Final = (
    "etc/nvidia-container-runtime/config.toml",
    "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
)
"""The toolkit's configuration: of a package of the host's, and of the GPU operator."""
_ENVVAR: Final = re.compile(
    r"^\s*accept-nvidia-visible-devices-envvar-when-unprivileged\s*=\s*false", re.MULTILINE
)


class SurveyPaths(msgspec.Struct, frozen=True):
    """The paths of a survey; `root` is the host's root, as a path of this process.

    `roots` are the named roots of driver and device nodes.
    """

    root: Path
    kubelet_dir: Path
    pod_resources: Path
    run_dir: Path
    pod_dir: Path
    roots: RootOptions = RootOptions()


def survey_node(where: SurveyPaths, status: StatusReport | None, no_status: str) -> NodeFacts:
    """Collect the facts once, with the daemon's status or the reason for none."""
    proc, client = where.root / "proc", where.pod_dir / "mgctl"
    roots = find_roots(where.roots)
    if where.root != Path("/"):
        roots = replace(roots, dev=Folder("/", str(where.root)), host=Folder("/", str(where.root)))
    host, nodes = Path(roots.host.here), device_nodes(roots.dev).present

    return NodeFacts(
        uid=os.geteuid(),
        inaccessible=tuple(_inaccessible(where)),
        in_host_pid_namespace=sees_host(proc),
        has_container_logs=(where.root / "var/log/containers").is_dir(),
        driver=_driver(proc),
        device_nodes=nodes,
        kubelet_problem=_refusal(where.kubelet_dir / "kubelet.sock"),
        pod_resources_problem=_refusal(where.pod_resources),
        competing_plugins=dict(_competing_plugins(where.kubelet_dir)),
        status=status,
        status_problem=no_status,
        pod_dir=str(where.pod_dir),
        has_mgctl=client.is_file() and os.access(client, os.X_OK),
        noexec=client.is_file() and is_noexec(where.pod_dir, proc),
        pod_socket_problem=_refusal(where.pod_dir / "mgctl.sock"),
        envvar_accepted=_envvar_accepted(host),
        cdi_files=tuple(_cdi(host)),
        roots=status.driver_roots if status else roots_report(roots),
        unlinked_nodes=tuple(missing_links(roots, nodes).values()),
        mps_program=_program("nvidia-cuda-mps-control", where.roots),
    )


def _inaccessible(where: SurveyPaths) -> Iterator[str]:
    """Yield folders without the access that metagpu needs (docs/permissions.md)."""
    needed = {
        where.kubelet_dir: os.R_OK | os.W_OK,
        where.pod_resources.parent: os.R_OK,
        where.run_dir: os.R_OK | os.W_OK,
        where.pod_dir: os.R_OK | os.W_OK,
        where.root / "sys/fs/cgroup": os.R_OK,
    }
    for folder, access in needed.items():
        if not os.access(folder, access | os.X_OK, effective_ids=True):
            yield f"{folder} ({'write' if access & os.W_OK else 'read'})"


def _driver(proc: Path) -> str:
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _text(proc / "driver/nvidia/version"))
    return found[0] if found else ""


def _refusal(path: Path) -> str:
    """Return why a socket takes no connection; empty if it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT)
        try:
            connection.connect(str(path))
        except OSError as error:
            return f"{path} ({error.strerror or error})"
    return ""


def _competing_plugins(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield competing plugins, by their sockets; each socket needs a listener."""
    for path in sorted(folder.glob("*")):
        if (name := _plugin_name(path.name)) and not _refusal(path):
            yield name, path.name


def _plugin_name(name: str) -> str:
    if _NVIDIAS.fullmatch(name):
        return "NVIDIA's device plugin"
    try:
        resource = base64.b64decode(name, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    # MetaGPU's sockets are named after their resource, in base64.
    return "MetaGPU" if re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", resource) else ""


def _cdi(root: Path) -> Iterator[str]:
    # /var/run is a link to /run, on some hosts an absolute one, which leads out of a mounted root.
    for folder in ("etc/cdi", "run/cdi"):
        for path in sorted((root / folder).glob("*")):
            text = _text(path) if path.suffix in {".yaml", ".json"} else ""
            if "nvidia.com/" in text or cdi.KIND in text:
                yield f"/{folder}/{path.name}"


def _envvar_accepted(root: Path) -> bool | None:
    """Return whether a toolkit of this node reads the variable of every container."""
    files = [root / name for name in _TOOLKIT if (root / name).is_file()]
    return any(not _ENVVAR.search(_text(file)) for file in files) if files else None


def _program(name: str, options: RootOptions) -> str:
    """Return the path of a program of the driver's, empty if it is not found."""
    folders = [str(root / folder) for root in program_roots(options) for folder in PROGRAMS]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders)) or ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

"""Real processes in the containers one wants them in: a /proc and the kubelet's links, in a folder.

What the kernel says of a process is the kernel's own; its cgroup and its container's names are
files here.
"""

import hashlib
import uuid
from pathlib import Path
from typing import Final

from metagpu.core.host import Container
from metagpu.core.model import Holder
from metagpu.host import LinuxHost

_SHOWN: Final = ("stat", "status", "cmdline")
_UNIFIED: Final = "0::"
"""Begins the line of cgroup v2 in `/proc/PID/cgroup` (cgroups(7))."""


def cgroup_of(pid: int, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> str:
    """Give the folder of a process's cgroup, empty where it has none of version 2; blocks."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return ""
    paths = [line.removeprefix(_UNIFIED) for line in lines if line.startswith(_UNIFIED)]
    return str(root / paths[0].lstrip("/")) if paths else ""


def container_of(holder: Holder, life: int = 0) -> Container:
    """Invent the container of a pod; each life of a pod has another."""
    pod = f"{holder.namespace}/{holder.pod}/{life}"
    return Container(
        id=hashlib.sha256(f"{pod}/{holder.container}".encode()).hexdigest(),
        pod_uid=str(uuid.uuid5(uuid.NAMESPACE_DNS, pod)),
    )


def _path_of(container: Container) -> str:
    uid = container.pod_uid.replace("-", "_")
    return f"/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{container.id}.scope"


class SimHost:
    """A folder with a /proc and the links to containers' logs.

    Attributes:
        folder: holds both.
        proc: shows the processes that were put there, and no others.
        logs: as the kubelet's `/var/log/containers`.
        cgroups: as the kernel's `/sys/fs/cgroup`, with the cgroups of containers.
        host: reads both.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc, self.logs = folder / "proc", folder / "containers"
        self.cgroups = folder / "cgroup"
        for made in (self.proc, self.logs, self.cgroups):
            made.mkdir()
        (self.cgroups / "cgroup.controllers").touch()
        (self.proc / "stat").symlink_to("/proc/stat")
        self.host = LinuxHost(self.proc, self.logs, self.cgroups, own_pids=True)

    def show(self, pid: int, cgroup: str, *, real: int | None = None) -> None:
        """Let a process be seen in a cgroup; one that is seen already moves there.

        With `real` a pid is made up, and looks like that process.
        """
        shown = self.proc / str(pid)
        shown.mkdir(exist_ok=True)
        if cgroup.startswith(_UNIFIED):
            path = cgroup.strip().removeprefix(_UNIFIED).lstrip("/")
            (self.cgroups / path).mkdir(parents=True, exist_ok=True)
        (shown / "cgroup").write_text(cgroup)
        for name in _SHOWN:
            if not (shown / name).is_symlink():
                (shown / name).symlink_to(f"/proc/{real or pid}/{name}")

    def name(self, holder: Holder, container: Container) -> None:
        """Make the link that the kubelet makes when it starts a container."""
        stem = f"{holder.pod}_{holder.namespace}_{holder.container}-{container.id}"[:251]
        pod = f"{holder.namespace}_{holder.pod}_{container.pod_uid}"
        link = self.logs / f"{stem}.log"
        if not link.is_symlink():
            link.symlink_to(f"/var/log/pods/{pod}/{holder.container}/0.log")

    def house(
        self, pid: int, holder: Holder, life: int = 0, *, real: int | None = None
    ) -> Container:
        """Let a process run in a container of this name, as containerd below systemd has it."""
        container = container_of(holder, life)
        self.show(pid, f"{_UNIFIED}{_path_of(container)}\n", real=real)
        self.name(holder, container)
        return container

    def start(self, holder: Holder, life: int = 0) -> Path:
        """Start a container without a process; give its cgroup."""
        container = container_of(holder, life)
        cgroup = self.cgroups / _path_of(container).lstrip("/")
        cgroup.mkdir(parents=True, exist_ok=True)
        self.name(holder, container)
        return cgroup

    def cgroup_of(self, pid: int) -> str:
        """Give the cgroup's folder of a process that was put there."""
        return cgroup_of(pid, self.proc, self.cgroups)

    def forget(self) -> None:
        """Remove all links, as the kubelet does when it removes containers."""
        for link in self.logs.iterdir():
            link.unlink()

"""Real processes in simulated containers: a /proc and links to logs, in a folder.

The kernel's own files describe a process; its cgroup and its container's name are files here.
"""

import hashlib
import shutil
import uuid
from pathlib import Path
from typing import Final

from metagpu.core.contracts.host import Container
from metagpu.core.model.shares import Holder
from metagpu.host.linux import LinuxHost

_SHOWN: Final = ("stat", "status", "cmdline")
_UNIFIED: Final = "0::"
"""Begins the line of cgroup v2 in `/proc/PID/cgroup` (cgroups(7))."""


def cgroup_of(pid: int, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> str:
    """Return the folder of a process's cgroup v2, or an empty text without one.

    The function blocks.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return ""
    paths = [line.removeprefix(_UNIFIED) for line in lines if line.startswith(_UNIFIED)]
    return str(root / paths[0].lstrip("/")) if paths else ""


def container_of(holder: Holder, life: int = 0, uid: str = "") -> Container:
    """Return a made-up container of a pod; each uid, or else life, has another."""
    pod = f"{holder.namespace}/{holder.pod}/{uid or life}"
    return Container(
        id=hashlib.sha256(f"{pod}/{holder.container}".encode()).hexdigest(),
        pod_uid=uid or str(uuid.uuid5(uuid.NAMESPACE_DNS, pod)),
    )


def _pod_slice(uid: str) -> str:
    return f"kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice"


def _path_of(container: Container) -> str:
    return f"/{_pod_slice(container.pod_uid)}/cri-containerd-{container.id}.scope"


class SimHost:
    """A folder with a /proc, a cgroup tree and the links to containers' logs.

    Attributes:
        folder: the folder with all three.
        proc: a /proc with the added processes only.
        logs: the kubelet's `/var/log/containers`.
        pods: the kubelet's `/var/log/pods`.
        cgroups: the kernel's `/sys/fs/cgroup`, with the cgroups of containers.
        host: a `LinuxHost` that reads all three.
    """

    def __init__(self, folder: Path, *, make: bool = True) -> None:
        self.folder = folder
        self.proc, self.logs = folder / "proc", folder / "containers"
        self.pods, self.cgroups = folder / "pods", folder / "cgroup"
        self.host = LinuxHost(self.proc, self.logs, self.cgroups, own_pids=True)
        if make:
            self.make()

    def make(self) -> None:
        """Make the folders, without what an earlier process left in them."""
        for made in (self.proc, self.logs, self.pods, self.cgroups):
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
        (self.cgroups / "cgroup.controllers").touch()
        (self.proc / "stat").symlink_to("/proc/stat")

    def add_process(self, pid: int, cgroup: str, *, real: int | None = None) -> None:
        """Add a process to a cgroup; a process that is there already moves.

        With `real`, the pid is made up and has the details of the process `real`.
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
        """Create the link to a container's log, and the folder of its pod's logs."""
        stem = f"{holder.pod}_{holder.namespace}_{holder.container}-{container.id}"[:251]
        pod = f"{holder.namespace}_{holder.pod}_{container.pod_uid}"
        link = self.logs / f"{stem}.log"
        (self.pods / pod).mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(f"/var/log/pods/{pod}/{holder.container}/0.log")

    def add_container_process(
        self, pid: int, holder: Holder, life: int = 0, *, real: int | None = None, uid: str = ""
    ) -> Container:
        """Add a process in a container, with the cgroup path of containerd under systemd."""
        container = container_of(holder, life, uid)
        self.add_process(pid, f"{_UNIFIED}{_path_of(container)}\n", real=real)
        self.name(holder, container)
        return container

    def start(self, holder: Holder, life: int = 0, uid: str = "") -> Path:
        """Start a container without a process; return the folder of its cgroup."""
        container = container_of(holder, life, uid)
        cgroup = self.cgroups / _path_of(container).lstrip("/")
        cgroup.mkdir(parents=True, exist_ok=True)
        self.name(holder, container)
        return cgroup

    def end(self, uid: str) -> None:
        """Remove the cgroups and the names of a pod's containers."""
        for link in self.logs.iterdir():
            if f"_{uid}/" in str(link.readlink()):
                link.unlink()
        for folder in self.pods.glob(f"*_{uid}"):
            folder.rmdir()
        shutil.rmtree(self.cgroups / _pod_slice(uid), ignore_errors=True)

    def cgroup_of(self, pid: int) -> str:
        """Return the folder of the cgroup of an added process."""
        return cgroup_of(pid, self.proc, self.cgroups)

    def remove_log_links(self) -> None:
        """Remove links and logs of all pods, as the kubelet does with the pods."""
        for link in self.logs.iterdir():
            link.unlink()
        for folder in self.pods.iterdir():
            folder.rmdir()


_INSTANCES: Final = 15
"""The GPU instances that a driver numbers on one GPU."""
_COMPUTE_INSTANCES: Final = 8


def make_device_nodes(root: Path, gpus: int) -> None:
    """Make the nodes of GPUs below a folder, and the list of MIG minors. Blocks.

    Raises:
        OSError: a file cannot be made.
    """
    caps, listed = root / "dev" / "nvidia-caps", root / "proc/driver/nvidia-caps/mig-minors"
    caps.mkdir(parents=True, exist_ok=True)
    listed.parent.mkdir(parents=True, exist_ok=True)
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (root / "dev" / name).touch()
    lines = ["config 1", "monitor 2"]
    for gpu in range(gpus):
        for instance in range(_INSTANCES):
            for part in ("access", *(f"ci{n}/access" for n in range(_COMPUTE_INSTANCES))):
                minor = len(lines) + 1
                lines.append(f"gpu{gpu}/gi{instance}/{part} {minor}")
                (caps / f"nvidia-cap{minor}").touch()
    listed.write_text("\n".join(lines) + "\n", encoding="ascii")

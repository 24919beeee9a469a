"""A machine whose processes are real and whose cgroups and logs are as a test wants them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from uuid import NAMESPACE_DNS, uuid5

import anyio
from anyio.abc import Process

from metagpu.core.host import Container
from metagpu.core.model import Holder
from metagpu.host import LinuxHost

_SHOWN = ("stat", "status", "cmdline")


def container_of(holder: Holder, life: int = 0) -> Container:
    """Invent the container of a pod; each life of a pod has another."""
    name = f"{holder.namespace}/{holder.pod}/{life}"
    return Container(
        id=sha256(f"{name}/{holder.container}".encode()).hexdigest(),
        pod_uid=str(uuid5(NAMESPACE_DNS, name)),
    )


@dataclass
class HostRig:
    """A folder with a /proc and the kubelet's links to logs, and the host that reads them."""

    folder: Path
    host: LinuxHost = field(init=False)

    def __post_init__(self) -> None:
        self.proc, self.logs = self.folder / "proc", self.folder / "containers"
        self.proc.mkdir()
        self.logs.mkdir()
        (self.proc / "stat").symlink_to("/proc/stat")
        self.host = LinuxHost(self.proc, self.logs, own_pids=True)

    def show(self, pid: int, cgroup: str) -> None:
        """Let a real process be seen, in this cgroup; what is in it already moves there."""
        shown = self.proc / str(pid)
        shown.mkdir(exist_ok=True)
        (shown / "cgroup").write_text(cgroup)
        for name in _SHOWN:
            if not (shown / name).is_symlink():
                (shown / name).symlink_to(f"/proc/{pid}/{name}")

    def name(self, holder: Holder, container: Container) -> None:
        """Make the link that the kubelet makes when it starts a container."""
        h = holder
        link = f"{h.pod}_{h.namespace}_{h.container}-{container.id}"[:251]
        target = f"/var/log/pods/{h.namespace}_{h.pod}_{container.pod_uid}/{h.container}/0.log"
        (self.logs / f"{link}.log").symlink_to(target)

    def house(self, pid: int, holder: Holder, life: int = 0) -> Container:
        """Let a real process run in a container of this name."""
        container = container_of(holder, life)
        uid = container.pod_uid.replace("-", "_")
        self.show(
            pid,
            f"0::/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{container.id}.scope\n",
        )
        if not any(container.id in link.name for link in self.logs.iterdir()):
            self.name(holder, container)
        return container


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[Process]:
    """Run a real process while the block lasts, `sleep 60` by default."""
    process = await anyio.open_process(command or ("sleep", "60"), stdin=None)

    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()

"""One GPU of the simulated machine, and the processes on it. The caller holds `SimNode.changed`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from metagpu.core.driver import ComputeMode, RecoveryAction
from metagpu.core.errors import MetagpuError
from metagpu.core.gpu import MIB, GpuId
from metagpu.sim.boards import Board
from metagpu.sim.instances import Instances

_BUSES: Final = (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)  # of a DGX A100, in PCI order
_HANDLES: Final = 0x7F5E_0000_0000


class SimError(MetagpuError):
    """Raised when the simulated node cannot do what it was told; says what it could do."""


@dataclass(slots=True)
class SimProcess:
    """A process on a GPU; `memory` in bytes, `None` when the driver does not say.

    Attributes:
        sm: how busy it keeps the GPU's multiprocessors, in percent.
        cgroup: the folder of its cgroup, empty where limits of cgroups do not matter.
    """

    pid: int
    memory: int | None
    gi: int | None = None
    ci: int | None = None
    graphics: bool = False
    sm: int = 0
    cgroup: str = ""


@dataclass(slots=True)
class SimGpu:
    """One GPU, everything about it.

    Attributes:
        slot: its place in the machine, never given to another GPU.
        pci_switch: GPUs with the same number are on one PCI switch.
        nvswitch_links: how many of its NVLinks lead to NVSwitches.
        failure: the NVML code with which every call about it is answered.
        hung_until: until when calls about it block, by `time.monotonic`.
        limits: bytes that all processes in a cgroup and below it may have together.
    """

    slot: int
    board: Board
    id: GpuId
    numa: int
    pci_switch: int
    nvswitch_links: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    rows: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    recovery_action: RecoveryAction = RecoveryAction.NONE
    compute_mode: ComputeMode = ComputeMode.DEFAULT
    mig: Instances = field(default_factory=lambda: Instances(()))
    failure: int | None = None
    hung_until: float = 0.0
    processes: dict[tuple[int, int | None, int | None], SimProcess] = field(default_factory=dict)
    limits: dict[Path, int] = field(default_factory=dict)

    @property
    def handle(self) -> int:
        """The address that NVML's callers get for it."""
        return _HANDLES + 0x10000 * self.slot

    @property
    def bus_id(self) -> str:
        """Its PCI address as NVML writes it; the ninth GPU begins a second PCI domain."""
        return f"{self.slot // 8:08X}:{_BUSES[self.slot % 8]:02X}:00.0"

    @property
    def used(self) -> int:
        """Bytes of memory that processes have."""
        return sum(process.memory or 0 for process in self.processes.values())

    def used_in(self, instance: int) -> int:
        """Bytes of memory that processes have in a GPU instance."""
        return sum(it.memory or 0 for it in self.processes.values() if it.gi == instance)

    def used_below(self, cgroup: Path) -> int:
        """Bytes of memory that processes in a cgroup and below it have."""
        below = (it for it in self.processes.values() if Path(it.cgroup).is_relative_to(cgroup))
        return sum(process.memory or 0 for process in below)

    def left_below(self, cgroup: Path) -> int | None:
        """Bytes that a process in a cgroup may still have, `None` where nothing limits it."""
        lefts = [
            hard - self.used_below(limit)
            for limit, hard in self.limits.items()
            if cgroup.is_relative_to(limit)
        ]
        return min(lefts, default=None)

    def start(self, process: SimProcess) -> None:
        """Start a process, or let one that is there use more or less.

        Raises:
            SimError: if the GPU has less memory than that, or its cgroup may have less.
        """
        key = process.pid, process.gi, process.ci
        before = self.processes[key].memory or 0 if key in self.processes else 0
        free = (self.board.memory - self.board.reserved) * MIB - self.used + before
        instance = self.mig.present.get(-1 if process.gi is None else process.gi)
        if instance is not None:
            free = instance.profile.memory * MIB - self.used_in(instance.number) + before

        if (process.memory or 0) > free:
            raise SimError(f"GPU {self.id} has {free // MIB} MiB left for process {process.pid}")
        left = self.left_below(Path(process.cgroup))
        if left is not None and (process.memory or 0) > left + before:
            raise SimError(
                f"out of memory: the limit of its cgroup leaves process {process.pid} "
                f"{max(0, left + before) // MIB} MiB of GPU {self.id}"
            )
        self.processes[key] = process

    def end(self, pid: int) -> None:
        """End a process.

        Raises:
            SimError: if it is not here; says which are.
        """
        keys = [key for key in self.processes if key[0] == pid]
        if not keys:
            pids = ", ".join(sorted(str(key[0]) for key in self.processes)) or "none"
            raise SimError(f"no process {pid} on GPU {self.id}; there: {pids}")

        for key in keys:
            del self.processes[key]

    def restarted(self) -> None:
        """Lose the instances and who ran on them; a mode that was pending begins."""
        self.processes = {key: it for key, it in self.processes.items() if it.gi is None}
        self.mig.reset()

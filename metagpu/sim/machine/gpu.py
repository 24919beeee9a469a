"""One GPU of the simulated machine, and the processes on it.

Sensors have what the load makes of them, or what a test sets; powers are the limits in NVIDIA's
datasheets. The caller holds `SimNode.changed`.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.contracts.driver import ComputeMode, RecoveryAction
from metagpu.core.errors import MetagpuError
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.sim.machine.gpu_models import GpuModel
from metagpu.sim.machine.load import SimSampler, SimWork, share_time
from metagpu.sim.machine.mig_state import SimMigState

_TDP: Final = {
    "v100": 300,
    "t4": 70,
    "l40s": 350,
    "a30": 165,
    "a100-pcie": 250,
    "a100": 400,
    "h100": 700,
    "h200-nvl": 600,
    "h200": 700,
    "gh200": 900,
    "b200": 1000,
    "gb200": 1200,
    "b300": 1100,
    "gb300": 1400,
    "rtx-pro-4500": 200,
    "thor": 130,
    "rtx-pro-6000": 600,
    "dgx-display": 50,
}
"""Watts, by the beginning of a model's key; the first one that fits."""
_WITHOUT_MEMORY_SENSOR: Final = (
    "t4",
    "l40s",
    "rtx-pro-4500",
    "rtx-pro-6000",
    "thor",
    "dgx-display",
)
"""Models without HBM, of which NVML reports no temperature."""
_IDLE_PART: Final = 0.15
_IDLE_TEMPERATURE, _BUSY_TEMPERATURE = 32, 68
_IDLE_CLOCK, _BUSY_CLOCK, _MEMORY_CLOCK = 210, 1410, 1215


class SimSensors(msgspec.Struct):
    """The sensors of one GPU, in NVML's units.

    Attributes:
        busy: percent of the multiprocessors in use.
        nvlink_errors: by NVML's field.
        throttle_reasons: NVML's bits.
        energy: millijoules since the driver was loaded.
    """

    key: str
    busy: int = 0
    nvlink_errors: dict[int, int] = msgspec.field(default_factory=dict)
    pcie_replays: int = 0
    throttle_reasons: int = 0
    energy: float = 0.0
    _read_at: float = msgspec.field(default_factory=time.monotonic)

    @property
    def power_limit(self) -> int:
        """Return the power limit in milliwatts."""
        return 1000 * next(watts for name, watts in _TDP.items() if self.key.startswith(name))

    @property
    def power(self) -> int:
        """Return the power in milliwatts."""
        return round(self.power_limit * (_IDLE_PART + (1 - _IDLE_PART) * self.busy / 100))

    @property
    def temperature(self) -> int:
        """Return the temperature in degrees Celsius."""
        warmer = (_BUSY_TEMPERATURE - _IDLE_TEMPERATURE) * self.busy / 100
        return round(_IDLE_TEMPERATURE + warmer)

    @property
    def memory_temperature(self) -> int | None:
        """Return the memory's temperature in degrees Celsius, `None` without a sensor."""
        return None if self.key in _WITHOUT_MEMORY_SENSOR else self.temperature + 4

    @property
    def sm_clock(self) -> int:
        """Return the clock of the multiprocessors in MHz."""
        return _BUSY_CLOCK if self.busy else _IDLE_CLOCK

    @property
    def memory_clock(self) -> int:
        """Return the memory's clock in MHz."""
        return _MEMORY_CLOCK

    def read_energy(self) -> int:
        """Return the energy in millijoules, with what was used since the last reading."""
        now = time.monotonic()
        self.energy += self.power * (now - self._read_at)
        self._read_at = now
        return round(self.energy)


_BUSES: Final = (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)  # of a DGX A100, in PCI order
_HANDLES: Final = 0x7F5E_0000_0000


class SimError(MetagpuError):
    """Raised when a simulated node refuses a change; the text lists what is possible."""


class SimProcess(SimWork):
    """A process on a GPU; `memory` in bytes, `None` when NVML does not know it.

    Attributes:
        cgroup: the folder of its cgroup, empty where cgroup limits do not matter.
    """

    pid: int
    memory: int | None
    gi: int | None = None
    ci: int | None = None
    graphics: bool = False
    cgroup: str = ""


class SimGpu(msgspec.Struct):
    """One GPU with all of its state.

    Attributes:
        slot: its slot in the machine, never given to another GPU.
        pci_switch: GPUs with the same number share a PCI switch.
        nvswitch_links: number of its NVLinks that lead to NVSwitches.
        failure: the NVML code that answers every call about the GPU.
        hung_until: the time until which calls about the GPU block, by `time.monotonic`.
        clique: uuid of the cluster and number of its NVLink domain, `None` without one.
        virtualization: NVML's mode; 0 is that of a physical machine.
        memory_limits: bytes for all processes together in a cgroup and its children.
    """

    slot: int
    model: GpuModel
    id: GpuId
    numa: int
    pci_switch: int
    nvswitch_links: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    rows: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0])
    recovery_action: RecoveryAction = RecoveryAction.NONE
    compute_mode: ComputeMode = ComputeMode.DEFAULT
    mig: SimMigState = msgspec.field(default_factory=lambda: SimMigState(()))
    failure: int | None = None
    hung_until: float = 0.0
    clique: tuple[str, int] | None = None
    virtualization: int = 0
    processes: dict[tuple[int, int | None, int | None], SimProcess] = msgspec.field(
        default_factory=dict
    )
    memory_limits: dict[Path, int] = msgspec.field(default_factory=dict)
    sampler: SimSampler = msgspec.field(default_factory=SimSampler)
    _sensors: SimSensors | None = None

    @property
    def sensors(self) -> SimSensors:
        """Return the sensors, under the present load."""
        if self._sensors is None:
            self._sensors = SimSensors(self.model.key)
        self._sensors.busy = round(sum(share_time([*self.processes.values()])))
        return self._sensors

    @property
    def handle(self) -> int:
        """Return the address that NVML's callers get as a handle."""
        return _HANDLES + 0x10000 * self.slot

    @property
    def bus_id(self) -> str:
        """Return the PCI address as NVML writes it; the ninth GPU is in a second domain."""
        return f"{self.slot // 8:08X}:{_BUSES[self.slot % 8]:02X}:00.0"

    @property
    def used(self) -> int:
        """Return the bytes of memory that processes use."""
        return sum(process.memory or 0 for process in self.processes.values())

    def used_in(self, instance: int) -> int:
        """Return the bytes of memory that processes use in a GPU instance."""
        return sum(
            process.memory or 0 for process in self.processes.values() if process.gi == instance
        )

    def used_below(self, cgroup: Path) -> int:
        """Return the bytes of memory that processes use in a cgroup and its children."""
        below = (
            process
            for process in self.processes.values()
            if Path(process.cgroup).is_relative_to(cgroup)
        )
        return sum(process.memory or 0 for process in below)

    def remaining_below(self, cgroup: Path) -> int | None:
        """Return the bytes left to a process in a cgroup, `None` without a limit."""
        lefts = [
            hard - self.used_below(limit)
            for limit, hard in self.memory_limits.items()
            if cgroup.is_relative_to(limit)
        ]
        return min(lefts, default=None)

    def advance(self, now: int) -> None:
        """Advance the processes' work until now, in microseconds, and sample them."""
        self.sampler.advance([*self.processes.values()], now)

    def own_samples(self) -> Sequence[tuple[int, int]]:
        """Return time and percent of the GPU's own samples: sums of its processes'."""
        return self.sampler.sum_samples([*self.processes.values()])

    def start_process(self, process: SimProcess) -> None:
        """Start a process, or change the memory and utilization of a running one.

        Raises:
            SimError: the GPU or the process's cgroup has not enough memory left.
        """
        key = process.pid, process.gi, process.ci
        before = self.processes[key].memory or 0 if key in self.processes else 0
        free = (self.model.memory - self.model.reserved) * MIB - self.used + before
        instance = self.mig.instances.get(-1 if process.gi is None else process.gi)
        if instance is not None:
            free = instance.profile.memory * MIB - self.used_in(instance.number) + before

        if self.model.memory and (process.memory or 0) > free:
            raise SimError(f"GPU {self.slot} has {free // MIB} MiB left")
        left = self.remaining_below(Path(process.cgroup))
        if left is not None and (process.memory or 0) > left + before:
            raise SimError(
                f"out of memory: the limit of its cgroup leaves process {process.pid} "
                f"{max(0, left + before) // MIB} MiB of GPU {self.slot}"
            )
        self.processes[key] = process

    def end_process(self, pid: int) -> None:
        """End a process.

        Raises:
            SimError: the process is not on this GPU; the error lists those that are.
        """
        for key in self._keys(pid):
            del self.processes[key]

    def set_frozen(self, pid: int, *, frozen: bool) -> None:
        """Freeze a process or let it continue; a frozen one submits no work.

        Raises:
            SimError: the process is not on this GPU; the error lists those that are.
        """
        for key in self._keys(pid):
            self.processes[key].frozen = frozen

    def reset_mig(self) -> None:
        """Remove all MIG instances and their processes; apply the pending MIG mode."""
        self.processes = {
            key: process for key, process in self.processes.items() if process.gi is None
        }
        self.mig.reset()

    def _keys(self, pid: int) -> list[tuple[int, int | None, int | None]]:
        keys = [key for key in self.processes if key[0] == pid]
        if not keys:
            pids = ", ".join(sorted(str(key[0]) for key in self.processes)) or "none"
            raise SimError(f"no process {pid} on GPU {self.slot}; there: {pids}")
        return keys

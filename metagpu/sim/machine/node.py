"""The machine below the simulated NVML: GPUs, a driver, and their faults.

Thread-safe: NVML's callers and the commands of `metagpu sim` hold `SimNode.changed` while they
read or change the node.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import msgspec
import pynvml

from metagpu.core.contracts.driver import ComputeMode, RecoveryAction
from metagpu.core.model.gpu import GpuId
from metagpu.sim.machine.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.machine.gpu_models import CUBE_MESH, GpuModel, NvlinkFabric
from metagpu.sim.machine.mig_state import SimMigState

DRIVER: Final = "580.65.06"
RECOVERY_SINCE: Final = 565
"""The driver that brought the recovery action and its event (NVML's change log, v560 to v565)."""
RESET_STATUS_SINCE: Final = 560
"""The driver that brought the fields which say whether a GPU needs a reset (its nvml.h)."""

XID_ACTIONS: Final[Mapping[int, RecoveryAction]] = MappingProxyType(
    {
        **dict.fromkeys((46, 48, 62, 64, 74, 95, 119, 120, 140), RecoveryAction.GPU_RESET),
        79: RecoveryAction.NODE_REBOOT,
    }
)
"""What a GPU needs after an XID, where NVIDIA's catalogue says so (its column "immediate action":
RESET_GPU, RESTART_BM, and the workflows of 48 and 74, which end in a reset). After the errors of
applications (13, 31, 43, 45, 68, 69, 94, 109) it needs nothing, nor after 63 and 92, which it
ignores: docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
"""

_UUIDS: Final = uuid.UUID("6d657461-6770-7500-8000-000000000000")


class SimEvent(msgspec.Struct, frozen=True):
    """One event as NVML delivers it."""

    gpu: SimGpu
    type: int
    data: int = 0
    gi: int | None = None
    ci: int | None = None


class SimEventSet(msgspec.Struct, eq=False):
    """One NVML event set: registered event types by slot, and undelivered events.

    Attributes:
        interrupted: whether the current wait, or else the next one, ends at once.
    """

    registered: dict[int, int] = msgspec.field(default_factory=dict)
    queue: deque[SimEvent] = msgspec.field(default_factory=deque)
    interrupted: bool = False


class SimNode:
    """A machine with GPUs; a change takes effect at once and wakes waiting threads.

    Args:
        driver: the driver's version, which decides NVML's functions.
        seed: decides the UUIDs; the same seed and models always give the same UUIDs.

    Attributes:
        gpus: the GPUs in the machine, by index; `all_gpus` includes the removed ones.
        direct_links: the NVLinks between two slots, where they differ from the models'.
        failure: the NVML code that answers every call while the driver is away.
        root: whether NVML's callers are root, and may change settings.
        driver_loads: number of times the driver was loaded.
        handles_issued: number of handles issued for MIG instances, of all GPUs.
    """

    def __init__(self, driver: str = DRIVER, seed: str = "node") -> None:
        self.driver = driver
        self.changed = threading.Condition()
        self.gpus: list[SimGpu] = []
        self.all_gpus: list[SimGpu] = []
        self.event_sets: list[SimEventSet] = []
        self.direct_links: Mapping[frozenset[int], int] | None = None
        self.failure: int | None = None
        self.root = True
        self.driver_loads = 1
        self.handles_issued = 0
        self._seed = seed
        self._slots = 0
        self._turned_to: int | None = None

    @property
    def driver_branch(self) -> int:
        """Return the number before the first point of the driver's version."""
        return int(self.driver.partition(".")[0])

    @property
    def now(self) -> int:
        """Return microseconds since the epoch: real time until the clock is turned."""
        return time.time_ns() // 1000 if self._turned_to is None else self._turned_to

    def turn_clock(self, seconds: float) -> None:
        """Turn the clock, which stands still from then on; the processes work meanwhile."""
        with self.changed:
            self._turned_to = self.now + round(seconds * 1e6)
            for gpu in self.gpus:
                gpu.advance(self.now)

    def gpu(self, name: str | int) -> SimGpu:
        """Return a GPU by its index or UUID.

        Raises:
            SimError: no such GPU exists; the error lists the indices.
        """
        with self.changed:
            for index, gpu in enumerate(self.gpus):
                if str(name) in {str(index), gpu.id}:
                    return gpu

            last = len(self.gpus) - 1
            here = "none" if last < 0 else "0" if last == 0 else f"0-{last}"
            raise SimError(f"no GPU {name} here: this node has {here}")

    def add_gpu(
        self,
        board: GpuModel,
        *,
        gpu_id: GpuId | None = None,
        numa: int | None = None,
        pci_switch: int | None = None,
        nvswitch_links: int | None = None,
    ) -> SimGpu:
        """Add a GPU in the next slot; two share a PCI switch, four a NUMA node."""
        with self.changed:
            slot, self._slots = self._slots, self._slots + 1
            made = GpuId(f"GPU-{uuid.uuid5(_UUIDS, f'{self._seed}/{slot}/{board.key}')}")
            near = slot // 4 % 2 if numa is None else numa
            bridge = slot // 2 if pci_switch is None else pci_switch
            links = board.nvlinks if board.fabric is NvlinkFabric.NVSWITCH else 0
            gpu = SimGpu(
                slot,
                board,
                gpu_id or made,
                near,
                bridge,
                links if nvswitch_links is None else nvswitch_links,
                mig=SimMigState(board.mig_profiles),
            )

            if any(other.id == gpu.id for other in self.gpus):
                raise SimError(f"two GPUs with the uuid {gpu.id}")
            self.gpus.append(gpu)
            self.all_gpus.append(gpu)
            self.changed.notify_all()
            return gpu

    def remove_gpu(self, gpu: SimGpu) -> None:
        """Remove a GPU: it is no longer counted, and its handle is invalid."""
        with self._change():
            self.gpus.remove(gpu)
            gpu.failure = pynvml.NVML_ERROR_GPU_IS_LOST

    def nvlinks(self, gpu: SimGpu) -> Sequence[SimGpu | None]:
        """Return the other end of each connected NVLink: a GPU, or None for an NVSwitch."""
        ends: list[SimGpu | None] = [None] * gpu.nvswitch_links
        for other in self.gpus:
            ends += [other] * self._direct(gpu, other)
        return ends

    def pci_level(self, a: SimGpu, b: SimGpu) -> int:
        """Return the level at which two GPUs meet on the PCI bus, as NVML's number."""
        if a is b:
            return int(pynvml.NVML_TOPOLOGY_INTERNAL)
        if a.pci_switch == b.pci_switch:
            return int(pynvml.NVML_TOPOLOGY_SINGLE)
        near = a.numa == b.numa
        return int(pynvml.NVML_TOPOLOGY_NODE if near else pynvml.NVML_TOPOLOGY_SYSTEM)

    def pcie_root(self, gpu: GpuId) -> str | None:
        """Return the PCIe root complex of a GPU: that of its PCI switch."""
        found = next((candidate for candidate in self.all_gpus if candidate.id == gpu), None)
        return None if found is None else f"pci0000:{16 * found.pci_switch:02x}"

    def raise_xid(
        self, gpu: SimGpu, code: int, gi: int | None = None, ci: int | None = None
    ) -> None:
        """Report an XID, with its consequences on a real GPU.

        48 counts an uncorrected memory error, 63 and 64 remap a row or fail to, after 79 the GPU
        is lost; `XID_ACTIONS` has the recovery action that the GPU requires then.
        """
        with self._change():
            self._emit(SimEvent(gpu, pynvml.nvmlEventTypeXidCriticalError, code, gi, ci))

            if code == 48:  # noqa: PLR2004 - XIDs are known by their numbers
                gpu.ecc_uncorrected += 1
                self._emit(SimEvent(gpu, pynvml.nvmlEventTypeDoubleBitEccError))
            if code in {63, 64} and gpu.model.remaps_rows:
                gpu.rows = [gpu.rows[0], gpu.rows[1] + (code == 63), 1, int(code == 64)]  # noqa: PLR2004
            if code == 79:  # noqa: PLR2004
                gpu.failure = pynvml.NVML_ERROR_GPU_IS_LOST
            if code in XID_ACTIONS:
                self._want(gpu, XID_ACTIONS[code])

    def lose_gpu(self, gpu: SimGpu, code: int = pynvml.NVML_ERROR_GPU_IS_LOST) -> None:
        """Lose a GPU without an event: the code answers every call about it."""
        with self._change():
            gpu.failure = code

    def set_recovery_action(self, gpu: SimGpu, action: RecoveryAction) -> None:
        """Set the recovery action that a GPU requires."""
        with self._change():
            self._want(gpu, action)

    def reset_gpu(self, gpu: SimGpu) -> None:
        """Reset a GPU: it answers and requires nothing; its event registrations are gone.

        Its MIG instances are gone too, and a pending MIG mode takes effect.
        """
        with self._change():
            gpu.failure, gpu.hung_until = None, 0.0
            gpu.compute_mode = ComputeMode.DEFAULT
            gpu.ecc_corrected = gpu.ecc_uncorrected = 0
            gpu.rows[2] = 0
            gpu.reset_mig()
            for events in self.event_sets:
                events.registered.pop(gpu.slot, None)
            self._want(gpu, RecoveryAction.NONE)

    def hang_gpu(self, gpu: SimGpu, seconds: float) -> None:
        """Block every call about a GPU for some seconds, or until its reset."""
        with self._change():
            gpu.hung_until = time.monotonic() + seconds

    def add_ecc_errors(self, gpu: SimGpu, *, double_bit: bool, count: int = 1) -> None:
        """Add memory errors; single-bit errors are corrected ones."""
        with self._change():
            if double_bit:
                gpu.ecc_uncorrected += count
                self._emit(SimEvent(gpu, pynvml.nvmlEventTypeDoubleBitEccError))
            else:
                gpu.ecc_corrected += count
                self._emit(SimEvent(gpu, pynvml.nvmlEventTypeSingleBitEccError))

    def start_process(self, gpu: SimGpu, process: SimProcess) -> None:
        """Start a process on a GPU, or change a running one; see `SimGpu.start_process`."""
        with self._change():
            gpu.advance(self.now)
            gpu.start_process(process)

    def end_process(self, gpu: SimGpu, pid: int) -> None:
        """End a process on a GPU; see `SimGpu.end_process`."""
        with self._change():
            gpu.advance(self.now)
            gpu.end_process(pid)

    def set_frozen(self, gpu: SimGpu, pid: int, *, frozen: bool) -> None:
        """Freeze a process on a GPU or let it continue; see `SimGpu.set_frozen`."""
        with self._change():
            gpu.advance(self.now)
            gpu.set_frozen(pid, frozen=frozen)

    def unload_driver(self, code: int = pynvml.NVML_ERROR_DRIVER_NOT_LOADED) -> None:
        """Unload the driver: the code answers every call."""
        with self._change():
            self.failure = code

    def load_driver(self) -> None:
        """Load the driver again; callers have to initialise NVML again.

        Memory limits and MIG instances are gone, and from Hopper on MIG mode too.
        """
        with self._change():
            self.failure = None
            self.driver_loads += 1
            for gpu in self.gpus:
                gpu.memory_limits.clear()
                gpu.mig.pending &= not gpu.model.changes_mig_at_once
                gpu.reset_mig()

    def reboot(self) -> None:
        """Reboot: no process is left, every GPU is reset, the driver is loaded."""
        with self._change():
            for gpu in self.gpus:
                gpu.processes.clear()
                self.reset_gpu(gpu)
            self.load_driver()

    def _direct(self, a: SimGpu, b: SimGpu) -> int:
        if self.direct_links is not None:
            return self.direct_links.get(frozenset((a.slot, b.slot)), 0)

        same_machine = a.slot // 8 == b.slot // 8
        meshed = a.model.fabric is b.model.fabric is NvlinkFabric.CUBE_MESH and same_machine
        return CUBE_MESH[a.slot % 8][b.slot % 8] if meshed else 0

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self.changed:
            yield
            self.changed.notify_all()

    def _want(self, gpu: SimGpu, action: RecoveryAction) -> None:
        if gpu.recovery_action != action:
            gpu.recovery_action = action
            self._emit(SimEvent(gpu, pynvml.nvmlEventTypeGpuRecoveryAction))

    def _emit(self, event: SimEvent) -> None:
        for events in self.event_sets:
            if events.registered.get(event.gpu.slot, 0) & event.type:
                events.queue.append(event)

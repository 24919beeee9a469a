"""The machine below the simulated NVML: GPUs, a driver, and everything that can happen to them.

Thread-safe: NVML's callers, and whoever steers, hold `SimNode.changed` while they look or change.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import msgspec
import pynvml

from metagpu.core.driver import ComputeMode, RecoveryAction
from metagpu.core.gpu import GpuId
from metagpu.sim.boards import CUBE_MESH, Board, Fabric
from metagpu.sim.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.instances import Instances

DRIVER: Final = "580.65.06"
RECOVERY_SINCE: Final = 565
"""The driver that brought the recovery action and its event (NVML's change log, v560 to v565)."""

ACTIONS: Final[Mapping[int, RecoveryAction]] = MappingProxyType(
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


@dataclass(eq=False, slots=True)
class EventSet:
    """Who listens to which event types of which slots, and what has not been taken yet.

    Attributes:
        interrupted: whether the wait on it, or else the next one, shall end at once.
    """

    registered: dict[int, int] = field(default_factory=dict)
    queue: deque[SimEvent] = field(default_factory=deque)
    interrupted: bool = False


class SimNode:
    """A machine with GPUs; what is done to it takes effect at once, and wakes who waits.

    Args:
        driver: its version, which decides what NVML can say.
        seed: other seeds give other uuids; the same seed and boards always the same.

    Attributes:
        gpus: those in the machine, by index; `every_gpu` has the removed ones too.
        direct_links: the NVLinks between two slots, where they are not as the boards have them.
        failure: the NVML code with which every call is answered, when the driver is away.
        root: whether NVML's callers are root, and so may change settings.
        loads: how often the driver was loaded.
        handles: how many handles were given to MIG instances, of all GPUs.
    """

    def __init__(self, driver: str = DRIVER, seed: str = "node") -> None:
        self.driver = driver
        self.changed = threading.Condition()
        self.gpus: list[SimGpu] = []
        self.every_gpu: list[SimGpu] = []
        self.event_sets: list[EventSet] = []
        self.direct_links: Mapping[frozenset[int], int] | None = None
        self.failure: int | None = None
        self.root = True
        self.loads = 1
        self.handles = 0
        self._seed = seed
        self._slots = 0

    @property
    def driver_branch(self) -> int:
        """The number before the first point of the driver's version."""
        return int(self.driver.partition(".")[0])

    def gpu(self, name: str | int) -> SimGpu:
        """Find a GPU by its index or uuid.

        Raises:
            SimError: if there is none; says which there are.
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
        board: Board,
        *,
        gpu_id: GpuId | None = None,
        numa: int | None = None,
        pci_switch: int | None = None,
        nvswitch_links: int | None = None,
    ) -> SimGpu:
        """Put a GPU into the next slot: two are on a PCI switch, four are near one NUMA node."""
        with self.changed:
            slot, self._slots = self._slots, self._slots + 1
            made = GpuId(f"GPU-{uuid.uuid5(_UUIDS, f'{self._seed}/{slot}/{board.key}')}")
            near = slot // 4 % 2 if numa is None else numa
            bridge = slot // 2 if pci_switch is None else pci_switch
            links = board.nvlinks if board.fabric is Fabric.NVSWITCH else 0
            gpu = SimGpu(
                slot,
                board,
                gpu_id or made,
                near,
                bridge,
                links if nvswitch_links is None else nvswitch_links,
                mig=Instances(board.mig_profiles),
            )

            if any(other.id == gpu.id for other in self.gpus):
                raise SimError(f"two GPUs with the uuid {gpu.id}")
            self.gpus.append(gpu)
            self.every_gpu.append(gpu)
            self.changed.notify_all()
            return gpu

    def remove_gpu(self, gpu: SimGpu) -> None:
        """Take a GPU out of the machine: it is not counted any more, and its handle is dead."""
        with self._change():
            self.gpus.remove(gpu)
            gpu.failure = pynvml.NVML_ERROR_GPU_IS_LOST

    def nvlinks(self, gpu: SimGpu) -> Sequence[SimGpu | None]:
        """Say where each NVLink of a GPU leads that is connected: to a GPU, or an NVSwitch."""
        ends: list[SimGpu | None] = [None] * gpu.nvswitch_links
        for other in self.gpus:
            ends += [other] * self._direct(gpu, other)
        return ends

    def pci_level(self, a: SimGpu, b: SimGpu) -> int:
        """Say where two GPUs meet on the PCI bus, in NVML's numbers."""
        if a is b:
            return int(pynvml.NVML_TOPOLOGY_INTERNAL)
        if a.pci_switch == b.pci_switch:
            return int(pynvml.NVML_TOPOLOGY_SINGLE)
        near = a.numa == b.numa
        return int(pynvml.NVML_TOPOLOGY_NODE if near else pynvml.NVML_TOPOLOGY_SYSTEM)

    def raise_xid(
        self, gpu: SimGpu, code: int, gi: int | None = None, ci: int | None = None
    ) -> None:
        """Have the driver report an XID, with what comes of it on a real GPU.

        48 counts an uncorrected memory error, 63 and 64 remap a row or fail to, after 79 the GPU
        is lost; `ACTIONS` tells what the GPU needs then.
        """
        with self._change():
            self._emit(SimEvent(gpu, pynvml.nvmlEventTypeXidCriticalError, code, gi, ci))

            if code == 48:  # noqa: PLR2004 - XIDs are known by their numbers
                gpu.ecc_uncorrected += 1
                self._emit(SimEvent(gpu, pynvml.nvmlEventTypeDoubleBitEccError))
            if code in {63, 64} and gpu.board.remaps_rows:
                gpu.rows = [gpu.rows[0], gpu.rows[1] + (code == 63), 1, int(code == 64)]  # noqa: PLR2004
            if code == 79:  # noqa: PLR2004
                gpu.failure = pynvml.NVML_ERROR_GPU_IS_LOST
            if code in ACTIONS:
                self._want(gpu, ACTIONS[code])

    def lose(self, gpu: SimGpu, code: int = pynvml.NVML_ERROR_GPU_IS_LOST) -> None:
        """Let a GPU fall silent without a word: every call about it is answered with the code."""
        with self._change():
            gpu.failure = code

    def need(self, gpu: SimGpu, action: RecoveryAction) -> None:
        """Have a GPU want something."""
        with self._change():
            self._want(gpu, action)

    def recover(self, gpu: SimGpu) -> None:
        """Reset a GPU: it answers and needs nothing. Who listened to it has to register again.

        Its MIG instances are gone, and a change of mode that waited for this takes effect.
        """
        with self._change():
            gpu.failure, gpu.hung_until = None, 0.0
            gpu.compute_mode = ComputeMode.DEFAULT
            gpu.ecc_corrected = gpu.ecc_uncorrected = 0
            gpu.rows[2] = 0
            gpu.restarted()
            for events in self.event_sets:
                events.registered.pop(gpu.slot, None)
            self._want(gpu, RecoveryAction.NONE)

    def hang(self, gpu: SimGpu, seconds: float) -> None:
        """Let every call about a GPU block for some seconds, or until it recovers."""
        with self._change():
            gpu.hung_until = time.monotonic() + seconds

    def ecc(self, gpu: SimGpu, *, double_bit: bool, count: int = 1) -> None:
        """Count memory errors: single-bit ones were corrected."""
        with self._change():
            if double_bit:
                gpu.ecc_uncorrected += count
                self._emit(SimEvent(gpu, pynvml.nvmlEventTypeDoubleBitEccError))
            else:
                gpu.ecc_corrected += count
                self._emit(SimEvent(gpu, pynvml.nvmlEventTypeSingleBitEccError))

    def add_process(self, gpu: SimGpu, process: SimProcess) -> None:
        """Start a process on a GPU, or let one that is there use more or less; see `SimGpu`."""
        with self._change():
            gpu.start(process)

    def end_process(self, gpu: SimGpu, pid: int) -> None:
        """End a process on a GPU; see `SimGpu`."""
        with self._change():
            gpu.end(pid)

    def fail_driver(self, code: int = pynvml.NVML_ERROR_DRIVER_NOT_LOADED) -> None:
        """Take the driver away: every call is answered with the code."""
        with self._change():
            self.failure = code

    def restore_driver(self) -> None:
        """Load the driver again; who used the old one has to initialise NVML anew.

        Neither limits nor MIG instances outlive it, and from Hopper on neither does MIG's mode.
        """
        with self._change():
            self.failure = None
            self.loads += 1
            for gpu in self.gpus:
                gpu.limits.clear()
                gpu.mig.pending &= not gpu.board.mig_at_once
                gpu.restarted()

    def reboot(self) -> None:
        """Start the machine again: no process is left, every GPU is reset, the driver is loaded."""
        with self._change():
            for gpu in self.gpus:
                gpu.processes.clear()
                self.recover(gpu)
            self.restore_driver()

    def _direct(self, a: SimGpu, b: SimGpu) -> int:
        if self.direct_links is not None:
            return self.direct_links.get(frozenset((a.slot, b.slot)), 0)

        same_machine = a.slot // 8 == b.slot // 8
        meshed = a.board.fabric is b.board.fabric is Fabric.CUBE_MESH and same_machine
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

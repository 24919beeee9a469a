"""One NVML session: library, GPUs, their connections, and the event set.

Methods of a session block, run in worker threads, and raise pynvml's errors. The connections
between GPUs are read once for each set of GPUs: a GPU's NVLinks in the GPU's own worker, a pair's
PCI path in a worker of the pair. A call that hangs or fails leaves that pair unknown, and no other.
The next survey reads failed ones again, and also a GPU whose NVLinks are all down: an NVSwitch
machine's Fabric Manager may start later.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Final, NamedTuple

import anyio
import pynvml
import structlog
from msgspec.structs import replace

from metagpu.core.errors import DriverError, DriverUnavailable
from metagpu.core.model.driver_roots import MOUNT_HOST, NVML_LIBRARY
from metagpu.core.model.gpu import (
    Connection,
    Gpu,
    GpuId,
    PciPath,
    Topology,
    normalize_bus_id,
)
from metagpu.core.model.mig import MigProfile
from metagpu.core.model.snapshot import Versions
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.nvml.errors import (
    CONCLUSIVE,
    FAILURES,
    LOST,
    NOT_REPORTED,
    NvmlAnswers,
    error_code,
    or_none,
    to_driver_error,
)
from metagpu.nvml.events import EventSet, NvmlEvents
from metagpu.nvml.mig import read_profiles
from metagpu.nvml.queries import Handle, describe_gpu
from metagpu.nvml.session_gpu import TIMING, NvmlTiming, SessionGpu, address_of
from metagpu.nvml.worker import NvmlWorker
from metagpu.patches import use_nvml_library

_NO_SUCH_LINK: Final = NOT_REPORTED | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
_PATHS: Final = {path.value: path for path in PciPath}


class NvLinks(NamedTuple):
    """The active NVLinks of a GPU.

    Attributes:
        switched: the number of links to NVSwitches.
        peers: the number of links to the device at each PCI address.
        is_final: whether another read cannot find more links.
    """

    switched: int
    peers: Mapping[str, int]
    is_final: bool


class TopologyReader:
    """Reads and keeps the connections between the GPUs of one NVML session."""

    def __init__(self) -> None:
        self._pair_workers: dict[frozenset[GpuId], NvmlWorker] = {}
        self._links: dict[GpuId, NvLinks] = {}
        self._paths: dict[frozenset[GpuId], PciPath | None] = {}

    @property
    def workers(self) -> Iterable[NvmlWorker]:
        """The workers of the GPU pairs."""
        return self._pair_workers.values()

    async def read(
        self, gpus: Sequence[Gpu], known: Mapping[GpuId, SessionGpu], deadline: float
    ) -> Topology:
        """Read missing connections, in `deadline` seconds at most; return all known ones.

        This never fails. A GPU that was missing in between is read again.
        """
        present = {gpu.id for gpu in gpus}
        self._links = {gpu: links for gpu, links in self._links.items() if gpu in present}
        self._paths = {pair: path for pair, path in self._paths.items() if pair <= present}
        until = anyio.current_time() + deadline

        async with anyio.create_task_group() as group:
            for position, gpu in enumerate(gpus if len(gpus) > 1 else ()):
                group.start_soon(self._read_links, gpu.id, known[gpu.id], until)
                group.start_soon(self._read_paths, gpu, gpus[position + 1 :], known, until)

        found = {frozenset((a.id, b.id)): self._between(a, b) for a, b in combinations(gpus, 2)}
        return Topology(
            {pair: connection for pair, connection in found.items() if connection != Connection()}
        )

    async def _read_links(self, gpu: GpuId, known: SessionGpu, until: float) -> None:
        links = self._links.get(gpu)
        if links is None or not links.is_final:
            with suppress(DriverError):
                left = until - anyio.current_time()
                self._links[gpu] = await known.worker.call(partial(read_links, known.handle), left)

    async def _read_paths(
        self, gpu: Gpu, others: Sequence[Gpu], known: Mapping[GpuId, SessionGpu], until: float
    ) -> None:
        for other in others:
            pair = frozenset((gpu.id, other.id))
            left = until - anyio.current_time()
            if pair in self._paths or left <= 0:
                continue

            worker = self._pair_workers.setdefault(
                pair, NvmlWorker(f"GPU {gpu.index} with GPU {other.index}")
            )
            read = partial(read_path, known[gpu.id].handle, known[other.id].handle)
            with suppress(DriverError):
                self._paths[pair] = await worker.call(read, left)

    def _between(self, a: Gpu, b: Gpu) -> Connection:
        path = self._paths.get(frozenset((a.id, b.id)))
        of_a, of_b = self._links.get(a.id), self._links.get(b.id)
        if of_a is None or of_b is None:
            return Connection(path)

        # Where the two ends report different numbers, the smaller one counts.
        direct = min(of_a.peers.get(b.pci_bus_id, 0), of_b.peers.get(a.pci_bus_id, 0))
        switched = min(of_a.switched, of_b.switched)
        return Connection(path, direct + switched, switched > 0)


def read_path(a: Handle, b: Handle) -> PciPath | None:
    """Return the PCI path between two GPUs: the longer one, if the two answers differ."""
    levels = [
        or_none(pynvml.nvmlDeviceGetTopologyCommonAncestor, *ends) for ends in ((a, b), (b, a))
    ]
    return None if None in levels else _PATHS.get(max(levels))


def read_links(handle: Handle) -> NvLinks:
    """Read a GPU's NVLinks; a link whose read fails counts as down."""
    up, down, failed = 0, 0, 0
    switched, peers = 0, Counter[str]()

    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                down += 1
                continue
            peer = _far_end(handle, link)
        except FAILURES as failure:
            if error_code(failure) in CONCLUSIVE:
                raise
            failed += error_code(failure) not in _NO_SUCH_LINK
            continue

        up += 1
        switched += peer is None
        peers.update([peer] if peer else ())

    return NvLinks(switched, peers, is_final=not failed and (up > 0 or down == 0))


def _far_end(handle: Handle, link: int) -> str | None:
    """Return the PCI address of an NVLink's far end, `None` for an NVSwitch.

    The switch itself does not matter: all GPUs on NVSwitches reach each other.
    """
    kind = or_none(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return None

    address: str = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
    return normalize_bus_id(address) if ":" in address else ""


def load_library(names: Sequence[str]) -> None:
    """Put the first library that loads below pynvml. Blocks.

    A loaded library of one of these names stays.

    Args:
        names: paths, or names that the linker searches.

    Raises:
        DriverUnavailable: if none loads; the text has the linker's reasons.
    """
    loaded = pynvml.nvmlLib
    if loaded is not None and getattr(loaded, "_name", None) in names:
        return
    problems = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
            continue
        use_nvml_library(library)
        log.info("nvml library loaded", path=name)
        return
    raise DriverUnavailable(
        f"NVML is missing: {'; '.join(problems)}; install the NVIDIA driver on this node, "
        f"{MOUNT_HOST} in the container, or name the driver's root with --driver-root"
    )


log = structlog.get_logger()


@dataclass(slots=True)
class NvmlSession:
    """An open NVML session.

    Attributes:
        library_worker: runs calls about NVML as a whole; it outlives the session.
        simulated_library: the library below pynvml, `None` for this machine's.
        timing: seconds of long calls.
        find_libraries: names this machine's libraries, in their order; blocks.
        workers: the GPUs' workers, by NVML's index.
        gpus: the GPUs seen so far.
        events: the event set, with the GPUs that are registered with it.
        logged: problems of MIG profiles, each logged once.
        versions: the versions of driver and CUDA, `None` until they are read.
        answers: the answers about NVML as a whole that nothing depends on.
    """

    library_worker: NvmlWorker
    simulated_library: object = None
    timing: NvmlTiming = TIMING
    find_libraries: Callable[[], Sequence[str]] = lambda: (NVML_LIBRARY,)
    workers: dict[int, NvmlWorker] = field(default_factory=dict)
    gpus: dict[GpuId, SessionGpu] = field(default_factory=dict)
    events: NvmlEvents = field(init=False)
    logged: LogOnce = field(default_factory=LogOnce)
    versions: Versions | None = None
    answers: NvmlAnswers = field(default_factory=lambda: NvmlAnswers("NVML", frozenset()))

    def __post_init__(self) -> None:
        self.events = NvmlEvents(
            self.gpus,
            self.timing,
            EventSet(self.gpus, self.timing.wait, self.simulated_library),
        )

    def open(self) -> None:
        """Initialise NVML, of a driver that may have come since the last session."""
        if self.simulated_library is None:
            load_library(self.find_libraries())
        pynvml.nvmlInit()

        try:
            self.events.create()
        except FAILURES:
            pynvml.nvmlShutdown()
            raise

    def read_node(self) -> tuple[int, Versions]:
        """Return the number of GPUs and the versions of driver and CUDA."""
        count = pynvml.nvmlDeviceGetCount()

        if self.versions is None:
            # Once: CUDA's comes from libcuda, which may be missing, or replaced while we run.
            cuda = self.answers.ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
            self.versions = Versions(cuda=cuda and (cuda // 1000, cuda % 1000 // 10))
        if not self.versions.driver:
            driver = self.answers.ask(pynvml.nvmlSystemGetDriverVersion) or ""
            self.versions = replace(self.versions, driver=driver)
        return count, self.versions

    def read_gpu(self, index: int) -> Gpu:
        """Read the GPU at an index, and register for its events if not yet done."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu_id = GpuId(pynvml.nvmlDeviceGetUUID(handle))
        worker = self.workers[index]
        worker.name = f"GPU {index} ({gpu_id})"

        known = self.gpus.setdefault(gpu_id, SessionGpu(index, handle, worker))
        if address_of(known.handle) != address_of(handle):
            known.registration.clear("NVML gave the GPU another handle")
        known.index, known.handle, known.worker, known.lost = index, handle, worker, False
        known.answers.name = known.sensor_answers.name = worker.name
        self.events.ensure_registered(known)

        return describe_gpu(
            handle, known.answers, gpu_id, index, mig_profiles=self.read_mig_profiles(known)
        )

    def read_mig_profiles(self, known: SessionGpu) -> tuple[MigProfile, ...]:
        """Return a GPU's MIG profiles, which NVML keeps as long as the MIG mode.

        A GPU whose profiles cannot be read has no MIG instances, and works otherwise.
        """
        mode = known.answers.ask(pynvml.nvmlDeviceGetMigMode, known.handle)
        if mode is None:
            return ()

        enabled = bool(mode[0])
        if known.mig_profiles is None or known.mig_profiles[0] != enabled:
            try:
                known.mig_profiles = enabled, read_profiles(known.handle)
            except FAILURES as failure:
                if error_code(failure) in LOST:
                    raise
                known.mig_profiles = None
                problem = str(to_driver_error(failure, known.worker.name, whole=False))
                if self.logged.is_new(known.worker.name, problem):
                    log.warning("mig profiles unreadable", error=problem)
                return ()
        return known.mig_profiles[1]

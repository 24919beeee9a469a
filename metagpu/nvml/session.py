"""One NVML session: the library, loaded by its path, its GPUs and its event set.

The methods block, run in worker threads, and raise pynvml's errors.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pynvml
import structlog
from msgspec.structs import replace

from metagpu.core.errors import DriverUnavailable
from metagpu.core.model.driver_roots import MOUNT_HOST, NVML_LIBRARY
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import MigProfile
from metagpu.core.model.snapshot import Versions
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.nvml.errors import (
    FAILURES,
    LOST,
    NvmlAnswers,
    error_code,
    to_driver_error,
)
from metagpu.nvml.events import EventSet, NvmlEvents
from metagpu.nvml.mig import read_profiles
from metagpu.nvml.queries import describe_gpu
from metagpu.nvml.session_gpu import TIMING, NvmlTiming, SessionGpu, address_of
from metagpu.nvml.worker import NvmlWorker
from metagpu.patches import use_nvml_library


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

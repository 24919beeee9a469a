"""The NVML library below pynvml, loaded by its path: no linker has to know it."""

import ctypes
from collections.abc import Sequence

import pynvml
import structlog

from metagpu.core.errors import DriverUnavailable
from metagpu.core.model.driver_roots import MOUNT_HOST

log = structlog.get_logger()


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
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - no public function clears it
        log.info("nvml library loaded", path=name)
        return
    raise DriverUnavailable(
        f"NVML is missing: {'; '.join(problems)}; install the NVIDIA driver on this node, "
        f"{MOUNT_HOST} in the container, or name the driver's root with --driver-root"
    )

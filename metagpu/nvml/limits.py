"""The driver's memory limits: the GPU memory of a cgroup's processes.

Drivers from 615 on, CUDA 13.4, count GPU memory by cgroup and refuse allocations above the limit
(docs.nvidia.com/deploy/mps: "Memory Partitioning"). These functions block, and raise pynvml's
errors.
"""

import os
from typing import Final

import pynvml

from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import MIB
from metagpu.nvml.queries import Handle

NO_GUARANTEE: Final = 0
"""The soft limit: memory that a cgroup is guaranteed. The driver adds it to all parent cgroups and
subtracts it only by another call: a container that ends would leave its part behind."""


def limit_memory(handle: Handle, cgroup: str, limit: int | None) -> None:
    """Set a cgroup's limit in bytes and check it; `None` removes the limit.

    Raises:
        DriverError: NVML refuses the call to this process, or the limit has no effect.
    """
    path = os.fsencode(cgroup)
    hard = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX if limit is None else limit
    wanted = pynvml.c_nvmlSetMemoryLimits_v1_t(path, NO_GUARANTEE, hard)

    try:
        pynvml.nvmlDeviceSetMemoryLimits_v1(handle, wanted)
    except pynvml.NVMLError_NoPermission as failure:
        problem = "the driver's memory limits cannot be set: only root may; run metagpu as root"
        raise DriverError(problem) from failure
    if limit is None:
        return

    if (present := read_limit(handle, cgroup)) is None or present > limit + MIB:
        raise DriverError("the driver took a limit of memory without effect")


def read_limit(handle: Handle, cgroup: str) -> int | None:
    """Return a cgroup's limit in bytes, `None` for no limit.

    For a parent of the limited cgroup without a counter of its own, NVML returns another's limit.
    """
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t(os.fsencode(cgroup))
    pynvml.nvmlDeviceGetMemoryLimits_v1(handle, limits)
    hard = limits.hardLimit
    return None if hard >= pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX else int(hard)

"""How much of a GPU's memory the driver lets the processes of a cgroup have.

Drivers from 615 on, CUDA 13.4, count it themselves and refuse what would be too much
(docs.nvidia.com/deploy/mps: "Memory Partitioning"). These functions block, and raise what pynvml
does.
"""

import os
from typing import Final

import pynvml

from metagpu.core.errors import DriverError
from metagpu.core.gpu import MIB
from metagpu.nvml.reading import Handle

NO_GUARANTEE: Final = 0
"""The soft limit is what a cgroup is guaranteed. It is added to all cgroups above, and taken from
them only by another call: a container that ends would leave its part behind."""


def limit_memory(handle: Handle, cgroup: str, limit: int | None) -> None:
    """Limit a cgroup, and see that the driver says so too; `None` takes its limit away.

    Raises:
        DriverError: if NVML refuses it to this process, or it has no effect.
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

    if (told := read_limit(handle, cgroup)) is None or told > limit + MIB:
        raise DriverError("the driver took a limit of memory without effect")


def read_limit(handle: Handle, cgroup: str) -> int | None:
    """Read what a cgroup is limited to, `None` for nothing.

    Above the one that was set, a cgroup without a counter of its own tells that of another.
    """
    told = pynvml.c_nvmlGetMemoryLimits_v1_t(os.fsencode(cgroup))
    pynvml.nvmlDeviceGetMemoryLimits_v1(handle, told)
    return None if told.hardLimit >= pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX else int(told.hardLimit)

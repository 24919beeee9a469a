"""NVML's functions for memory limits of cgroups, of drivers that have them."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import os
from pathlib import Path

import pynvml

from metagpu.sim.nvml.base import (
    Argument,
    NvmlReturn,
    SimLibraryBase,
    c_function,
    dereference,
    since,
)


class MemoryLimitFunctions(SimLibraryBase):
    """Memory limits of cgroups; not supported in MIG mode."""

    @since(615)
    @c_function
    def nvmlDeviceSetMemoryLimits_v1(self, device: Argument, limits: Argument) -> None:
        """Set the memory limit of an existing cgroup; only root may."""
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            if not self.node.root:
                raise NvmlReturn(pynvml.NVML_ERROR_NO_PERMISSION)
            wanted = dereference(limits)
            cgroup = _folder(wanted.nameSpace)
            if wanted.hardLimit == pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX:
                gpu.memory_limits.pop(cgroup, None)
            else:
                gpu.memory_limits[cgroup] = wanted.hardLimit

    @since(615)
    @c_function
    def nvmlDeviceGetMemoryLimits_v1(self, device: Argument, limits: Argument) -> None:
        """Return the limit of a cgroup or its nearest parent, and the memory in use."""
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            answer = dereference(limits)
            cgroup = _folder(answer.nameSpace)
            above = [limit for limit in gpu.memory_limits if cgroup.is_relative_to(limit)]
            nearest = max(above, key=lambda limit: len(limit.parts), default=None)
            unlimited = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
            answer.softLimit = 0
            answer.hardLimit = unlimited if nearest is None else gpu.memory_limits[nearest]
            answer.currentUsed = gpu.used_below(cgroup)


def _folder(path: bytes | None) -> Path:
    """Return the cgroup's folder, as NVML opens it."""
    folder = Path(os.fsdecode(path or b""))
    if not folder.is_absolute() or not folder.is_dir():
        raise NvmlReturn(pynvml.NVML_ERROR_NOT_FOUND)
    return folder

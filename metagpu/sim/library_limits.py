"""NVML's functions for the memory that a cgroup may have, of drivers that know them."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import os
from pathlib import Path

import pynvml

from metagpu.sim.library_base import Argument, LibraryBase, Return, c_function, target


class Limits(LibraryBase):
    """Memory limits of cgroups; not in MIG mode."""

    @c_function
    def nvmlDeviceSetMemoryLimits_v1(self, device: Argument, limits: Argument) -> None:
        """Limit a cgroup that is there; root alone may."""
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            if not self.node.root:
                raise Return(pynvml.NVML_ERROR_NO_PERMISSION)
            wanted = target(limits)
            cgroup = _folder(wanted.nameSpace)
            if wanted.hardLimit == pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX:
                gpu.limits.pop(cgroup, None)
            else:
                gpu.limits[cgroup] = wanted.hardLimit

    @c_function
    def nvmlDeviceGetMemoryLimits_v1(self, device: Argument, limits: Argument) -> None:
        """Tell a cgroup's limit, or the nearest one above it, and what its processes have."""
        with self._gpu(device) as gpu:
            self._supported(not gpu.mig.enabled)
            answer = target(limits)
            cgroup = _folder(answer.nameSpace)
            above = [limit for limit in gpu.limits if cgroup.is_relative_to(limit)]
            nearest = max(above, key=lambda limit: len(limit.parts), default=None)
            unlimited = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
            answer.softLimit = 0
            answer.hardLimit = unlimited if nearest is None else gpu.limits[nearest]
            answer.currentUsed = gpu.used_below(cgroup)


def _folder(path: bytes | None) -> Path:
    """Find the cgroup's folder, as NVML opens it."""
    folder = Path(os.fsdecode(path or b""))
    if not folder.is_absolute() or not folder.is_dir():
        raise Return(pynvml.NVML_ERROR_NOT_FOUND)
    return folder

"""NVML's answers about one GPU, as our values; memory limits of cgroups on it.

Drivers from 615 on, CUDA 13.4, count GPU memory by cgroup and refuse allocations above the limit
(docs.nvidia.com/deploy/mps: "Memory Partitioning"). These functions block, and raise pynvml's
errors.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure, byref, c_uint, c_ulonglong
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, cast
from uuid import UUID

import pynvml

from metagpu.core.contracts.driver import (
    ComputeMode,
    GpuCondition,
    GpuProcess,
    RecoveryAction,
    RemappedRows,
)
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import MIB, Gpu, GpuId, normalize_bus_id
from metagpu.core.model.mig import MigProfile
from metagpu.nvml.errors import FAILURES, LOST, NOT_REPORTED, NvmlAnswers, error_code, or_none

Handle: TypeAlias = Any  # a pointer of ctypes; pynvml ships no types

_NUMA_WORDS: Final = 16  # of 64 nodes each: Linux knows 1024 at most
_ANY_INSTANCE: Final = 0xFFFFFFFF
_ATTEMPTS: Final = 3
_ARCHITECTURES: Final = {
    pynvml.NVML_DEVICE_ARCH_KEPLER: "kepler",
    pynvml.NVML_DEVICE_ARCH_MAXWELL: "maxwell",
    pynvml.NVML_DEVICE_ARCH_PASCAL: "pascal",
    pynvml.NVML_DEVICE_ARCH_VOLTA: "volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "ada",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "hopper",
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: "blackwell",
    pynvml.NVML_DEVICE_ARCH_RUBIN: "rubin",
}
_BRANDS: Final = {
    pynvml.NVML_BRAND_UNKNOWN: "Unknown",
    pynvml.NVML_BRAND_QUADRO: "Quadro",
    pynvml.NVML_BRAND_TESLA: "Tesla",
    pynvml.NVML_BRAND_NVS: "NVS",
    pynvml.NVML_BRAND_GRID: "Grid",
    pynvml.NVML_BRAND_GEFORCE: "GeForce",
    pynvml.NVML_BRAND_TITAN: "Titan",
    pynvml.NVML_BRAND_NVIDIA_VAPPS: "NvidiaVApps",
    pynvml.NVML_BRAND_NVIDIA_VPC: "NvidiaVPC",
    pynvml.NVML_BRAND_NVIDIA_VCS: "NvidiaVCS",
    pynvml.NVML_BRAND_NVIDIA_VWS: "NvidiaVWS",
    pynvml.NVML_BRAND_NVIDIA_CLOUD_GAMING: "NvidiaCloudGaming",
    pynvml.NVML_BRAND_QUADRO_RTX: "QuadroRTX",
    pynvml.NVML_BRAND_NVIDIA_RTX: "NvidiaRTX",
    pynvml.NVML_BRAND_NVIDIA: "Nvidia",
    pynvml.NVML_BRAND_GEFORCE_RTX: "GeForceRTX",
    pynvml.NVML_BRAND_TITAN_RTX: "TitanRTX",
}
"""NVIDIA's spelling of brands, in its go-nvlib (`GetBrandAsString`)."""
_RESET_FIELDS: Final = {
    pynvml.NVML_FI_DEV_RESET_STATUS: RecoveryAction.GPU_RESET,
    pynvml.NVML_FI_DEV_DRAIN_AND_RESET_STATUS: RecoveryAction.DRAIN_AND_RESET,
}
"""The fields that say on drivers from 560 on whether a GPU needs a reset, and which."""
_VALUE_FIELDS: Final = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


_COMPUTE: Final = "nvmlDeviceGetComputeRunningProcesses"
_GRAPHICS: Final = "nvmlDeviceGetGraphicsRunningProcesses"
_NAMELESS: Final = "NVIDIA GPU"


class _LongEntry(Structure):
    """A process as drivers 535.43 to 535.86 list it.

    The function has the name of the one with shorter entries, which pynvml reads. 535.98 took the
    change back.
    """

    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
        ("usedGpuCcProtectedMemory", c_ulonglong),
    )


class Memory(NamedTuple):
    """Memory in bytes; `used` has the driver's own part too, which is `reserved`."""

    total: int
    reserved: int | None
    used: int


def describe_gpu(
    handle: Handle,
    answers: NvmlAnswers,
    gpu_id: GpuId,
    index: int,
    *,
    mig_profiles: tuple[MigProfile, ...],
) -> Gpu:
    """Read the constant properties of a GPU."""
    ask = answers.ask
    memory = read_memory(handle)
    pci = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    mig = ask(pynvml.nvmlDeviceGetMigMode, handle)
    ecc = ask(pynvml.nvmlDeviceGetEccMode, handle)
    mode = ask(pynvml.nvmlDeviceGetVirtualizationMode, handle)

    return Gpu(
        id=gpu_id,
        index=index,
        name=ask(pynvml.nvmlDeviceGetName, handle) or _NAMELESS,
        memory=memory and memory.total,
        reserved=memory and memory.reserved,
        minor=ask(pynvml.nvmlDeviceGetMinorNumber, handle),
        pci_bus_id=normalize_bus_id(pci.busId) if pci else "",
        pci_device=pci.pciDeviceId if pci else None,
        pci_subsystem=(pci.pciSubSystemId or None) if pci else None,
        numa_node=_numa_node(ask(_memory_affinity, handle)),
        compute_capability=ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        architecture=_ARCHITECTURES.get(ask(pynvml.nvmlDeviceGetArchitecture, handle)),
        brand=_BRANDS.get(ask(pynvml.nvmlDeviceGetBrand, handle)),
        mig_enabled=None if mig is None else bool(mig[0]),
        ecc=None if ecc is None else bool(ecc[0]),
        pci_class=ask(_pci_class, handle),
        clique=ask(_clique, handle),
        virtual=None if mode is None else mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
        mig_profiles=mig_profiles,
    )


def _pci_class(handle: Handle) -> int:
    info = pynvml.nvmlPciInfoExt_v1_t(version=pynvml.nvmlPciInfoExt_v1)
    pynvml.nvmlDeviceGetPciInfoExt(handle, byref(info))
    return int(info.baseClass << 8 | info.subClass)


def _clique(handle: Handle) -> str:
    """Read the NVLink domain of several nodes, empty without one, as on most machines."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    cluster = UUID(bytes=bytes(info.clusterUuid))
    is_there = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and cluster.int != 0
    return f"{cluster}.{info.cliqueId}" if is_there and not info.status else ""


def read_memory(handle: Handle) -> Memory | None:
    """Read a GPU's memory from the kernel driver; the call fails for a lost GPU.

    `None` for a GPU without memory of its own, such as GB10: NVML calls that not supported.
    """
    try:
        newer = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except FAILURES as failure:
        if error_code(failure) in LOST:
            raise
    else:
        # This call has `used` without `reserved`, the older one has both together.
        return Memory(newer.total, newer.reserved, newer.used + newer.reserved)

    older = or_none(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return older and Memory(older.total, None, older.used)


def _memory_affinity(handle: Handle) -> Any:  # noqa: ANN401 - pynvml ships no types
    return pynvml.nvmlDeviceGetMemoryAffinity(handle, _NUMA_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE)


def _numa_node(words: Iterable[int] | None) -> int | None:
    """Return the one NUMA node of a set; `None` for none and for several.

    NVML names several where the firmware names none: in sysfs the GPU's node is -1 then.
    """
    nodes = sum(int(word) << (64 * number) for number, word in enumerate(words or ()))
    return nodes.bit_length() - 1 if nodes.bit_count() == 1 else None


def read_condition(handle: Handle, answers: NvmlAnswers) -> GpuCondition:
    """Read a GPU's condition; one that answers for its memory passes the device check.

    Raises:
        DriverError: the GPU reports an unknown recovery action, and so is not healthy.
    """
    ask = answers.ask
    memory = read_memory(handle)
    mig = ask(pynvml.nvmlDeviceGetMigMode, handle)
    ecc = ask(pynvml.nvmlDeviceGetEccMode, handle)
    rows = ask(pynvml.nvmlDeviceGetRemappedRows, handle)

    return GpuCondition(
        memory_used=memory and memory.used,
        recovery_action=_recovery_action(handle, answers),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_uncorrected=ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        remapped_rows=rows and RemappedRows(rows[0], rows[1], bool(rows[2]), bool(rows[3])),
        mig_enabled=None if mig is None else bool(mig[0]),
        mig_pending=None if mig is None else bool(mig[1]),
    )


def _recovery_action(handle: Handle, answers: NvmlAnswers) -> RecoveryAction | None:
    number = answers.fresh(_read_recovery_action, handle)
    if number is None:
        # A needed action stays until NVML reports none, and "none" is no news of an earlier read.
        number = answers.latest(_read_recovery_action) or None
    if number is None:
        return None

    if number not in {action.value for action in RecoveryAction}:
        raise DriverError(f"the GPU needs recovery action {number}, which metagpu does not know")
    return RecoveryAction(number)


def _read_recovery_action(handle: Handle) -> int:
    """Read the recovery action, or on older drivers whether a reset is needed.

    Without the field of the recovery action, 0 in the two others is no news: they say nothing of a
    reboot.
    """
    action, *needed = pynvml.nvmlDeviceGetFieldValues(
        handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, *_RESET_FIELDS]
    )
    if action.nvmlReturn == pynvml.NVML_SUCCESS:
        return field_number(action)
    if action.nvmlReturn not in NOT_REPORTED | {pynvml.NVML_ERROR_INVALID_ARGUMENT}:
        raise pynvml.NVMLError(action.nvmlReturn)

    # A driver that is older than a field may call its number an invalid argument.
    for answer, meaning in zip(needed, _RESET_FIELDS.values(), strict=True):
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and field_number(answer):
            return meaning
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def field_number(answer: Any) -> int:  # noqa: ANN401 - pynvml ships no types
    """Return the number of a field value, whatever its type."""
    return int(getattr(answer.value, _VALUE_FIELDS.get(answer.valueType, "ullVal")))


def read_processes(handle: Handle) -> Sequence[GpuProcess]:
    """List the processes on a GPU, each once for each MIG instance."""
    # A GPU may not support graphics processes; a GPU that lists no compute processes is an error.
    found = _listed(_COMPUTE, handle)
    found += or_none(_listed, _GRAPHICS, handle) or []
    processes: dict[tuple[int, int | None, int | None], GpuProcess] = {}

    for entry in found:
        key = entry.pid, instance_id(entry.gpuInstanceId), instance_id(entry.computeInstanceId)
        known = processes.get(key)
        amounts = [known.memory if known else None, entry.usedGpuMemory]
        memory = max((amount for amount in amounts if amount is not None), default=None)
        processes[key] = GpuProcess(key[0], memory, key[1], key[2])

    return tuple(processes.values())


def read_compute_mode(handle: Handle) -> ComputeMode | None:
    """Read a GPU's compute mode; `None` where the driver does not report it."""
    mode = or_none(pynvml.nvmlDeviceGetComputeMode, handle)
    return None if mode is None else ComputeMode(mode)


def set_compute_mode(handle: Handle, mode: ComputeMode) -> None:
    """Set a GPU's compute mode.

    Raises:
        DriverError: NVML refuses the call to this process.
    """
    try:
        pynvml.nvmlDeviceSetComputeMode(handle, mode)
    except pynvml.NVMLError_NoPermission as failure:
        problem = f"the compute mode cannot be set to {mode}: only root may; run metagpu as root"
        raise DriverError(problem) from failure


def instance_id(number: int) -> int | None:
    """Return the id of a MIG instance, `None` for NVML's "no instance"."""
    return None if number == _ANY_INSTANCE else number


def _listed(name: str, handle: Handle) -> list[Any]:
    """List processes by a function; call it again if processes came meanwhile."""
    list_them = _process_list(name)
    for _ in range(_ATTEMPTS - 1):
        try:
            return list_them(handle)
        except pynvml.NVMLError_InsufficientSize:
            continue

    return list_them(handle)


def _process_list(name: str) -> Callable[[Handle], list[Any]]:
    """Return the function that lists processes as this driver's library writes them."""
    if not _has(f"{name}_v3"):
        return cast("Callable[[Handle], list[Any]]", getattr(pynvml, f"{name}_v2"))
    if _has("nvmlDeviceGetConfComputeMemSizeInfo") and not _has(
        "nvmlDeviceGetRunningProcessDetailList"
    ):
        return partial(_list_long_entries, f"{name}_v3")
    return cast("Callable[[Handle], list[Any]]", getattr(pynvml, f"{name}_v3"))


def _list_long_entries(name: str, handle: Handle) -> list[Any]:
    """List processes in the entries of drivers 535.43 to 535.86."""
    function, count = getattr(pynvml.nvmlLib, name), c_uint(0)
    code = function(handle, byref(count), None)
    entries = (_LongEntry * 0)()
    if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        count = c_uint(2 * count.value + 5)  # as pynvml: processes may come meanwhile
        entries = (_LongEntry * count.value)()
        code = function(handle, byref(count), entries)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)

    found = [pynvml.nvmlStructToFriendlyObject(entry) for entry in entries[: count.value]]
    for entry in found:
        if entry.usedGpuMemory == pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value:
            entry.usedGpuMemory = None
    return found


def _has(function: str) -> bool:
    return hasattr(pynvml.nvmlLib, function)


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

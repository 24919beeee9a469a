"""What NVML says about one GPU, as our values.

These functions block, and raise what pynvml does.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pynvml

from metagpu.core.driver import ComputeMode, Condition, GpuProcess, RecoveryAction, RemappedRows
from metagpu.core.errors import DriverError
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.mig import MigProfile
from metagpu.nvml.codes import UNSAID, if_said

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
_VALUE_FIELDS: Final = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


class Memory(NamedTuple):
    """Bytes; `used` counts what the driver keeps for itself too, `reserved` is that part."""

    total: int
    reserved: int | None
    used: int


def describe(
    handle: Handle,
    gpu_id: GpuId,
    index: int,
    *,
    mig_profiles: tuple[MigProfile, ...],
    listens: bool,
) -> Gpu:
    """Read what does not change about a GPU."""
    memory = read_memory(handle)
    pci = if_said(pynvml.nvmlDeviceGetPciInfo, handle)
    mig = if_said(pynvml.nvmlDeviceGetMigMode, handle)
    ecc = if_said(pynvml.nvmlDeviceGetEccMode, handle)

    return Gpu(
        id=gpu_id,
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        memory=memory.total,
        reserved=memory.reserved,
        minor=if_said(pynvml.nvmlDeviceGetMinorNumber, handle),
        pci_bus_id=bus_id(pci.busId) if pci else "",
        pci_device=pci.pciDeviceId if pci else None,
        numa_node=numa_node(handle),
        compute_capability=if_said(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        architecture=_ARCHITECTURES.get(if_said(pynvml.nvmlDeviceGetArchitecture, handle)),
        mig_enabled=None if mig is None else bool(mig[0]),
        ecc=None if ecc is None else bool(ecc[0]),
        mig_profiles=mig_profiles,
        listens=listens,
    )


def read_memory(handle: Handle) -> Memory:
    """Read a GPU's memory: this reaches the hardware's driver, so it tells if the GPU answers."""
    newer = if_said(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if newer is not None:
        # Here NVML counts `used` and `reserved` apart, in the older call it counts them together.
        return Memory(newer.total, newer.reserved, newer.used + newer.reserved)

    older = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Memory(older.total, None, older.used)


def bus_id(text: str) -> str:
    """Write a PCI address as the kernel does: `00000000:07:00.0` is `0000:07:00.0` in sysfs."""
    domain, _, rest = text.lower().partition(":")

    return f"{int(domain, 16):04x}:{rest}"


def numa_node(handle: Handle) -> int | None:
    """Find the NUMA node whose memory is nearest; `None` when the machine does not say."""
    words = if_said(
        pynvml.nvmlDeviceGetMemoryAffinity, handle, _NUMA_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE
    )
    for number, word in enumerate(words or ()):
        if word:
            return number * 64 + int(word & -word).bit_length() - 1

    return None


def read_condition(handle: Handle) -> Condition:
    """Read what changes about a GPU; having answered all of it is the device check.

    Raises:
        DriverError: if the GPU needs something that we do not know: that is no health.
    """
    memory = read_memory(handle)
    mig = if_said(pynvml.nvmlDeviceGetMigMode, handle)
    ecc = if_said(pynvml.nvmlDeviceGetEccMode, handle)
    rows = if_said(pynvml.nvmlDeviceGetRemappedRows, handle)

    return Condition(
        memory_used=memory.used,
        recovery_action=_recovery_action(handle),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_uncorrected=if_said(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        remapped_rows=rows and RemappedRows(rows[0], rows[1], bool(rows[2]), bool(rows[3])),
        mig_enabled=None if mig is None else bool(mig[0]),
        mig_pending=None if mig is None else bool(mig[1]),
    )


def _recovery_action(handle: Handle) -> RecoveryAction | None:
    values = if_said(
        pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    )
    if values is None:
        return None

    # A driver older than the field may call its number an invalid argument.
    answer = values[0]
    if answer.nvmlReturn in UNSAID | {pynvml.NVML_ERROR_INVALID_ARGUMENT}:
        return None
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(answer.nvmlReturn)

    number = int(getattr(answer.value, _VALUE_FIELDS.get(answer.valueType, "ullVal")))
    if number not in {action.value for action in RecoveryAction}:
        raise DriverError(f"the GPU needs recovery action {number}, which metagpu does not know")

    return RecoveryAction(number)


def read_processes(handle: Handle) -> Sequence[GpuProcess]:
    """List the processes on a GPU, each instance of each process once."""
    # A GPU without graphics has no graphics processes; one that lists no compute processes is mute.
    found = _listed(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    found += if_said(_listed, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle) or []
    processes: dict[tuple[int, int | None, int | None], GpuProcess] = {}

    for entry in found:
        key = entry.pid, instance(entry.gpuInstanceId), instance(entry.computeInstanceId)
        known = processes.get(key)
        amounts = [known.memory if known else None, entry.usedGpuMemory]
        memory = max((amount for amount in amounts if amount is not None), default=None)
        processes[key] = GpuProcess(key[0], memory, key[1], key[2])

    return tuple(processes.values())


def read_compute_mode(handle: Handle) -> ComputeMode | None:
    """Read who may use a GPU for computing; `None` when the driver does not say."""
    mode = if_said(pynvml.nvmlDeviceGetComputeMode, handle)
    return None if mode is None else ComputeMode(mode)


def set_compute_mode(handle: Handle, mode: ComputeMode) -> None:
    """Say who may use a GPU for computing.

    Raises:
        DriverError: if NVML refuses it to this process.
    """
    try:
        pynvml.nvmlDeviceSetComputeMode(handle, mode)
    except pynvml.NVMLError_NoPermission as failure:
        problem = f"the compute mode cannot be set to {mode}: only root may; run metagpu as root"
        raise DriverError(problem) from failure


def instance(number: int) -> int | None:
    """Give the id of a MIG instance, `None` where NVML says that it means none."""
    return None if number == _ANY_INSTANCE else number


def _listed(function: Callable[[Handle], list[Any]], handle: Handle) -> list[Any]:
    """Call a function that lists processes, again when new ones came in between its two halves."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return function(handle)
        except pynvml.NVMLError_InsufficientSize:
            continue

    return function(handle)

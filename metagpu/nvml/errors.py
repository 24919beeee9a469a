"""NVML's return codes as our errors; no other module reads the codes."""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any, Final

import pynvml

from metagpu.core.errors import (
    DriverError,
    DriverReplaced,
    DriverTimeout,
    DriverUnavailable,
    GpuLost,
    InsufficientResources,
    InUse,
    NotFound,
    Unsupported,
)

FAILURES: Final = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
"""pynvml's errors: the second one where the library lacks a versioned function."""

NOT_REPORTED: Final = frozenset(
    {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
)
"""The driver or the GPU does not report a value: `None`, unknown, never zero."""

_UNAVAILABLE: Final = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML is not initialised any more",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded; load it on this node (modprobe nvidia), "
        "and see `dmesg | grep NVRM` if it does not stay"
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "NVML is missing: libnvidia-ml.so.1 cannot be loaded; install the NVIDIA driver on this "
        "node, or mount it into the container"
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "libnvidia-ml.so.1 and the loaded NVIDIA driver have different versions: one of them was "
        "replaced; metagpu ends soon, as only its next start can load another library; if this "
        "stays, the driver was upgraded without a reload: reload it or reboot this node"
    ),
}
_REPLACED: Final = frozenset({pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
_REFUSED: Final = {
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "NVML has no permission to talk to the driver; run with access to /dev/nvidiactl and "
        "/dev/nvidia* (privileged, or with these devices mounted)"
    ),
    pynvml.NVML_ERROR_UNKNOWN: (
        "NVML cannot talk to the driver (Unknown Error); most often the container has lost its "
        "access to /dev/nvidiactl: restart it"
    ),
}
_LOST: Final = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost: it has fallen off the bus or does not answer",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU wants a reset before it answers again",
}
_ANSWERED: Final = {
    pynvml.NVML_ERROR_IN_USE: InUse,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: InsufficientResources,
    pynvml.NVML_ERROR_NOT_FOUND: NotFound,
    pynvml.NVML_ERROR_NOT_SUPPORTED: Unsupported,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Unsupported,
}
LOST: Final = frozenset(_LOST)
"""Codes of a GPU that is lost, or wants a reset: no call about it succeeds."""

CONCLUSIVE: Final = frozenset(_UNAVAILABLE) | LOST
"""Codes after which further calls about the same GPU are useless."""


def error_code(failure: Exception) -> int:
    """Return NVML's code of a pynvml error."""
    return int(getattr(failure, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))


def to_driver_error(failure: Exception, who: str, *, whole: bool) -> DriverError:
    """Return our error for an exception of an NVML call.

    Args:
        failure: the caught exception, whose traceback has the name of NVML's call. An exception
            outside of `FAILURES` means that NVML's answer was invalid.
        who: the subject of the call, as messages name it.
        whole: whether NVML as a whole is unusable without this call.
    """
    calls = [frame.f_code.co_name for frame, _ in walk_tb(failure.__traceback__)]
    call = next((name for name in reversed(calls) if name.startswith("nvml")), "NVML")
    if not isinstance(failure, FAILURES):
        odd = f"{who}: {call}: odd answer: {type(failure).__name__}: {failure}"
        return DriverUnavailable(odd) if whole else DriverError(odd)

    code = error_code(failure)
    if code in _UNAVAILABLE:
        kind = DriverReplaced if code in _REPLACED else DriverUnavailable
        return kind(_UNAVAILABLE[code])
    if whole:
        return DriverUnavailable(_REFUSED.get(code, f"{call}: {failure}"))
    if code in _LOST:
        return GpuLost(f"{who}: {_LOST[code]}")
    if code == pynvml.NVML_ERROR_TIMEOUT:
        return DriverTimeout(f"{who}: {call} timed out in the driver")
    return _ANSWERED.get(code, DriverError)(f"{who}: {call}: {failure}")


def or_none(function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - pynvml ships no types
    """Call a function of pynvml; `None` when the driver does not say."""
    try:
        return function(*args)
    except FAILURES as failure:
        if error_code(failure) in NOT_REPORTED:
            return None
        raise

"""NVML's return codes become our errors here, and nowhere else."""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any, Final

import pynvml

from metagpu.core.errors import (
    DriverError,
    DriverTimeout,
    DriverUnavailable,
    GpuLost,
    InUse,
    NoRoom,
    NotThere,
    Unsupported,
)

FAILURES: Final = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
"""What pynvml raises: the second one when the library lacks a function that has versions."""

UNSAID: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""The driver, or this GPU, does not say: `None`, unknown, never zero."""

_UNAVAILABLE: Final = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML is not initialised any more",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded; load it on this node (modprobe nvidia), "
        "and see `dmesg | grep NVRM` if it does not stay"
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "NVML is not there: libnvidia-ml.so.1 cannot be loaded; install the NVIDIA driver on this "
        "node, or mount it into the container"
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "libnvidia-ml.so.1 and the loaded NVIDIA driver have different versions: the driver was "
        "upgraded without a reload; reload it or reboot this node, then restart metagpu"
    ),
}
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
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: NoRoom,
    pynvml.NVML_ERROR_NOT_FOUND: NotThere,
    pynvml.NVML_ERROR_NOT_SUPPORTED: Unsupported,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Unsupported,
}
CONCLUSIVE: Final = frozenset(_UNAVAILABLE) | frozenset(_LOST)
"""Codes after which there is no point in asking the same GPU for anything else."""


def code_of(failure: Exception) -> int:
    """Give NVML's code for what pynvml raised."""
    return int(getattr(failure, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))


def error_for(failure: Exception, who: str, *, whole: bool) -> DriverError:
    """Give the error of ours for what a call raised.

    Args:
        failure: caught, so that the name of NVML's call is in its traceback; if it is none of
            `FAILURES`, NVML's answer was odd.
        who: what the call was about, as messages name it.
        whole: whether nothing at all works without this call.
    """
    calls = [frame.f_code.co_name for frame, _ in walk_tb(failure.__traceback__)]
    call = next((name for name in reversed(calls) if name.startswith("nvml")), "NVML")
    if not isinstance(failure, FAILURES):
        odd = f"{who}: {call}: odd answer: {type(failure).__name__}: {failure}"
        return DriverUnavailable(odd) if whole else DriverError(odd)

    code = code_of(failure)
    if code in _UNAVAILABLE:
        return DriverUnavailable(_UNAVAILABLE[code])
    if whole:
        return DriverUnavailable(_REFUSED.get(code, f"{call}: {failure}"))
    if code in _LOST:
        return GpuLost(f"{who}: {_LOST[code]}")
    if code == pynvml.NVML_ERROR_TIMEOUT:
        return DriverTimeout(f"{who}: {call} timed out in the driver")
    return _ANSWERED.get(code, DriverError)(f"{who}: {call}: {failure}")


def if_said(function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - pynvml ships no types
    """Call a function of pynvml; `None` when the driver does not say."""
    try:
        return function(*args)
    except FAILURES as failure:
        if code_of(failure) in UNSAID:
            return None
        raise

"""NVML's return codes as our errors, and answers that a GPU works without.

No other module reads the codes. Needed are a GPU's handle, uuid and memory alone: any other failure
leaves a value unknown. Drivers refuse with many codes: WSL2 says UNKNOWN where others say
NOT_SUPPORTED.
"""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any, Final

import msgspec
import pynvml
import structlog

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
from metagpu.core.runtime.rate_limit import LogOnce

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


log = structlog.get_logger()


class NvmlAnswers(msgspec.Struct):
    """The latest answers about one GPU, by function; the methods block.

    Errors are pynvml's. A failure is logged once, unless the driver or the GPU lacks the value.

    Attributes:
        name: the GPU's name in the log.
        raised: the codes that are raised: those of a lost GPU.
    """

    name: str = ""
    raised: frozenset[int] = LOST
    _latest: dict[str, Any] = msgspec.field(default_factory=dict)
    _logged: LogOnce = msgspec.field(default_factory=LogOnce)

    def ask(self, function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - pynvml ships no types
        """Return a function's answer, the latest one after a failure, `None` without any."""
        answer = self.fresh(function, *args)
        return self.latest(function) if answer is None else answer

    def fresh(self, function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - likewise
        """Return a function's answer, `None` after a failure."""
        name = function.__name__
        try:
            answer = function(*args)
        except (*FAILURES, ValueError) as failure:  # pynvml decodes texts
            code = error_code(failure) if isinstance(failure, FAILURES) else None
            if code in self.raised:
                raise
            if code in NOT_REPORTED:
                self._latest.pop(name, None)
            elif self._logged.is_new(name, str(failure)):
                log.warning("nvml value unknown", subject=self.name, call=name, error=str(failure))
            return None

        self._logged.clear(name)
        self._latest[name] = answer
        return answer

    def latest(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401 - likewise
        """Return a function's latest answer of this session, `None` without any."""
        return self._latest.get(function.__name__)

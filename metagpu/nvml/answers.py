"""NVML's answers that a GPU works without; a failure leaves a value unknown.

Needed are a GPU's handle, uuid and memory alone. Drivers refuse the rest with many codes: WSL2 says
UNKNOWN where others say NOT_SUPPORTED.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from metagpu.core.runtime.log_once import LogOnce
from metagpu.nvml.errors import FAILURES, LOST, NOT_REPORTED, error_code

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

"""What NVML reports of XIDs and memory errors, told: on the bus, each one, and in the log."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog

from metagpu.core.bus import Bus
from metagpu.core.driver import DriverEvent, EccError, Xid
from metagpu.core.gpu import GpuId
from metagpu.core.judgement import Heard
from metagpu.core.news import Event, MemoryErrorHeard, XidHeard

CORRECTED_EVERY: Final = 60.0
"""Seconds for which a GPU's corrected memory errors are counted rather than told."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Corrected:
    """The corrected memory errors of one GPU: when they were told last, and how many came since."""

    told: float = -math.inf
    untold: int = 0


@dataclass(slots=True)
class FaultNews:
    """Tells what was heard; judges nothing."""

    news: Bus[Event]
    clock: Callable[[], float]
    _corrected: dict[GpuId | None, _Corrected] = field(default_factory=dict)

    def publish(self, event: DriverEvent) -> None:
        """Give an XID or a memory error to who listens."""
        match event:
            case Xid(gpu, code):
                self.news.publish(XidHeard(gpu, code, self.clock()))
            case EccError(gpu, double_bit):
                self.news.publish(MemoryErrorHeard(gpu, not double_bit, self.clock()))

    def log(self, event: DriverEvent, heard: Heard) -> None:
        """Log an event and what it means; of corrected errors a GPU's first, then their number.

        A worn GPU has them by the thousand, each harmless; a count waits for the next error.
        """
        if event != EccError(heard.gpu, double_bit=False):
            where = {"instance": heard.inside.gpu_instance} if heard.inside else {}
            log.warning("NVML reports", gpu=heard.gpu, news=heard.reason, **where)
            return

        now = anyio.current_time()
        known = self._corrected.setdefault(heard.gpu, _Corrected())
        known.untold += 1
        if now - known.told >= CORRECTED_EVERY:
            log.warning("NVML reports", gpu=heard.gpu, news=heard.reason, times=known.untold)
            known.told, known.untold = now, 0

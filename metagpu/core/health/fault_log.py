"""Publication of XIDs and memory errors: each one on the bus, and in the log."""

import math
from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog

from metagpu.core.contracts.driver import DriverEvent, EccError, Xid
from metagpu.core.health.rules import FaultAssessment
from metagpu.core.model.gpu import GpuId
from metagpu.core.runtime.event_bus import EventBus
from metagpu.core.state.events import Event, MemoryErrorReported, XidReported

CORRECTED_EVERY: Final = 60.0
"""Seconds in which corrected memory errors of a GPU are counted, after one was logged."""

log = structlog.get_logger()


class _CorrectedErrors(msgspec.Struct):
    """Corrected memory errors of one GPU: the last log entry, and errors since then."""

    logged_at: float = -math.inf
    unlogged: int = 0


class FaultLog(msgspec.Struct):
    """Publication and log of NVML's events; the health watch decides about them."""

    bus: EventBus[Event]
    clock: Callable[[], float]
    _corrected: dict[GpuId | None, _CorrectedErrors] = msgspec.field(default_factory=dict)

    def publish(self, event: DriverEvent) -> None:
        """Publish an XID or a memory error on the bus."""
        match event:
            case Xid(gpu, code):
                self.bus.publish(XidReported(gpu, code, self.clock()))
            case EccError(gpu, double_bit):
                self.bus.publish(MemoryErrorReported(gpu, not double_bit, self.clock()))

    def log(self, event: DriverEvent, assessment: FaultAssessment) -> None:
        """Log an event and its assessment; count most corrected memory errors.

        A worn GPU has corrected errors by the thousand, each harmless. The log has a GPU's first
        one; within `CORRECTED_EVERY` the others are counted, and the next entry has their number.
        """
        if event != EccError(assessment.gpu, double_bit=False):
            where = (
                {"instance": assessment.mig_instance.gpu_instance}
                if assessment.mig_instance
                else {}
            )
            log.warning("nvml event", gpu=assessment.gpu, description=assessment.reason, **where)
            return

        now = anyio.current_time()
        known = self._corrected.setdefault(assessment.gpu, _CorrectedErrors())
        known.unlogged += 1
        if now - known.logged_at >= CORRECTED_EVERY:
            log.warning(
                "nvml event",
                gpu=assessment.gpu,
                description=assessment.reason,
                count=known.unlogged,
            )
            known.logged_at, known.unlogged = now, 0

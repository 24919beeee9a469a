"""Counters of events since the start of the daemon."""

from collections import Counter
from dataclasses import dataclass, field

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import Fault
from metagpu.core.runtime.event_bus import EventBus
from metagpu.core.state.events import (
    AnnotationRejected,
    Event,
    MemoryErrorReported,
    MemoryExceeded,
    ProcessSignalled,
    ResourceClaimRefused,
    UnauthorizedUseFound,
    XidReported,
)
from metagpu.core.state.facts import GpuFaulted, GpuRecovered, InstanceFaulted


@dataclass(slots=True)
class EventCounters:
    """The counters; a GPU is `None` where NVML named none.

    Attributes:
        last_xids: the last XID of each GPU.
        memory_errors: by GPU and whether the error was corrected.
        warnings: containers above their memory limit, by GPU.
        signals: by GPU and the signal's name.
        unauthorized_containers: containers that used a GPU without a share, by GPU.
        mig_device_faults: faults of MIG devices, by their GPU.
        rejected_annotations: rejected annotations of pods about their memory.
        refused_claims: calls to prepare a ResourceClaim that were refused, by the error's class.
    """

    faults: Counter[tuple[GpuId, Fault | None]] = field(default_factory=Counter)
    recoveries: Counter[GpuId] = field(default_factory=Counter)
    xids: Counter[tuple[GpuId | None, int]] = field(default_factory=Counter)
    last_xids: dict[GpuId | None, int] = field(default_factory=dict)
    memory_errors: Counter[tuple[GpuId | None, bool]] = field(default_factory=Counter)
    warnings: Counter[GpuId] = field(default_factory=Counter)
    signals: Counter[tuple[GpuId, str]] = field(default_factory=Counter)
    unauthorized_containers: Counter[GpuId] = field(default_factory=Counter)
    mig_device_faults: Counter[GpuId] = field(default_factory=Counter)
    rejected_annotations: int = 0
    refused_claims: Counter[type[RequestError]] = field(default_factory=Counter)

    async def run(self, events: EventBus[Event]) -> None:
        """Count until cancelled."""
        kinds = (
            *(GpuFaulted, GpuRecovered, XidReported, MemoryErrorReported),
            *(
                MemoryExceeded,
                ProcessSignalled,
                UnauthorizedUseFound,
                InstanceFaulted,
                AnnotationRejected,
                ResourceClaimRefused,
            ),
        )
        with events.subscribe(*kinds) as subscription:
            async for event in subscription:
                self.count(event)

    def count(self, event: Event) -> None:  # noqa: C901 - one case for each kind
        """Count one event."""
        match event:
            case GpuFaulted():
                self.faults[event.gpu, event.fault] += 1
            case GpuRecovered():
                self.recoveries[event.gpu] += 1
            case XidReported():
                self.xids[event.gpu, event.code] += 1
                self.last_xids[event.gpu] = event.code
            case MemoryErrorReported():
                self.memory_errors[event.gpu, event.corrected] += 1
            case MemoryExceeded():
                self.warnings[event.gpu] += 1
            case ProcessSignalled():
                self.signals[event.gpu, event.signal] += 1
            case UnauthorizedUseFound():
                self.unauthorized_containers[event.gpu] += 1
            case InstanceFaulted():
                self.mig_device_faults[event.gpu] += 1
            case AnnotationRejected():
                self.rejected_annotations += 1
            case ResourceClaimRefused():
                self.refused_claims[event.cause] += 1

"""News, counted from the daemon's start on."""

from collections import Counter
from dataclasses import dataclass, field

from metagpu.core.bus import Bus
from metagpu.core.facts import GpuFaulted, GpuRecovered, InstanceFaulted
from metagpu.core.gpu import GpuId
from metagpu.core.model import Fault
from metagpu.core.news import (
    Event,
    MemoryErrorHeard,
    MemoryExceeded,
    ProcessSignalled,
    StrangerFound,
    WishRefused,
    XidHeard,
)


@dataclass(slots=True)
class Counts:
    """What was heard so far; a GPU is `None` where NVML did not say which it was.

    Attributes:
        memory_errors: by whether they were corrected.
        warnings: of containers that had too much memory.
        signals: by the signal's name.
        strangers: containers that used a GPU without a share.
        instance_faults: of MIG devices, by their GPU.
        wishes_refused: of pods, about their memory.
    """

    faults: Counter[tuple[GpuId, Fault | None]] = field(default_factory=Counter)
    recoveries: Counter[GpuId] = field(default_factory=Counter)
    xids: Counter[tuple[GpuId | None, int]] = field(default_factory=Counter)
    memory_errors: Counter[tuple[GpuId | None, bool]] = field(default_factory=Counter)
    warnings: Counter[GpuId] = field(default_factory=Counter)
    signals: Counter[tuple[GpuId, str]] = field(default_factory=Counter)
    strangers: Counter[GpuId] = field(default_factory=Counter)
    instance_faults: Counter[GpuId] = field(default_factory=Counter)
    wishes_refused: int = 0

    async def listen(self, news: Bus[Event]) -> None:
        """Count until cancelled."""
        kinds = (
            *(GpuFaulted, GpuRecovered, XidHeard, MemoryErrorHeard),
            *(MemoryExceeded, ProcessSignalled, StrangerFound, InstanceFaulted, WishRefused),
        )
        with news.subscribe(*kinds) as heard:
            async for event in heard:
                self.note(event)

    def note(self, event: Event) -> None:
        """Count one of the news."""
        match event:
            case GpuFaulted():
                self.faults[event.gpu, event.fault] += 1
            case GpuRecovered():
                self.recoveries[event.gpu] += 1
            case XidHeard():
                self.xids[event.gpu, event.code] += 1
            case MemoryErrorHeard():
                self.memory_errors[event.gpu, event.corrected] += 1
            case MemoryExceeded():
                self.warnings[event.gpu] += 1
            case ProcessSignalled():
                self.signals[event.gpu, event.signal] += 1
            case StrangerFound():
                self.strangers[event.gpu] += 1
            case InstanceFaulted():
                self.instance_faults[event.gpu] += 1
            case WishRefused():
                self.wishes_refused += 1

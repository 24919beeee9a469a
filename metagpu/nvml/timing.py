"""Times of NVML calls that take longer than the usual deadline."""

from typing import Final

import msgspec


class NvmlTiming(msgspec.Struct, frozen=True):
    """Seconds of NVML calls that exceed the usual deadline.

    Attributes:
        straggler: that a survey waits for GPUs never read before, once another GPU has answered.
        wait: of one wait for events: NVML's wait cannot be cancelled.
        event_retry: after the first failure of the event set; `event_retry_longest` after many.
        opening: for initialisation: without persistence mode it wakes every GPU in turn.
        mode_change: for a change of MIG mode: NVML may reset the GPU for it.
    """

    straggler: float = 2.0
    wait: float = 1.0
    event_retry: float = 1.0
    event_retry_longest: float = 60.0
    opening: float = 60.0
    mode_change: float = 30.0


TIMING: Final = NvmlTiming()

"""Delays of the health watch."""

from typing import Final

import msgspec


class HealthTiming(msgspec.Struct, frozen=True):
    """Delays of the health watch, in seconds.

    Attributes:
        retry: between two attempts to open an NVML that is unavailable.
        event_retry: after NVML failed to wait for events, so that a faulty NVML costs no CPU.
        replaced: of failures because the loaded library does not fit the driver, after which the
            daemon ends: its successor loads the library of then.
        unread_rescan: to the first new look at GPUs that could not be read, and
            `unread_rescan_longest` to later ones.
        unheard_check: between two checks of GPUs whose XIDs NVML does not deliver.
    """

    retry: float = 5.0
    event_retry: float = 1.0
    replaced: float = 60.0
    unread_rescan: float = 0.5
    unread_rescan_longest: float = 60.0
    unheard_check: float = 5.0


DEFAULT_TIMING: Final = HealthTiming()

"""Counters of memory enforcement since the daemon's start, as plain data."""

from collections.abc import Mapping
from signal import Signals
from typing import Any

import msgspec

from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Snapshot


class EnforcementStats(msgspec.Struct):
    """Counters of memory enforcement since the daemon's start.

    Attributes:
        signals: how often each signal was sent.
        over_limit: bytes above its limit, for each container that is above it now, by GPU.
    """

    warnings: int = 0
    signals: dict[Signals, int] = msgspec.field(
        default_factory=lambda: {Signals.SIGTERM: 0, Signals.SIGKILL: 0}
    )
    over_limit: dict[GpuId, Mapping[Holder, int]] = msgspec.field(default_factory=dict)


def enforcement_report(
    stats: EnforcementStats, snapshot: Snapshot, driver_limits: int = 0
) -> dict[str, Any]:
    """Return the counters, and the containers above their limit now, as plain data.

    `driver_limits` is the number of limits that the driver has been given.
    """
    return {
        "driverLimits": driver_limits,
        "warnings": stats.warnings,
        "signals": {signal.name: count for signal, count in stats.signals.items()},
        "overLimit": [
            {
                "gpu": snapshot.gpus[gpu].gpu.index,
                "container": str(holder),
                "excessMiB": excess // MIB,
            }
            for gpu, containers in stats.over_limit.items()
            for holder, excess in containers.items()
        ],
    }

"""What was done about memory since the daemon's start: counted, as plain data, and in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from metagpu.core.gpu import MIB, GpuId
from metagpu.core.model import Holder
from metagpu.core.snapshot import Snapshot


@dataclass(slots=True)
class Tally:
    """What was done since the daemon's start.

    Attributes:
        signals: how often each signal was sent.
        over: bytes above its limit, of each container that is so now, by GPU.
    """

    warnings: int = 0
    signals: dict[Signals, int] = field(
        default_factory=lambda: {Signals.SIGTERM: 0, Signals.SIGKILL: 0}
    )
    over: dict[GpuId, Mapping[Holder, int]] = field(default_factory=dict)


def tally_report(tally: Tally, snapshot: Snapshot, limited: int = 0) -> dict[str, Any]:
    """Say what the enforcer has done since the daemon's start, and who is over now.

    `limited` is how many limits the driver has been given.
    """
    return {
        "driverLimits": limited,
        "warnings": tally.warnings,
        "signals": {signal.name: count for signal, count in tally.signals.items()},
        "overMiB": [
            {"gpu": snapshot.gpus[gpu].gpu.index, "container": str(holder), "mib": above // MIB}
            for gpu, those in tally.over.items()
            for holder, above in those.items()
        ],
    }


def tally_lines(told: Mapping[str, Any] | None) -> Sequence[str]:
    """Write what `tally_report` says for people; nothing where nothing was done."""
    if told is None:
        return ()
    sent = [f"{count} {name}" for name, count in told["signals"].items() if count]
    parts = [f"{told['warnings']} warnings"] if told["warnings"] else []
    parts += [f"{' and '.join(sent)} sent"] if sent else []
    lines = [f"memory, since the daemon's start: {', '.join(parts)}"] if parts else []
    if told["driverLimits"]:
        lines.append(f"limits of memory that the driver itself keeps: {told['driverLimits']}")
    return lines

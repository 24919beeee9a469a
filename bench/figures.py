"""The results of a run: figures, and the report with all of them."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number.

    Attributes:
        measured: the median of many calls.
        target: `None` for a number without a target, which explains others.
        p99: the 99th percentile.
        calls: number of measurements.
    """

    name: str
    unit: str
    measured: float
    target: float | None
    better: Literal["lower", "higher"] = msgspec.field(default="lower")
    p99: float | None = None
    calls: int

    @property
    def met(self) -> bool | None:
        """Return whether the target is met, `None` without a target."""
        if self.target is None:
            return None
        if self.better == "lower":
            return self.measured <= self.target
        return self.measured >= self.target


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All figures of one run.

    Attributes:
        quick: a smoke run, which shows that the bench works; its numbers mean nothing.
    """

    machine: dict[str, Any]
    figures: list[Figure]
    quick: bool = False

    def write(self, path: Path) -> None:
        """Write the report as formatted JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        path.write_bytes(text + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read the report of an earlier run.

        Raises:
            OSError: the file cannot be read.
            msgspec.MsgspecError: the file is no report.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Samples:
    """Durations of one kind of call, in seconds."""

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        self.seconds = list(seconds)

    @property
    def p50(self) -> float:
        """Return the median."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """Return the 99th percentile."""
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1]

    def figure(self, name: str, *, target: float | None = None, unit: str = "ms") -> Figure:
        """Return the median as a figure, with a target in `unit`."""
        scale = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
        return Figure(
            name=name,
            unit=unit,
            measured=self.p50 * scale,
            target=target,
            p99=self.p99 * scale,
            calls=len(self.seconds),
        )

    def tail(self, name: str, *, target: float | None, unit: str = "ms") -> Figure:
        """Return the p99 as a figure with its own target."""
        median = self.figure(name, unit=unit)
        return msgspec.structs.replace(median, measured=median.p99, target=target, p99=None)

    def worst(self, name: str, *, unit: str = "ms") -> Figure:
        """Return the maximum as a figure: a p99 hides rare stalls."""
        median = Samples([max(self.seconds)]).figure(name, unit=unit)
        return msgspec.structs.replace(median, p99=None, calls=len(self.seconds))

    def ratio(self, name: str, baseline: "Samples", *, target: float) -> Figure:
        """Return the ratio to a baseline as a figure."""
        return Figure(
            name=name,
            unit="x",
            measured=self.p50 / baseline.p50,
            target=target,
            p99=self.p99 / baseline.p99,
            calls=len(self.seconds),
        )

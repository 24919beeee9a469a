"""What a run of the bench finds: figures, and the report they stand in."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number.

    Attributes:
        measured: the median where there were many calls.
        target: `None` where the number is only told, so that others can be understood.
        p99: what one call in a hundred exceeds.
        calls: how many measurements it stands for.
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
        """Whether the target is met, `None` without one."""
        if self.target is None:
            return None
        if self.better == "lower":
            return self.measured <= self.target
        return self.measured >= self.target


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All figures of one run.

    Attributes:
        quick: a smoke run: it shows that the bench works, and its numbers are worth nothing.
    """

    machine: dict[str, Any]
    figures: list[Figure]
    quick: bool = False

    def write(self, path: Path) -> None:
        """Write it for people and programs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        path.write_bytes(text + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read an earlier one.

        Raises:
            OSError: if it cannot be read.
            msgspec.MsgspecError: if it is none.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Samples:
    """Times of one kind of call, in seconds."""

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        self.seconds = list(seconds)

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """What one call in a hundred exceeds."""
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1]

    def figure(self, name: str, *, target: float | None = None, unit: str = "ms") -> Figure:
        """Tell the median against a target, both in `unit`."""
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
        """Tell the p99 against a target of its own."""
        told = self.figure(name, unit=unit)
        return msgspec.structs.replace(told, measured=told.p99, target=target, p99=None)

    def worst(self, name: str, *, unit: str = "ms") -> Figure:
        """Tell the longest of all: rare stalls hide behind any p99."""
        told = Samples([max(self.seconds)]).figure(name, unit=unit)
        return msgspec.structs.replace(told, p99=None, calls=len(self.seconds))

    def ratio(self, name: str, baseline: "Samples", *, target: float) -> Figure:
        """Tell how many times as long as a baseline's these calls take."""
        return Figure(
            name=name,
            unit="x",
            measured=self.p50 / baseline.p50,
            target=target,
            p99=self.p99 / baseline.p99,
            calls=len(self.seconds),
        )

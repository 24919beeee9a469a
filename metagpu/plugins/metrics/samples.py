"""What a page is made of: metrics, and the values of their series."""

from enum import StrEnum
from typing import NamedTuple

import msgspec


class Kind(StrEnum):
    """Prometheus' types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Family(msgspec.Struct, frozen=True):
    """A metric; `labels` tell its series apart, in this order."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


class Spread(NamedTuple):
    """A histogram's value: how many fell below each bound and not below the one before; the sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """One series' value; `labels` are those of the family, in its order."""

    family: Family
    labels: tuple[str, ...]
    value: float | Spread

"""Samples: metric families, and the values of their series."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

GPU_LABELS: Final = ("gpu", "uuid")


class MetricType(StrEnum):
    """The metric types of Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class MetricFamily(msgspec.Struct, frozen=True):
    """A metric with its labels, in this order."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()


class FamilyFactory(NamedTuple):
    """A factory of metric families with one type, prefix and first labels."""

    kind: MetricType
    first: tuple[str, ...] = ()
    prefix: str = "metagpu_"

    def __call__(self, name: str, meaning: str, *labels: str) -> MetricFamily:
        """Return the family of a name, with more labels."""
        return MetricFamily(f"{self.prefix}{name}", self.kind, meaning, (*self.first, *labels))


def families_in(names: Mapping[str, object]) -> tuple[MetricFamily, ...]:
    """Return the metric families among a module's names, in their order."""
    return tuple(name for name in names.values() if isinstance(name, MetricFamily))


class HistogramValue(NamedTuple):
    """The value of a histogram.

    Attributes:
        bounds: upper bounds of the buckets.
        counts: observations of each bucket, and those above all bounds.
        total: the sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """The value of one series; `labels` are the values of the family's labels."""

    family: MetricFamily
    labels: tuple[str, ...]
    value: float | HistogramValue

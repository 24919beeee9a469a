"""Metrics that a backend reports of its GPUs, beside the metrics of every GPU."""

import msgspec

from metagpu.core.model.gpu import GpuId


class MetricKind(msgspec.Struct, frozen=True):
    """One metric that a backend reports of each of its GPUs.

    Attributes:
        name: the name of the metric, the backend first and the unit last: `mig_free_slices`.
        meaning: the HELP text, one sentence.
        labels: the label names that distinguish several values of one GPU.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


class BackendMetric(msgspec.Struct, frozen=True):
    """One value of a metric; `labels` are the label values, in the order of its kind."""

    kind: MetricKind
    gpu: GpuId
    value: float
    labels: tuple[str, ...] = ()

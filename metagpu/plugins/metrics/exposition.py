"""The text format of Prometheus: the only user of its library."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from metagpu.plugins.metrics.samples import HistogramValue, MetricFamily, MetricType, Sample

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_TOTAL: Final = "_total"
_PROCESS: Final = ProcessCollector(registry=None)


def render_page(families: Sequence[MetricFamily], samples: Iterable[Sample]) -> bytes:
    """Render all families, also those without a series, and the process's metrics.

    Reads /proc, so call it in a thread.
    """
    return generate_latest(_Page(families, samples, _PROCESS))


def render_foreign_page(families: Sequence[MetricFamily], samples: Iterable[Sample]) -> bytes:
    """Render families whose counters may have names without `_total`."""
    page = generate_latest(_Page(families, samples))
    for family in families:
        if family.type is MetricType.COUNTER and not family.name.endswith(_TOTAL):
            for line in ("HELP", "TYPE"):  # the library's, which names all counters alike
                theirs = f"# {line} {family.name}{_TOTAL} ".encode()
                page = page.replace(theirs, f"# {line} {family.name} ".encode())
    return page


class _Page(Collector):
    """The samples of one page, as a collector that is registered nowhere."""

    def __init__(
        self,
        families: Sequence[MetricFamily],
        samples: Iterable[Sample],
        *more: Collector,
    ) -> None:
        self._families = families
        self._samples = samples
        self._more = more

    def collect(self) -> Iterator[Metric]:
        metrics = {family: _metric(family) for family in self._families}
        for family, labels, value in self._samples:
            named = dict(zip(family.labels, labels, strict=True))
            if isinstance(value, HistogramValue):
                _add_histogram(metrics[family], named, value)
            else:
                metrics[family].add_sample(family.name, named, float(value))
        yield from metrics.values()
        for other in self._more:
            yield from other.collect()


def _metric(family: MetricFamily) -> Metric:
    # The library's names of counters have no suffix; its exposition adds it again.
    name = family.name.removesuffix(_TOTAL) if family.type is MetricType.COUNTER else family.name
    return Metric(name, family.help, str(family.type))


def _add_histogram(metric: Metric, labels: dict[str, str], value: HistogramValue) -> None:
    counts = list(accumulate(value.counts))
    bounds = [*map(floatToGoString, value.bounds), "+Inf"]
    for bound, count in zip(bounds, counts, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{metric.name}_count", labels, counts[-1])
    metric.add_sample(f"{metric.name}_sum", labels, value.total)

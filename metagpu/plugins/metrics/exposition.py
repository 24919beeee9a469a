"""The text format of Prometheus.

Prometheus' library writes the metrics of the process, and its numbers. It needs as long for a page
of a thousand series as all the rest of a scrape: the lines of our own samples are written here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.utils import floatToGoString

from metagpu.plugins.metrics.samples import HistogramValue, MetricFamily, Sample

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_float: Callable[[float], str] = floatToGoString
_frequent: Callable[[float], str] = lru_cache(maxsize=1024)(floatToGoString)
"""Amounts of memory and limits are those of many series, and of the page before."""
_PROCESS: Final = ProcessCollector(registry=None)
_OF_LABELS: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_OF_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_WITHOUT_EXPONENT: Final = 1_000_000
"""Whole numbers below it need no look at their digits."""


class PageRenderer:
    """Renders pages of the same families: one page at a time.

    From one page to the next nearly all series stay: their names with labels are kept.
    """

    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._heads = {
            family.name: f"# HELP {family.name} {family.help.translate(_OF_HELP)}\n"
            f"# TYPE {family.name} {family.type}\n"
            for family in families
        }
        self._series: dict[str, dict[Sequence[str], str]] = {name: {} for name in self._heads}

    def render(self, samples: Iterable[Sample]) -> bytes:
        """Render all families, also those without a series."""
        lines = {name: [head] for name, head in self._heads.items()}
        known = self._series
        for family, labels, value in samples:
            name = family.name
            if isinstance(value, HistogramValue):
                lines[name] += _histogram(family, labels, value)
                continue
            series = known[name].get(labels)
            if series is None:
                series = f"{name}{_label_text(family.labels, labels)} "
                known[name][labels] = series
            lines[name].append(f"{series}{_number(value)}\n")
        self._forget(sum(map(len, lines.values())))
        return "".join([line for group in lines.values() for line in group]).encode()

    def _forget(self, shown: int) -> None:
        """Forget all series once most of them are of the past."""
        if sum(map(len, self._series.values())) > 2 * shown:
            self._series = {name: {} for name in self._heads}


def render_process() -> bytes:
    """Render the metrics of this process; reads /proc, so call it in a thread."""
    return generate_latest(_PROCESS)


def _number(value: float) -> str:
    """Return a number as Prometheus' library writes it."""
    if isinstance(value, int) and 0 <= value < _WITHOUT_EXPONENT:
        return f"{value:d}.0"
    return _frequent(value) if value else _float(value)  # 0 and -0 are one key


@lru_cache(maxsize=512)  # for the buckets of histograms: other series are kept by the renderer
def _label_text(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = [
        f'{name}="{value.translate(_OF_LABELS)}"' for name, value in zip(names, values, strict=True)
    ]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _histogram(family: MetricFamily, labels: Sequence[str], value: HistogramValue) -> Iterator[str]:
    counts = list(accumulate(value.counts))
    bounds = [*map(_number, value.bounds), "+Inf"]
    for bound, count in zip(bounds, counts, strict=True):
        bucket = _label_text((*family.labels, "le"), (*labels, bound))
        yield f"{family.name}_bucket{bucket} {_number(count)}\n"
    series = _label_text(family.labels, labels)
    yield f"{family.name}_count{series} {_number(counts[-1])}\n"
    yield f"{family.name}_sum{series} {_number(value.total)}\n"

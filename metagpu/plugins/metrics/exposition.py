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
_number: Callable[[float], str] = floatToGoString
_PROCESS: Final = ProcessCollector(registry=None)
_OF_LABELS: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_OF_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def render_page(families: Sequence[MetricFamily], samples: Iterable[Sample]) -> bytes:
    """Render all families, also those without a series."""
    lines = {
        it.name: [f"# HELP {it.name} {it.help.translate(_OF_HELP)}\n# TYPE {it.name} {it.type}\n"]
        for it in families
    }
    for family, labels, value in samples:
        if isinstance(value, HistogramValue):
            lines[family.name] += _histogram(family, labels, value)
        else:
            series = _label_text(family.labels, labels)
            lines[family.name].append(f"{family.name}{series} {_number(value)}\n")
    return "".join(line for group in lines.values() for line in group).encode()


def render_process() -> bytes:
    """Render the metrics of this process; reads /proc, so call it in a thread."""
    return generate_latest(_PROCESS)


@lru_cache(maxsize=2048)  # two pages: from one scrape to the next nearly all labels stay
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

"""The text format of Prometheus.

Prometheus' library writes the metrics of the process, and its numbers. It needs as long for a page
of a thousand series as all the rest of a scrape: the lines of our own samples are written here.
"""

from collections.abc import Callable, Iterable, Sequence
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
        pairs = [
            f'{name}="{label.translate(_OF_LABELS)}"'
            for name, label in zip(family.labels, labels, strict=True)
        ]
        if isinstance(value, HistogramValue):
            lines[family.name] += _histogram(family.name, pairs, value)
        else:
            lines[family.name].append(_line(family.name, pairs, value))
    return "".join(line for group in lines.values() for line in group).encode()


def render_process() -> bytes:
    """Render the metrics of this process; reads /proc, so call it in a thread."""
    return generate_latest(_PROCESS)


def _line(name: str, pairs: Sequence[str], value: float) -> str:
    labels = f"{{{','.join(pairs)}}}" if pairs else ""
    return f"{name}{labels} {_number(value)}\n"


def _histogram(name: str, pairs: Sequence[str], value: HistogramValue) -> list[str]:
    counts = list(accumulate(value.counts))
    bounds = [*map(_number, value.bounds), "+Inf"]
    buckets = zip(bounds, counts, strict=True)
    return [
        *(_line(f"{name}_bucket", [*pairs, f'le="{bound}"'], count) for bound, count in buckets),
        _line(f"{name}_count", pairs, counts[-1]),
        _line(f"{name}_sum", pairs, value.total),
    ]

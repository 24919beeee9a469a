"""Samples as text: Prometheus reads the values that were written."""

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from metagpu.plugins.metrics.exposition import PageRenderer, render_process
from metagpu.plugins.metrics.samples import HistogramValue, MetricFamily, MetricType, Sample
from tests.plugins.metrics.rig import Page

THINGS = MetricFamily("metagpu_things", MetricType.GAUGE, "Things there are.", ("of", "kind"))
TIMES = MetricFamily("metagpu_times_total", MetricType.COUNTER, "Times it was done.")
WAITS = MetricFamily("metagpu_wait_seconds", MetricType.HISTOGRAM, "How long it took.", ("who",))
ALL = (THINGS, TIMES, WAITS)


def page(*samples: Sample) -> Page:
    """Write a page, and parse the text."""
    return Page(PageRenderer(ALL).render(samples).decode())


def test_values_and_labels_arrive() -> None:
    """A label value with any characters stays one label of one line."""
    odd = 'a"b\\c\nd{e="f"} 1 ä'
    whole_page = page(
        Sample(THINGS, (odd, "x"), 1), Sample(THINGS, ("y", "x"), 2.5), Sample(TIMES, (), 7)
    )

    assert whole_page.value("metagpu_things", of=odd, kind="x") == 1
    assert whole_page.value("metagpu_things", of="y") == 2.5
    assert whole_page.value("metagpu_times_total") == 7
    assert whole_page.families["metagpu_things"] == "gauge"
    assert whole_page.families["metagpu_times"] == "counter"
    assert "# HELP metagpu_things Things there are.\n" in whole_page.text


def test_a_histogram_counts_upwards() -> None:
    """Each bucket counts all samples below its bound; the last counts all."""
    whole_page = page(Sample(WAITS, ("me",), HistogramValue((0.1, 2.5), (3, 0, 2), 12.5)))

    assert whole_page.value("metagpu_wait_seconds_bucket", le="0.1") == 3
    assert whole_page.value("metagpu_wait_seconds_bucket", le="2.5") == 3
    assert whole_page.value("metagpu_wait_seconds_bucket", le="+Inf", who="me") == 5
    assert whole_page.value("metagpu_wait_seconds_count") == 5
    assert whole_page.value("metagpu_wait_seconds_sum") == 12.5


@given(st.lists(st.tuples(st.text(), st.text(), st.floats()), unique_by=lambda value: value[:2]))
def test_lines_are_those_of_the_library(values: list[tuple[str, str, float]]) -> None:
    """Any label and number is written as Prometheus' own library writes it."""
    metric = Metric(THINGS.name, THINGS.help, "gauge")
    for of, kind, value in values:
        metric.add_sample(THINGS.name, {"kind": kind, "of": of}, value)
    registry = CollectorRegistry()
    registry.register(_Fixed([metric]))
    sorted_labels = replace(THINGS, labels=("kind", "of"))
    samples = [Sample(sorted_labels, (kind, of), value) for of, kind, value in values]

    assert PageRenderer([sorted_labels]).render(samples) == generate_latest(registry)


class _Fixed(Collector):
    """A collector of given metrics."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._metrics


def test_what_has_no_series_is_named_all_the_same() -> None:
    """A family without series still has its HELP and TYPE lines."""
    assert {"metagpu_things", "metagpu_times", "metagpu_wait_seconds"} <= page().families.keys()


def test_the_process_is_measured() -> None:
    """CPU, memory and open files of the daemon have the usual names."""
    whole_page = Page(render_process().decode())

    assert whole_page.value("process_cpu_seconds_total") > 0
    assert whole_page.value("process_resident_memory_bytes") > 1e6
    assert whole_page.value("process_open_fds") > 2


def test_labels_that_do_not_match_are_a_fault() -> None:
    """A sample with too few labels is never written as another sample."""
    with pytest.raises(ValueError, match="zip"):
        page(Sample(THINGS, ("x",), 1))


def test_nothing_is_registered_globally() -> None:
    """The library's registry of the process stays unchanged."""
    before = set(prometheus_client.REGISTRY._names_to_collectors)
    page(Sample(TIMES, (), 1))

    assert set(prometheus_client.REGISTRY._names_to_collectors) == before

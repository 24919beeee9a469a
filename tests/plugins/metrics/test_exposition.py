"""Samples as text: what Prometheus reads of them is what was said."""

import prometheus_client
import pytest

from metagpu.plugins.metrics.exposition import page_of
from metagpu.plugins.metrics.samples import Family, Kind, Sample, Spread
from tests.plugins.metrics.rig import Page

THINGS = Family("metagpu_things", Kind.GAUGE, "Things there are.", ("of", "kind"))
TIMES = Family("metagpu_times_total", Kind.COUNTER, "Times it was done.")
WAITS = Family("metagpu_wait_seconds", Kind.HISTOGRAM, "How long it took.", ("who",))
ALL = (THINGS, TIMES, WAITS)


def page(*samples: Sample) -> Page:
    """Write a page, and read it."""
    return Page(page_of(ALL, samples).decode())


def test_values_and_labels_arrive() -> None:
    """Whatever characters a label has, it is one label of one line."""
    odd = 'a"b\\c\nd{e="f"} 1 ä'
    it = page(Sample(THINGS, (odd, "x"), 1), Sample(THINGS, ("y", "x"), 2.5), Sample(TIMES, (), 7))

    assert it.value("metagpu_things", of=odd, kind="x") == 1
    assert it.value("metagpu_things", of="y") == 2.5
    assert it.value("metagpu_times_total") == 7
    assert it.families["metagpu_things"] == "gauge"
    assert it.families["metagpu_times"] == "counter"
    assert "# HELP metagpu_things Things there are.\n" in it.text


def test_a_histogram_counts_upwards() -> None:
    """Each bucket has all that are below its bound; the last has all."""
    it = page(Sample(WAITS, ("me",), Spread((0.1, 2.5), (3, 0, 2), 12.5)))

    assert it.value("metagpu_wait_seconds_bucket", le="0.1") == 3
    assert it.value("metagpu_wait_seconds_bucket", le="2.5") == 3
    assert it.value("metagpu_wait_seconds_bucket", le="+Inf", who="me") == 5
    assert it.value("metagpu_wait_seconds_count") == 5
    assert it.value("metagpu_wait_seconds_sum") == 12.5


def test_what_has_no_series_is_named_all_the_same() -> None:
    """So that who looks at a page finds what there could be."""
    assert {"metagpu_things", "metagpu_times", "metagpu_wait_seconds"} <= page().families.keys()


def test_the_process_is_measured() -> None:
    """CPU, memory and open files of the daemon itself, under the names that dashboards know."""
    it = page()

    assert it.value("process_cpu_seconds_total") > 0
    assert it.value("process_resident_memory_bytes") > 1e6
    assert it.value("process_open_fds") > 2


def test_labels_that_do_not_match_are_a_fault() -> None:
    """A sample with too few labels is never written as something else."""
    with pytest.raises(ValueError, match="zip"):
        page(Sample(THINGS, ("x",), 1))


def test_nothing_is_registered_globally() -> None:
    """The library's registry of the process stays as it was."""
    before = set(prometheus_client.REGISTRY._names_to_collectors)
    page(Sample(TIMES, (), 1))

    assert set(prometheus_client.REGISTRY._names_to_collectors) == before

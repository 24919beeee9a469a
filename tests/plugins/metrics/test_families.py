"""The names of all metrics, compared with Prometheus' conventions and with the documentation."""

import re
from pathlib import Path

import pytest

from metagpu.core.contracts.backend import installed_backends
from metagpu.core.contracts.capabilities import metric_kinds_of
from metagpu.plugins.metrics import dcgm
from metagpu.plugins.metrics.exposition import render_process
from metagpu.plugins.metrics.families import FAMILIES, backend_families
from metagpu.plugins.metrics.samples import MetricFamily, MetricType
from metagpu.webhook.program import FAMILIES as OF_WEBHOOK
from tests.plugins.metrics.rig import Page

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
ALL = (
    *FAMILIES,
    *backend_families(metric_kinds_of(installed_backends().values())),
    *OF_WEBHOOK,
)
SUFFIXES = ("_bytes", "_seconds", "_ratio", "_info", "_shares", "_slices", "_total", "_instances")
"""Units, of which shares, slices and instances are ours; and what is no unit but belongs last."""
NO_UNITS = (
    *("milliseconds", "ms", "minutes", "hours", "percent", "mib", "gib", "mb", "gb", "kb"),
    *("megabytes", "kilobytes", "mebibytes", "byte", "second", "sec", "ratios"),
)
OF_PROMETHEUS = {"le", "quantile", "job", "instance"}

every = pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)


@every
def test_a_name_is_one_of_prometheus(family: MetricFamily) -> None:
    """Names are in lower case, begin with our prefix, and have no suffix of histograms."""
    assert re.fullmatch(r"metagpu(_[a-z0-9]+)+", family.name)
    assert not family.name.endswith(("_bucket", "_sum", "_count", "_created"))


@every
def test_a_counter_ends_in_total_and_nothing_else_does(family: MetricFamily) -> None:
    """`_total` marks the metrics that `rate` applies to."""
    assert family.name.endswith("_total") == (family.type is MetricType.COUNTER)


@every
def test_units_are_base_units_at_the_end(family: MetricFamily) -> None:
    """Units are bytes, seconds and ratios, at the end of the name."""
    words = family.name.removesuffix("_total").split("_")

    assert not set(words) & set(NO_UNITS)
    for unit in ("bytes", "seconds", "ratio", "celsius", "watts", "joules", "hertz"):
        assert unit not in words or words[-1] == unit
    if words[-1] == "timestamp":
        pytest.fail("a timestamp is in seconds, and says so")
    assert "timestamp" not in words or words[-2:] == ["timestamp", "seconds"]


@every
def test_labels_are_few_and_ours(family: MetricFamily) -> None:
    """Labels are in lower case, unique, not Prometheus' own, and not in the metric's name."""
    assert len(set(family.labels)) == len(family.labels) <= 8
    assert not set(family.labels) & OF_PROMETHEUS
    assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in family.labels)
    assert not any(f"by_{label}" in family.name for label in family.labels)


@every
def test_the_help_is_a_sentence(family: MetricFamily) -> None:
    """Each HELP begins with a capital, ends with a full stop, and is one readable line."""
    assert re.fullmatch(r"[A-Z][^\n]{10,180}[^.\s]\.", family.help)


def test_each_name_stands_once() -> None:
    """Names are unique, and no name is the beginning of a histogram's."""
    names = [family.name for family in ALL]

    assert len(set(names)) == len(names)
    assert {family.type for family in ALL} == set(MetricType)


def rows() -> list[tuple[str, ...]]:
    """Return name, type, labels and meaning of each metric in the documentation's lists."""
    found = re.findall(
        r"^- `([a-z0-9_]+)` \((\w+)(?:; (.*?))?\): (.*)$", DOCS.read_text(), re.MULTILINE
    )
    return [tuple(row) for row in found]


def test_every_metric_is_documented_and_no_other() -> None:
    """Name, type, labels and meaning are those of the page, in the same order."""
    ours = [row for row in rows() if row[0].startswith("metagpu_")]

    assert ours == [
        (family.name, family.type, ", ".join(f"`{label}`" for label in family.labels), family.help)
        for family in ALL
    ]


def test_process_metrics_are_documented() -> None:
    """The page has the process metrics of the library too."""
    page = Page(render_process().decode())
    theirs = {row[0]: row[1] for row in rows() if not row[0].startswith("metagpu_")}

    assert theirs
    assert theirs == {
        f"{name}_total" if kind == "counter" else name: kind for name, kind in page.families.items()
    }


def test_the_examples_use_existing_metrics() -> None:
    """Every metric and label in documented queries exists."""
    text = DOCS.read_text()
    named = set(re.findall(r"\bmetagpu_[a-z0-9_]+", text))
    histograms = {family.name for family in ALL if family.type is MetricType.HISTOGRAM}
    known = {family.name for family in ALL} | {f"{name}_bucket" for name in histograms}

    assert named <= known
    examples = "".join(re.findall(r"```promql\n(.*?)```", text, re.DOTALL))
    labels = {label for family in (*ALL, *dcgm.FAMILIES) for label in family.labels}
    labels |= {"instance", "le", "node"}
    grouped = ", ".join(re.findall(r"\b(?:by|on|group_left) \(([\w, ]+)\)", examples)).split(", ")
    assert set(grouped) <= labels


def test_the_alerts_use_existing_metrics() -> None:
    """Every metric and label of the alert rules exists."""
    text = (DOCS.parents[1] / "deploy" / "monitoring" / "alerts.yaml").read_text()
    labels = {label for family in ALL for label in family.labels} | {"instance"}

    assert set(re.findall(r"\bmetagpu_[a-z0-9_]+", text)) <= {family.name for family in ALL}
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels

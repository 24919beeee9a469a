"""The Grafana dashboards in deploy/monitoring: made from one description, on existing metrics."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from metagpu.core.contracts.backend import installed_backends
from metagpu.core.contracts.capabilities import metric_kinds_of
from metagpu.plugins.metrics.families import FAMILIES, backend_families
from metagpu.plugins.metrics.samples import MetricType

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
SERVED = {
    family.name
    for family in (*FAMILIES, *backend_families(metric_kinds_of(installed_backends().values())))
}
HISTOGRAMS = {f"{family.name}_bucket" for family in FAMILIES if family.type is MetricType.HISTOGRAM}
LABELS = {label for family in FAMILIES for label in family.labels}
OF_A_SCRAPE = {"node", "job", "le", "profile", "state"}


def script() -> ModuleType:
    """Load the script that makes the dashboards."""
    spec = importlib.util.spec_from_file_location("dashboards", FOLDER / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expressions() -> dict[str, list[str]]:
    """Return the queries of each dashboard, from its JSON."""
    return {
        file.stem: [
            target["expr"]
            for panel in json.loads(file.read_text())["panels"]
            for target in panel.get("targets", ())
        ]
        for file in sorted((FOLDER / "dashboards").glob("*.json"))
    }


def test_dashboards_are_those_of_the_description() -> None:
    """`dashboards.py` writes what is there, and nothing else is there."""
    made = script()
    description = made.read()
    assert {file.name: file.read_text() for file in (FOLDER / "dashboards").iterdir()} == {
        f"{dashboard.name}.json": made.render(dashboard, description)
        for dashboard in description.dashboards
    }
    assert {dashboard.name for dashboard in description.dashboards} == {"node", "cluster", "tenant"}


def test_a_mistyped_key_of_the_description_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the path of a key that nobody reads."""
    made = script()
    file = tmp_path / "dashboards.yaml"
    file.write_text((FOLDER / "dashboards.yaml").read_text().replace("legend:", "legende:", 1))
    monkeypatch.setattr(made, "DESCRIPTION", file)
    with pytest.raises(msgspec.ValidationError, match=r"legende.*queries\[0\]"):
        made.read()


@pytest.mark.parametrize(("name", "queries"), expressions().items(), ids=expressions())
def test_every_query_names_a_metric_that_is_served(name: str, queries: list[str]) -> None:
    """Metrics and labels of all queries exist, and each placeholder has a value."""
    of_process = {
        metric.name for metric in ProcessCollector(registry=CollectorRegistry()).collect()
    }
    served = SERVED | HISTOGRAMS | of_process | {f"{text}_total" for text in of_process} | {"up"}
    assert len(queries) > 10, name
    for query in queries:
        named = set(re.findall(r"\b(?:metagpu|process)_\w+|\bup\b", query))
        assert named, query
        assert named <= served, query
        grouped = re.findall(r"\b(?:by|on|group_left) \(([\w, ]+)\)", query)
        labels = {label for value in grouped for label in value.split(", ")}
        labels |= set(re.findall(r"[{,](\w+)=", query))
        assert labels <= LABELS | OF_A_SCRAPE, query
        assert not re.search(r"\$[A-Z]", query), query


@pytest.mark.parametrize("name", expressions())
def test_a_dashboard_is_whole(name: str) -> None:
    """Panels have ids of their own, do not overlap, and fit the width of Grafana."""
    document = json.loads((FOLDER / "dashboards" / f"{name}.json").read_text())
    assert document["uid"] == f"metagpu-{name}"
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    chosen = {entry["name"] for entry in document["templating"]["list"]} - {"datasource"}
    used = set(re.findall(r"\$(node|namespace)\b", json.dumps(document["panels"])))
    assert chosen == used

"""Writes the Grafana dashboards of this folder, from the one description in `dashboards.yaml`.

`python deploy/monitoring/dashboards.py` writes the files, `--check` compares them.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

HERE: Final = Path(__file__).parent
DESCRIPTION: Final = HERE / "dashboards.yaml"
_WIDTH: Final = 24
_GRAPH, _TABLE = "timeseries", "table"
_HEIGHTS: Final = {"stat": 4, _GRAPH: 8, "bargauge": 8, _TABLE: 9}
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_RED_ABOVE_ZERO: Final = {
    "mode": "absolute",
    "steps": [{"color": "green", "value": None}, {"color": "red", "value": 1}],
}


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An expression and its legend."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One panel; `dashboards.yaml` says what its keys mean."""

    title: str
    kind: str
    unit: str
    queries: tuple[Query, ...]
    about: str = ""
    width: int = 8
    top: float | None = None
    alarm: bool = False


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Panels below a title: its own, or a part with values for its placeholders."""

    title: str
    panels: tuple[Panel, ...] = ()
    part: str = ""
    values: Mapping[str, str] = msgspec.field(default_factory=dict)


class Dashboard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of panels, and the labels that a reader chooses, each with its query."""

    name: str
    title: str
    rows: tuple[Row, ...]
    choices: Mapping[str, str] = msgspec.field(default_factory=dict)


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All dashboards, and parts that several of them have."""

    parts: Mapping[str, tuple[Panel, ...]]
    dashboards: tuple[Dashboard, ...]

    def panels(self, row: Row) -> Sequence[Panel]:
        """Return the panels of a row."""
        return [
            *row.panels,
            *(_filled(panel, row.values) for panel in self.parts.get(row.part, ())),
        ]


def read() -> Description:
    """Read the description.

    Raises:
        msgspec.ValidationError: a key is unknown or missing; the text has its path.
    """
    return msgspec.yaml.decode(DESCRIPTION.read_bytes(), type=Description)


def _filled(panel: Panel, values: Mapping[str, str]) -> Panel:
    """Return a panel with values in place of its placeholders."""
    queries = []
    for query in panel.queries:
        expr, legend = query.expr, query.legend
        for name, value in values.items():
            expr, legend = expr.replace(f"${name}", value), legend.replace(f"${name}", value)
        queries.append(Query(expr, legend))
    return msgspec.structs.replace(panel, queries=tuple(queries))


def render(dashboard: Dashboard, description: Description) -> str:
    """Return the JSON of a dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        panels.append({"type": "row", "title": row.title, "collapsed": False, "gridPos": place})
        x, y, height = 0, y + 1, 0
        for panel in description.panels(row):
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            place = {"h": _HEIGHTS[panel.kind], "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel) | {"gridPos": place})
            x, height = x + panel.width, max(height, _HEIGHTS[panel.kind])
        y += height
    for number, document in enumerate(panels, start=1):
        document["id"] = number
    return json.dumps(_frame(dashboard) | {"panels": panels}, indent=1) + "\n"


def _frame(dashboard: Dashboard) -> dict[str, Any]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource"}
    return {
        "uid": f"metagpu-{dashboard.name}",
        "title": dashboard.title,
        "description": "Made by deploy/monitoring/dashboards.py.",
        "tags": ["metagpu", "gpu"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "metagpu", "tags": ["metagpu"], "keepTime": True}
        ],
        "templating": {
            "list": [
                source | {"query": "prometheus"},
                *(_choice(name, query) for name, query in dashboard.choices.items()),
            ]
        },
    }


def _choice(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "choice"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.alarm:
        defaults["thresholds"] = _RED_ABOVE_ZERO
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": panel.kind != _GRAPH,
                "range": panel.kind == _GRAPH,
                **({"format": "table"} if panel.kind == _TABLE else {}),
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args(arguments).check

    description = read()
    texts = {
        HERE / "dashboards" / f"{dashboard.name}.json": render(dashboard, description)
        for dashboard in description.dashboards
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.write_text(texts[path])
        print(f"{'stale' if check else 'written'}: {path.name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

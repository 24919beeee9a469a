"""Kubernetes Events of metagpu as rows of the page: pure functions."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from metagpu.plugins.cluster.event_reasons import SEVERE

Object = Mapping[str, Any]

MOST: Final = 100
"""Events of a view."""
_INSTANCE: Final = "metagpu-"
"""The beginning of the name under which the daemon of a node writes Events."""
_GPU: Final = re.compile(r"GPU (\d+)\b")


def event_rows(objects: Iterable[Object], nodes: Collection[str]) -> Sequence[Object]:
    """Return the Events about some nodes and their pods, the newest first."""
    rows = [it for it in map(_row, objects) if it["node"] in nodes]
    return sorted(rows, key=lambda it: str(it["at"]), reverse=True)[:MOST]


def _row(it: Object) -> Object:
    about, text = it.get("involvedObject") or {}, str(it.get("message") or "")
    series = it.get("series") or {}
    gpu, reason = _GPU.search(text), str(it.get("reason") or "")
    severity = "warning" if it.get("type") == "Warning" else "info"
    if about.get("kind") == "Node":
        node = about.get("name")
    else:
        node = str(it.get("reportingInstance") or "").removeprefix(_INSTANCE)
        text = f"{about.get('namespace')}/{about.get('name')}: {text}"
    return {
        "at": series.get("lastObservedTime") or it.get("eventTime") or it.get("lastTimestamp"),
        "node": node,
        "gpu": int(gpu[1]) if gpu else None,
        "severity": "error" if reason in SEVERE else severity,
        "reason": reason,
        "text": text,
    }

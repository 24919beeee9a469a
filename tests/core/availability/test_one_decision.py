"""No second place decides whether a share may be given: only the table combines causes."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[3] / "metagpu"
CAUSES: Final[Mapping[str, str]] = {
    "healthy": "health",
    "mig_faults": "health",
    "device_fault": "health",
    "cordon": "cordon",
    "cordons": "cordon",
    "suspended": "pause",
    "paused": "pause",
    "paused_shares": "pause",
    "owner": "conflict",
    "cleaning": "conflict",
    "cleanup": "conflict",
    "can_conflict": "conflict",
    "blocked": "conflict",
    "delayed": "conflict",
    "exclusive": "conflict",
    "turn": "turn",
    "present_turn": "turn",
    "hidden": "hidden",
    "unconfirmed": "kubelet",
}
"""The attributes in which a cause stands, and the kind of cause."""
ROOMS: Final = ("core/availability", "core/model", "core/state")
"""The table, the values that it reads, and what changes them."""
OTHERS: Final = ("cli", "display", "kubectl", "sim", "webhook")
"""Rooms that read reports, not states; the simulator is no part of a node."""
READERS: Final[Mapping[str, str]] = {
    "core/devices/slices.py:_taints": "names the owner in the value of a taint",
    "core/health/verdicts.py:take_note": "writes the note of faults and cordons",
    "core/reports/status.py:_gpu_report": "shows each cause",
    "core/usage/report.py:_gpu_report": "shows each cause",
    "plugins/cluster/config_follower.py:_is_pending": "waits for a new configuration",
    "plugins/cluster/held_gpus.py:_troubles_of_holder": "tells pods what their GPU has",
    "plugins/cluster/held_gpus.py:troubles_of": "tells pods what their GPU has",
    "plugins/cluster/node_status.py:watched_state": "wakes the writer of the Node",
    "plugins/dra/claim_leases.py:_changes_soon": "asks whether a refusal ends by itself",
    "plugins/metrics/gpus.py:_gpu": "shows each cause",
    "testing/backend_contract.py:_live": "looks at a backend from outside",
}
"""Functions that read several kinds of causes and decide nothing about a share, and why."""


def readers(text: str) -> Iterator[str]:
    """Yield the functions of a module that read several kinds of causes."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            read = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            if len({CAUSES[name] for name in read if name in CAUSES}) > 1:
                yield function.name


def found(package: Path) -> set[str]:
    """Return all such functions outside of the rooms that may combine causes."""
    return {
        f"{file}:{name}"
        for path in package.rglob("*.py")
        for file in (path.relative_to(package).as_posix(),)
        if not file.startswith(tuple(f"{room}/" for room in (*ROOMS, *OTHERS)))
        for name in readers(path.read_text(encoding="utf-8"))
    }


def test_the_table_alone_combines_causes() -> None:
    """Modules that want to know whether a share may be given ask `core/availability`."""
    assert found(PACKAGE) == set(READERS)


def test_a_planted_second_decision_is_found(tmp_path: Path) -> None:
    """A function that combines two kinds of causes is refused, in whatever room it stands."""
    planted = tmp_path / "plugins" / "kubelet" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(
        "def may_be_granted(state, share):\n"
        "    return state.verdict.healthy and share.backend not in state.suspended\n"
        "def asks(state, share):\n"
        "    return state.verdict.healthy or state.mig_faults\n"
    )
    allowed = tmp_path / "core" / "availability" / "planted.py"
    allowed.parent.mkdir(parents=True)
    allowed.write_text(planted.read_text())

    assert found(tmp_path) == {"plugins/kubelet/planted.py:may_be_granted"}

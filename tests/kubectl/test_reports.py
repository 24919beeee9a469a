"""The parts of a report that the commands read, and the commands without one of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from metagpu.core.reports.doctor import diagnose_status
from metagpu.display.status import show_explanation
from metagpu.kubectl.claims import ReadClaims
from metagpu.kubectl.drain import holdings_of
from metagpu.kubectl.judgement import judge_all
from metagpu.kubectl.obstacles import ClusterNode
from metagpu.kubectl.reports import StatusForm, UsageForm
from metagpu.kubectl.tables import KINDS, draw_items, draw_top
from metagpu.kubectl.viewer import NodeAnswer
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_status_api import serving
from tests.kubectl.test_judgement import demand
from tests.rigs.agent import METAGPU

PAUSE = {"reason": "fan", "since": "2026-01-01T00:00:00+00:00", "reset": False}
PARTS = {
    "unreadableGpus": [
        {"index": 7, "reason": "it has fallen off the bus", "since": PAUSE["since"]}
    ],
    "leaseDifferences": [{"holder": "team/a (main)", "reason": "it does not run"}],
    "mixedRequests": [{"holder": "team/a (main)", "reason": "it sees one resource"}],
    "lostDevices": [{"holder": "team/a (main)", "fix": "kubectl delete pod a"}],
    "remarks": [{"text": "a remark"}],
    "dra": {"driver": "gpu.metagpu.io", "problem": None, "claims": 0},
    "events": [{"at": PAUSE["since"], "text": "an event"}],
}
"""What a node in good order does not report."""
BROKEN_GPU = {
    "cordon": PAUSE,
    "unheard": PAUSE,
    "suspended": {"mps": PAUSE},
    "cleaning": {"mps": PAUSE["since"]},
    "blocked": ["it is withheld"],
    "faults": [{**PAUSE, "device": "MIG-1", "shares": ["a::1"]}],
}
RECOVERING = {"healthy": False, "recovery": {"since": PAUSE["since"], "returnsAt": PAUSE["since"]}}


def read_usage(report: Mapping[str, Any]) -> None:
    """Read a usage as `get` and `top` do."""
    for kind, items in KINDS.items():
        rows = list(items([NodeAnswer("gpu-1", report)]))
        draw_items(kind, rows, wide=True)
        draw_top(kind, rows, wide=True)


def read_status(report: Mapping[str, Any]) -> None:
    """Read a status as `doctor`, `explain`, `why`, `fit` and `drain-gpu` do."""
    diagnose_status(report)
    show_explanation(report, topology=True)
    ReadClaims().our_classes([report])
    for gpu in report["gpus"]:
        holdings_of(report, gpu["uuid"])
    for counts in ((1,), (8,), (11,), (9, 9), (7, 9, 1), (30,)):
        for resource in (METAGPU, "example.com/none"):
            node = ClusterNode("gpu-1", report=report)
            judge_all(demand(*counts, resource=resource), [node])


def lacking(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield copies of a report, each without one field or with `null` in its place."""
    for place in places(report):
        for is_null in (False, True):
            copy = deepcopy(report)
            part: Any = copy
            for key in place[:-1]:
                part = part[key]
            if is_null:
                part[place[-1]] = None
            elif isinstance(part, dict):
                del part[place[-1]]
            else:
                continue
            yield ".".join(map(str, place)), copy


def places(part: object) -> Iterator[Sequence[str | int]]:
    """Yield the place of each value in a report."""
    found = (
        part.items()
        if isinstance(part, dict)
        else enumerate(part)
        if isinstance(part, list)
        else ()
    )
    for key, value in found:
        yield [key]
        yield from ([key, *it] for it in places(value))


async def test_what_is_read_of_a_report_is_what_it_must_have(tmp_path: Path) -> None:
    """A report that lacks a field is none, or every command can do without that field."""
    async with serving(tmp_path) as scene:
        await scene.it.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await scene.it.wait_holders()
        token = scene.token()
        status: Any = await scene.get("/api/v1/status", token)
        usage: Any = await scene.get("/api/v1/usage", token)

    broken = {**status, **PARTS, "gpus": deepcopy(status["gpus"])}
    broken["gpus"][0].update(BROKEN_GPU)
    broken["gpus"][1].update(RECOVERING)
    reports: Sequence[tuple[Any, Callable[[Any], None], Any]] = (
        (UsageForm, read_usage, usage),
        (StatusForm, read_status, status),
        (StatusForm, read_status, broken),
    )
    refused = 0
    for form, read, whole in reports:
        msgspec.convert(whole, form)
        read(whole)
        for place, report in lacking(whole):
            try:
                msgspec.convert(report, form)
            except msgspec.ValidationError:
                refused += 1
                continue
            try:
                read(report)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                pytest.fail(f"{form.__name__} without {place}: {error!r}")
    assert refused > 100

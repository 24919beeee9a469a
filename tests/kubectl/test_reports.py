"""Reports of other releases: what a report lacks costs the commands that read it, in one line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from metagpu.core.reports.doctor import diagnose_status
from metagpu.core.reports.reading import FieldMissing, decode_report, plain_report, read_report
from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.display.status import show_explanation
from metagpu.kubectl.claims import ReadClaims
from metagpu.kubectl.commands import silent_nodes
from metagpu.kubectl.drain import holdings_of
from metagpu.kubectl.errors import NoAnswer, report_of
from metagpu.kubectl.judgement import judge_all
from metagpu.kubectl.obstacles import ClusterNode, Obstacle
from metagpu.kubectl.tables import KINDS, draw_items, draw_top, read_rows
from metagpu.kubectl.viewer import NodeAnswer
from metagpu.kubectl.web import _compose, _Objects, _WaitingPods
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_status_api import serving
from tests.kubectl.test_judgement import demand
from tests.rigs.agent import METAGPU
from tests.rigs.reported import complete

SINCE = "2026-01-01T00:00:00+00:00"
PAUSE = {"reason": "fan", "since": SINCE, "reset": False}
CLAIMED = {"driver": "gpu.metagpu.io", "problem": None, "claims": 0}
PARTS = {
    "unreadableGpus": [{"index": 7, "reason": "it is off the bus", "since": SINCE}],
    "leaseDifferences": [{"holder": "team/a (main)", "reason": "it does not run"}],
    "mixedRequests": [{"holder": "team/a (main)", "reason": "it sees one resource"}],
    "lostDevices": [{"holder": "team/a (main)", "fix": "kubectl delete pod a"}],
    "remarks": [{"text": "a remark"}],
    "dra": CLAIMED,
    "events": [{"at": SINCE, "text": "an event"}],
}
"""What a node in good order does not report."""
BROKEN_GPU = {
    "cordon": PAUSE,
    "unheard": PAUSE,
    "suspended": {"mps": PAUSE},
    "cleaning": {"mps": SINCE},
    "blocked": ["it is withheld"],
    "faults": [{"reason": "XID 94", "since": SINCE, "device": "MIG-1", "shares": ["a::1"]}],
    "turn": {"backend": "mps"},
}
RECOVERING = {"healthy": False, "recovery": {"since": SINCE, "returnsAt": SINCE}}


def read_usage(usage: UsageReport) -> bool:
    """Read a usage as `get` and `top` do; return whether a kind is refused, in one line."""
    refused = False
    for kind in KINDS:
        rows, answers = read_rows(kind, [NodeAnswer("gpu-1", usage)])
        draw_items(kind, rows, wide=True)
        draw_top(kind, rows, wide=True)
        for line in silent_nodes(answers):
            assert_names_the_field(line)
            refused = True
    return refused


def read_status(status: StatusReport) -> bool:
    """Read a status as all commands but `get` do; return whether one is refused, in one line."""
    lines = [
        diagnosis.finding
        for diagnosis in diagnose_status(status)
        if diagnosis.finding.startswith("unknown: ")
    ]
    ReadClaims().our_classes([status])
    for command in (explain, drain_and_cordon):
        try:
            with report_of("gpu-1"):
                command(status)
        except NoAnswer as error:
            lines.append(str(error))
    node = ClusterNode("gpu-1", report=status)
    for counts in ((1,), (8,), (11,), (9, 9), (7, 9, 1), (30,)):
        for resource in (METAGPU, "example.com/none"):
            [judged] = judge_all(demand(*counts, resource=resource), [node])
            if judged.obstacle is Obstacle.NO_ANSWER:
                lines.append(judged.reason)
    for line in lines:
        assert_names_the_field(line)
    return bool(lines)


def explain(status: StatusReport) -> None:
    """Read a status as `explain` does."""
    show_explanation(status, topology=True)


def drain_and_cordon(status: StatusReport) -> None:
    """Read a status as `drain-gpu` and `cordon` do."""
    for gpu in status.gpus:
        holdings_of(status, gpu.uuid)
        assert gpu.index >= 0
        assert gpu.cordon is None or gpu.cordon.reason
        assert sum(share.held for share in gpu.shares.values()) >= 0


def assert_names_the_field(line: str) -> None:
    """Hold a line to naming the field that is missed, and what helps."""
    assert "its daemon does not report the field " in line
    assert "update metagpu there, or this program" in line
    assert "\n" not in line


def lacking(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield copies of a report, each without one field; in some it has another type."""
    for number, place in enumerate(places(report)):
        for is_wrong in (False, True)[: 2 if number % 5 == 0 else 1]:
            copy = deepcopy(report)
            part: Any = copy
            for key in place[:-1]:
                part = part[key]
            if is_wrong:
                part[place[-1]] = [] if isinstance(part[place[-1]], str) else "another type"
            elif isinstance(part, dict):
                del part[place[-1]]
            else:
                continue
            yield ".".join(map(str, place)), copy


def places(part: object) -> Iterator[Sequence[str | int]]:
    """Yield the place of each value in a report."""
    items: Iterator[tuple[Any, object]] = iter(())
    if isinstance(part, dict):
        items = iter(part.items())
    elif isinstance(part, list):
        items = iter(enumerate(part))
    for key, value in items:
        yield [key]
        yield from ([key, *place] for place in places(value))


async def test_a_report_without_a_field_costs_the_commands_that_read_it(tmp_path: Path) -> None:
    """No command fails without a line that names the field; the page shows what there is."""
    async with serving(tmp_path) as scene:
        await scene.node.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await scene.node.wait_holders()
        status: Any = await scene.get("/api/v1/status", scene.token())
        usage: Any = await scene.get("/api/v1/usage", scene.token())

    first, second = status["gpus"]
    gpus = [{**first, **BROKEN_GPU}, {**second, **RECOVERING}]
    broken = plain_report(complete({**status, **PARTS, "gpus": gpus}, StatusReport))
    for whole in (status, broken):
        assert not read_status(read_report(whole, StatusReport))
    assert not read_usage(read_report(usage, UsageReport))

    refused = read = 0
    kinds: Sequence[tuple[Any, Any, Callable[[Any], bool]]] = (
        (usage, UsageReport, read_usage),
        (broken, StatusReport, read_status),
    )
    for whole, kind, use in kinds:
        for place, report in lacking(whole):
            try:
                found = read_report(report, kind)
                refused += use(found)
                node = NodeAnswer("gpu-1", found if kind is StatusReport else None)
                msgspec.json.encode(
                    _compose(_Objects(0, (), ()), [node], [other(found)], _WaitingPods())
                )
            except (LookupError, TypeError, ValueError, AttributeError, FieldMissing) as error:
                pytest.fail(f"{kind.__name__} without {place}: {error!r}")
            read += 1
    assert refused > 50
    assert read - refused > 50


def other(found: StatusReport | UsageReport) -> NodeAnswer[UsageReport]:
    """Return the answer beside a status: the usage, or none."""
    return NodeAnswer("gpu-1", found if isinstance(found, UsageReport) else None)


def test_a_newer_report_is_read_with_what_is_known() -> None:
    """Unknown fields are ignored, and a known field with a new type is as one that is missing."""
    gpu = plain_report(complete({"uuid": "GPU-a", "index": 3}, GpuReport))
    newer = {"gpus": [{**gpu, "colour": "red", "shares": [1, 2]}], "weather": {"sun": True}}
    report = decode_report(msgspec.json.encode(newer), StatusReport)
    [read] = report.gpus
    assert (read.uuid, read.index) == ("GPU-a", 3)
    with pytest.raises(FieldMissing, match=r"^its daemon does not report the field shares of Gpu"):
        _ = read.shares
    with pytest.raises(FieldMissing, match="the field poolReason of GpuReport"):
        _ = decode_report(b'{"gpus": [{}]}', StatusReport).gpus[0].pool_reason
    assert plain_report(report) == {"gpus": [{**plain_report(read)}]}

"""Reasons that keep a GPU from serving, as text."""

import pytest

from metagpu.core.model.shares import Recovery
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.daemon import EnforcementReport
from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.core.state.facts import Fact, GpuFaulted, GpuRecovering, GpuUnheard
from metagpu.display.health import format_enforcement, full_health
from tests.rigs.build import offer
from tests.rigs.reported import CORDON, ENDED, FRACTIONS, HELD, SUSPENDED, A, gpu_report


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ((), ["healthy"]),
        ((GpuFaulted(A.id, "XID 79", at=0),), ["XID 79, since 1970-01-01 00:00:00 UTC"]),
        ((CORDON,), ["cordoned: riser, since 1970-01-01 00:01:00 UTC"]),
        (
            (CORDON, SUSPENDED),
            [
                "cordoned: riser, since 1970-01-01 00:01:00 UTC",
                "mps suspended: no daemon, since 1970-01-01 00:02:00 UTC",
            ],
        ),
        (
            (GpuFaulted(A.id, "XID 79", at=0), GpuRecovering(A.id, Recovery(60, 120))),
            [
                (
                    "recovering: its checks have passed since 1970-01-01 00:01:00 UTC, and it "
                    "returns at 1970-01-01 00:02:00 UTC if none fails; it was out of service for: "
                    "XID 79, since 1970-01-01 00:00:00 UTC"
                )
            ],
        ),
        (
            (GpuFaulted(A.id, "XID 95", at=0), GpuRecovering(A.id, Recovery(60))),
            ["XID 95, since 1970-01-01 00:00:00 UTC; waits for an operator: metagpu acknowledge 0"],
        ),
        (
            (GpuUnheard(A.id, "refused", at=0),),
            ["NVML does not report its XIDs: refused, since 1970-01-01 00:00:00 UTC"],
        ),
    ],
    ids=[
        "healthy",
        "faulty",
        "cordoned",
        "suspended too",
        "recovering",
        "waiting",
        "unheard",
    ],
)
def test_each_reason_has_its_line(facts: tuple[Fact, ...], lines: list[str]) -> None:
    """Each reason has its line, with its start time."""
    assert [line.text for line in full_health(read_report(gpu_report(*facts), GpuReport))] == lines


def test_a_cleanup_has_its_line() -> None:
    """A cleanup has the backend, and its beginning in the time of day."""
    report = gpu_report(HELD, ENDED)
    report["cleaning"] = dict.fromkeys(report["cleaning"], "1970-01-01T00:03:00+00:00")
    (line,) = full_health(read_report(report, GpuReport))
    assert line.text == "mps has been cleaning up since 1970-01-01 00:03:00 UTC"


def test_a_waiting_gpu_names_its_pods() -> None:
    """A GPU with a new layout is healthy and names the pods that it waits for."""
    [waiting] = full_health(read_report(gpu_report(HELD, offer(*FRACTIONS)), GpuReport))
    assert "is held by a pod that is being admitted" in waiting.text


def test_enforcement_is_a_line() -> None:
    """Each enforcement action is a line, and no action is no line."""
    assert format_enforcement(None) == ()
    assert format_enforcement(EnforcementReport(0, 0, {"SIGTERM": 0, "SIGKILL": 0}, [])) == []
    assert format_enforcement(EnforcementReport(4, 3, {"SIGTERM": 2, "SIGKILL": 0}, [])) == [
        "memory enforcement since the daemon's start: 3 warnings, 2 SIGTERM sent",
        "memory limits set in the driver: 4",
    ]
    [line] = format_enforcement(EnforcementReport(0, 1, {"SIGTERM": 0, "SIGKILL": 0}, []))
    assert line.endswith(": 1 warning")

"""What NVML reports, in the log; on the bus it is told in `test_health`."""

import anyio
import pytest

from metagpu.core import fault_news
from metagpu.core.bus import Bus
from metagpu.core.config import Health
from metagpu.core.driver import DriverEvent, EccError
from metagpu.core.fault_news import FaultNews
from metagpu.core.judgement import judge_event
from tests.build import gpu
from tests.heard import heard


def log(told: FaultNews, event: DriverEvent) -> None:
    """Log an event as what it means by the rules that hold without a file."""
    told.log(event, judge_event(event, Health()))


async def test_corrected_memory_errors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's first is told at once, those of the next minute with the first one after it."""
    now = 1000.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    told = FaultNews(Bus(), lambda: 7.0)

    with heard(fault_news) as logs:
        for now in (1000.0, 1001.0, 1059.0, 1060.0, 1061.0):  # noqa: B007 - the clock reads it
            log(told, EccError(gpu(0).id, double_bit=False))
        log(told, EccError(gpu(1).id, double_bit=False))

    assert [(entry["gpu"], entry["times"]) for entry in logs] == [
        (gpu(0).id, 1),
        (gpu(0).id, 3),
        (gpu(1).id, 1),
    ]


async def test_what_is_not_corrected_is_told_each_time() -> None:
    """An uncorrected memory error is never only counted."""
    told = FaultNews(Bus(), lambda: 7.0)

    with heard(fault_news) as logs:
        for _ in range(2):
            log(told, EccError(gpu(0).id, double_bit=True))

    assert [entry["event"] for entry in logs] == ["NVML reports"] * 2

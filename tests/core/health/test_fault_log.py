"""NVML events in the log; `test_watch` has those of the event bus."""

import anyio
import pytest

from metagpu.core.config.config import HealthConfig
from metagpu.core.contracts.driver import DriverEvent, EccError
from metagpu.core.health import fault_log as fault_news
from metagpu.core.health.fault_log import FaultLog
from metagpu.core.health.rules import judge_event
from metagpu.core.runtime.event_bus import EventBus
from tests.rigs.build import gpu
from tests.rigs.logs import capture_module_logs


def log(fault_log: FaultLog, event: DriverEvent) -> None:
    """Log an event with its meaning under the default rules."""
    fault_log.log(event, judge_event(event, HealthConfig()))


async def test_corrected_memory_errors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's first is logged at once, those of the next minute with the first one after it."""
    now = 1000.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    fault_log = FaultLog(EventBus(), lambda: 7.0)

    with capture_module_logs(fault_news) as logs:
        for now in (1000.0, 1001.0, 1059.0, 1060.0, 1061.0):  # noqa: B007 - the clock reads it
            log(fault_log, EccError(gpu(0).id, double_bit=False))
        log(fault_log, EccError(gpu(1).id, double_bit=False))

    assert [(entry["gpu"], entry["count"]) for entry in logs] == [
        (gpu(0).id, 1),
        (gpu(0).id, 3),
        (gpu(1).id, 1),
    ]


async def test_each_uncorrected_error_is_logged() -> None:
    """Each uncorrected memory error is logged."""
    fault_log = FaultLog(EventBus(), lambda: 7.0)

    with capture_module_logs(fault_news) as logs:
        for _ in range(2):
            log(fault_log, EccError(gpu(0).id, double_bit=True))

    assert [entry["event"] for entry in logs] == ["nvml event"] * 2

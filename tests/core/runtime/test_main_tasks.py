"""Main tasks that end though the daemon runs."""

import anyio
import pytest

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.runtime import main_tasks
from metagpu.core.runtime.main_tasks import MainTasks, MainTaskTiming
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import skip

WRONG = ConfigReason.INVALID_VALUE


class Task:
    """A task that fails, returns, and then runs."""

    def __init__(self) -> None:
        self.starts = 0
        self.runs = anyio.Event()

    async def run(self) -> None:
        """Fail at the first start, return at the second, run from the third on."""
        self.starts += 1
        if self.starts == 1:
            raise ZeroDivisionError
        if self.starts == 2:
            return
        self.runs.set()
        await anyio.sleep_forever()


async def test_an_ended_task_starts_again_and_is_logged() -> None:
    """A main task that fails, and one that merely returns, is logged and started again."""
    kept, task = MainTasks(MainTaskTiming(first_delay=0.001)), Task()

    with capture_module_logs(main_tasks) as entries:
        async with anyio.create_task_group() as group:
            group.start_soon(kept.keep("leases", task.run))
            await task.runs.wait()
            group.cancel_scope.cancel()

    ends = [(it["task"], it["reason"]) for it in entries if it["event"] == "main task ended"]
    assert ends == [
        ("leases", "ZeroDivisionError: ZeroDivisionError"),
        ("leases", "it returned"),
    ]


async def test_a_problem_stays_until_the_task_is_steady() -> None:
    """An ended task is a problem while it waits, and until it has run for a while again."""
    kept, ended, seen = MainTasks(MainTaskTiming(first_delay=1000)), False, anyio.Event()

    async def ends_once() -> None:
        nonlocal ended
        if not ended:
            ended = True
            return
        seen.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        assert kept.problems == {}
        group.start_soon(kept.keep("offers", ends_once))
        await anyio.wait_all_tasks_blocked()
        assert kept.problems == {"offers": "it returned"}
        skip(1000)
        await seen.wait()
        assert kept.problems == {"offers": "it returned"}
        skip(MainTaskTiming().steady)
        assert kept.problems == {}
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "error", [ConfigError("no", WRONG), ExceptionGroup("", [ConfigError("no", WRONG)])]
)
async def test_an_error_of_ours_ends_the_daemon(error: Exception) -> None:
    """An error that metagpu raises on purpose passes: it is no fault that a restart mends."""

    async def decides() -> None:
        raise error

    with pytest.raises(type(error)):
        await MainTasks().keep("offers", decides)()

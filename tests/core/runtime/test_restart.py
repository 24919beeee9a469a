"""Restarts of tasks that the node can do without."""

import anyio

from metagpu.core.runtime import restart
from metagpu.core.runtime.restart import run_with_restart
from tests.rigs.logs import capture_module_logs


async def test_a_failed_task_starts_again() -> None:
    """A fault of a task is logged by name and the task starts again; a normal end is final."""
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise KeyError("a fault of ours")

    with capture_module_logs(restart) as entries, anyio.fail_after(30):
        await run_with_restart(work, "the weather", delay=0.01)

    assert tries == 3
    assert [(it["event"], it["task"]) for it in entries] == [("task failed", "the weather")] * 2

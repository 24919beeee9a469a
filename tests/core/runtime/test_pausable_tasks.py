"""Tasks that are stopped and started again."""

import anyio
import pytest

from metagpu.core.runtime.pausable_tasks import PausableTasks


async def test_paused_tasks_have_ended_and_start_again() -> None:
    """A pause returns once every task has ended; a resumption starts all again."""
    lines: list[str] = []

    async def work() -> None:
        lines.append("begin")
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            lines.append("end")

    tasks = PausableTasks([work, work])
    async with anyio.create_task_group() as group:
        group.start_soon(tasks.run)
        await anyio.wait_all_tasks_blocked()
        await tasks.pause()
        assert lines == ["begin", "begin", "end", "end"]

        tasks.resume()
        await anyio.wait_all_tasks_blocked()
        assert lines[4:] == ["begin", "begin"]
        group.cancel_scope.cancel()


async def test_failure_of_a_task_is_raised() -> None:
    """A task that fails ends the others, and its error reaches the caller."""

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as raised:
        await PausableTasks([anyio.sleep_forever, fail]).run()

    assert raised.group_contains(ZeroDivisionError)

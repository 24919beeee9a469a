"""Parts of the daemon that it should not outlive."""

import anyio
import pytest

from metagpu.core.parts import Parts


async def test_a_part_that_runs_has_not_ended() -> None:
    """Its end is noted when it comes."""
    parts = Parts()

    async with anyio.create_task_group() as group:
        group.start_soon(parts.noted("leases", anyio.sleep_forever))
        await anyio.wait_all_tasks_blocked()
        assert parts.ended == []
        group.cancel_scope.cancel()
    assert parts.ended == ["leases"]


async def test_an_end_is_noted_however_it_comes() -> None:
    """By itself, or by an error, which goes on its way."""
    parts = Parts()

    async def end() -> None:
        """Do nothing."""

    async def fail() -> None:
        raise ZeroDivisionError

    await parts.noted("one", end)()
    with pytest.raises(ZeroDivisionError):
        await parts.noted("other", fail)()
    assert parts.ended == ["one", "other"]

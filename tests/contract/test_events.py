"""What we rely on in NVML: waiting for events."""

import time

import anyio

from metagpu.core.driver import Driver


async def test_a_quiet_node_lets_the_wait_end(driver: Driver) -> None:
    """When nothing happens the wait takes about a second and gives nothing."""
    async with driver.session():
        await driver.survey()
        began = time.monotonic()
        with anyio.fail_after(30):
            assert not await driver.events()

    assert time.monotonic() - began > 0.5


async def test_waiting_before_a_survey_gives_nothing(driver: Driver) -> None:
    """With nobody to listen to, the wait ends as well, and is not a busy loop."""
    async with driver.session():
        began = time.monotonic()
        assert not await driver.events()

    assert time.monotonic() - began > 0.5


async def test_waiting_keeps_nobody_from_asking(driver: Driver) -> None:
    """Conditions are read while somebody waits for events."""
    waits: list[str] = []

    async def wait() -> None:
        waits.append("begun")
        await driver.events()
        waits.append("ended")

    async with driver.session():
        survey = await driver.survey()
        # A slow machine may need longer than a wait: then once more. It would always be so if the
        # one had to wait for the other.
        for _ in range(20):
            waits.clear()
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await driver.condition(survey.gpus[0].id)
                during = waits == ["begun"]
                group.cancel_scope.cancel()
            if during:
                return
    raise AssertionError


async def test_leaving_takes_no_longer_than_a_wait(driver: Driver) -> None:
    """A session whose waiting is cancelled waits for its end, and can be opened again."""
    async with driver.session():
        await driver.survey()
        with anyio.move_on_after(0.05):
            await driver.events()

    assert not driver.overdue
    async with driver.session():
        assert (await driver.survey()).gpus

"""The NVML contract: waiting for events."""

import time

import anyio

from metagpu.core.contracts.driver import Driver


async def test_a_quiet_node_lets_the_wait_end(driver: Driver) -> None:
    """Without events the wait takes about a second and returns nothing."""
    async with driver.session():
        await driver.survey()
        began = time.monotonic()
        with anyio.fail_after(30):
            assert not await driver.events()

    assert time.monotonic() - began > 0.5


async def test_waiting_before_a_survey_gives_nothing(driver: Driver) -> None:
    """Without registered GPUs the wait ends as well, and is not a busy loop."""
    async with driver.session():
        began = time.monotonic()
        assert not await driver.events()

    assert time.monotonic() - began > 0.5


async def test_waiting_does_not_block_queries(driver: Driver) -> None:
    """Conditions are read during a wait for events."""
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


async def test_every_gpu_is_heard_and_registered_again(driver: Driver) -> None:
    """NVML takes the registration of every GPU, and takes it again with a new event set."""
    async with driver.session():
        await driver.survey()
        assert not driver.unheard
        await driver.renew_events()
        assert not driver.unheard
        assert not await driver.events()


async def test_leaving_takes_no_longer_than_a_wait(driver: Driver) -> None:
    """A session that ends after a cancelled wait waits for it, and can be opened again."""
    async with driver.session():
        await driver.survey()
        with anyio.move_on_after(0.05):
            await driver.events()

    assert not driver.has_threads
    async with driver.session():
        assert (await driver.survey()).gpus

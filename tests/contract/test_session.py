"""The NVML contract: sessions."""

import pytest

from metagpu.core.contracts.driver import Driver
from metagpu.core.errors import DriverError, DriverUnavailable
from metagpu.core.model.gpu import GpuId

NOBODY = GpuId("GPU-00000000-0000-0000-0000-000000000000")


async def test_calls_outside_a_session_are_errors(driver: Driver) -> None:
    """Without a session every call raises DriverUnavailable."""
    for call in (
        driver.survey(),
        driver.condition(NOBODY),
        driver.processes(NOBODY),
        driver.events(),
    ):
        with pytest.raises(DriverUnavailable):
            await call


async def test_sessions_follow_one_another(driver: Driver) -> None:
    """A session may be opened again after it was closed, and sees the same GPUs."""
    async with driver.session():
        first = await driver.survey()
    async with driver.session():
        second = await driver.survey()

    assert first == second


async def test_an_unknown_gpu_is_an_error(driver: Driver) -> None:
    """A uuid that no survey found is a DriverError that names it, and no lost GPU."""
    async with driver.session():
        await driver.survey()
        with pytest.raises(DriverError, match=NOBODY) as caught:
            await driver.condition(NOBODY)

    assert type(caught.value) is DriverError


async def test_an_error_inside_ends_the_session(driver: Driver) -> None:
    """An error inside a session goes through, and the session is closed."""
    with pytest.raises(ZeroDivisionError):
        async with driver.session():
            raise ZeroDivisionError

    with pytest.raises(DriverUnavailable):
        await driver.survey()

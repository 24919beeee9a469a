"""The NVML contract: the driver's own limits of memory."""

import pytest

from metagpu.core.contracts.driver import Driver
from metagpu.core.errors import DriverError, DriverUnavailable, GpuLost


async def test_a_limit_for_no_cgroup_is_refused(driver: Driver) -> None:
    """A missing cgroup, or a driver without limits, is an error and changes nothing."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            with pytest.raises(DriverError) as refusal:
                await driver.limit_memory(gpu.id, "/sys/fs/cgroup/metagpu/not/there", 2**30)
            assert not isinstance(refusal.value, DriverUnavailable | GpuLost)
            await driver.condition(gpu.id)

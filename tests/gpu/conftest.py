"""A real GPU, which the tests use as any program may: none of its settings is changed."""

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from metagpu.core.model.gpu import Gpu
from metagpu.nvml.driver import NvmlDriver


class Card(NamedTuple):
    """A real GPU in an open session of NVML."""

    driver: NvmlDriver
    gpu: Gpu


@pytest.fixture
async def card() -> AsyncIterator[Card]:
    """Open a session, and survey; the first GPU that is not in MIG mode is the test's."""
    driver = NvmlDriver()
    async with driver.session():
        gpus = [gpu for gpu in (await driver.survey()).gpus if not gpu.mig_enabled]
        if not gpus:
            pytest.skip("every GPU of this machine is in MIG mode: its settings stay as they are")
        yield Card(driver, gpus[0])

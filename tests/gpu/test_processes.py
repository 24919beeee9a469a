"""Processes of a real GPU: their memory and their utilization."""

import anyio
import pytest

from metagpu.core.model.gpu import MIB
from tests.gpu.conftest import Card
from tests.rigs.cuda import cuda_program
from tests.rigs.waiting import until

pytestmark = pytest.mark.gpu


async def test_a_process_is_listed_with_its_memory(card: Card) -> None:
    """The memory of a process is what it has allocated, and what CUDA keeps beside that."""
    async with cuda_program(card.gpu.id) as program:
        pid = program.process.pid
        [before] = [
            process for process in await card.driver.processes(card.gpu.id) if process.pid == pid
        ]
        assert await program.ask("take 2048") == "ok"
        [after] = [
            process for process in await card.driver.processes(card.gpu.id) if process.pid == pid
        ]

    assert before.memory is not None
    assert after.memory is not None
    assert 0 < before.memory < 1024 * MIB
    assert after.memory - before.memory == 2048 * MIB

    async def is_gone() -> bool:
        return all(process.pid != pid for process in await card.driver.processes(card.gpu.id))

    await until(is_gone)


async def test_a_busy_process_has_utilization_and_an_idle_one_has_none(card: Card) -> None:
    """NVML's samples tell two processes apart, of which only one works."""
    async with (
        cuda_program(card.gpu.id) as busy,
        cuda_program(card.gpu.id) as idle,
        anyio.create_task_group() as group,
    ):
        group.start_soon(busy.ask, "spin 4000")

        async def is_seen() -> bool:
            of = await card.driver.utilization(card.gpu.id)
            assert of is not None
            assert not of.get(idle.process.pid)
            return of.get(busy.process.pid, 0) > 0

        await until(is_seen, 30)

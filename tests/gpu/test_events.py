"""XIDs of a real driver."""

import anyio
import pytest

from metagpu.core.contracts.driver import Xid
from tests.gpu.conftest import Card
from tests.rigs.cuda import cuda_program

pytestmark = pytest.mark.gpu

FAULTS = {13, 31}
"""A program's own: an exception of the engine, a fault of its memory (NVIDIA's table of XIDs)."""


async def next_xid(card: Card) -> Xid:
    """Return the next fault of a program; other XIDs may come with it."""
    with anyio.fail_after(60):
        while True:
            for event in await card.driver.events():
                if isinstance(event, Xid) and event.code in FAULTS:
                    return event


async def test_the_xid_of_a_fault_is_heard_after_each_renewal(card: Card) -> None:
    """A program writes where it may not: NVML reports the GPU, also after a new registration."""
    for _ in range(3):
        async with cuda_program(card.gpu.id) as program:
            assert await program.ask("fault") == "CUDA_ERROR_ILLEGAL_ADDRESS"
            assert (await next_xid(card)).gpu == card.gpu.id
        await card.driver.renew_events()
        assert not card.driver.unheard


async def test_a_fault_of_a_program_leaves_the_gpu_as_it_was(card: Card) -> None:
    """After the fault the GPU needs no recovery, and the next program runs."""
    async with cuda_program(card.gpu.id) as program:
        assert await program.ask("fault") == "CUDA_ERROR_ILLEGAL_ADDRESS"

    assert not (await card.driver.condition(card.gpu.id)).recovery_action
    async with cuda_program(card.gpu.id) as program:
        assert await program.ask("take 64") == "ok"

"""A simulated node with our NVML driver, and ways to make NVML misbehave."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio

from metagpu.core.contracts.driver import Survey
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.session_gpu import TIMING, NvmlTiming
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.rigs.waiting import skip

DEADLINE = 30.0
"""Seconds that a call may take: a busy machine must not fail a test."""


class Rig(NamedTuple):
    """A node, the driver on it, and its first survey."""

    node: SimNode
    nvml: NvmlDriver
    survey: Survey


@asynccontextmanager
async def opened(
    what: str = "a100-40gb:3", deadline: float = DEADLINE, timing: NvmlTiming = TIMING
) -> AsyncIterator[Rig]:
    """Open a session on a simulated node and survey it once."""
    node = build_node(what)
    nvml = NvmlDriver(SimLibrary(node), deadline, timing)

    async with nvml.session():
        yield Rig(node, nvml, await nvml.survey())


def altered_library(node: SimNode, **functions: Callable[..., int]) -> SimLibrary:
    """Build a library on a node, with some of its C functions replaced."""
    library = SimLibrary(node)
    for name, function in functions.items():
        setattr(library, name, function)
    return library


@asynccontextmanager
async def skip_deadlines(nvml: NvmlDriver, *hanging: str) -> AsyncIterator[None]:
    """Skip the deadlines of a block's calls once only these workers have not answered.

    However slow the machine is, no other call is out then whose deadline could pass as well.
    """

    async def hurry() -> None:
        with anyio.fail_after(DEADLINE):
            while out(nvml) != set(hanging) or not inside(nvml).issuperset(hanging):
                await anyio.sleep(0.005)
                await anyio.wait_all_tasks_blocked()
        skip(10 * DEADLINE)

    async with anyio.create_task_group() as group:
        group.start_soon(hurry)
        yield


def inside(nvml: NvmlDriver) -> set[str]:
    """Return the workers whose thread is inside NVML; GPUs without their uuids."""
    if nvml._shared_thread._waiting:  # no thread has begun with these, and they are not idle
        return set()
    session = nvml._session
    workers = [nvml._library_worker, *(nvml._workers(session) if session else ())]
    return {worker.name.partition(" (")[0] for worker in workers if not worker.is_idle}


def out(nvml: NvmlDriver) -> set[str]:
    """Return the workers with a pending call, or one about to begin; GPUs without their uuids."""
    session = nvml._session
    workers = [nvml._library_worker, *(nvml._workers(session) if session else ())]
    return {worker.name.partition(" (")[0] for worker in workers if worker._lock.locked()}

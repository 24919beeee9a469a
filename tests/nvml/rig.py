"""A simulated node with our NVML driver on it, and ways to make NVML odd."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio

from metagpu.core.driver import Survey
from metagpu.nvml import Nvml
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from tests.waiting import skip

DEADLINE = 30.0
"""Seconds that a call may take: a busy machine must not fail a test."""


class Rig(NamedTuple):
    """A node, the driver on it, and its first survey."""

    node: SimNode
    nvml: Nvml
    survey: Survey


@asynccontextmanager
async def opened(what: str = "a100-40gb:3", deadline: float = DEADLINE) -> AsyncIterator[Rig]:
    """Open a session on a simulated node and look around once."""
    node = simulated(what)
    nvml = Nvml(Library(node), deadline)

    async with nvml.session():
        yield Rig(node, nvml, await nvml.survey())


def altered(node: SimNode, **functions: Callable[..., int]) -> Library:
    """Make a library on a node, some of whose C functions are other ones."""
    library = Library(node)
    for name, function in functions.items():
        setattr(library, name, function)
    return library


@asynccontextmanager
async def hurried(nvml: Nvml, *hanging: str) -> AsyncIterator[None]:
    """Let the deadlines of a block's calls pass as soon as only these lanes have not answered.

    However slow the machine is, nobody else is out then whose deadline could pass as well.
    """

    async def hurry() -> None:
        with anyio.fail_after(DEADLINE):
            while out(nvml) != set(hanging):
                await anyio.sleep(0.005)
                await anyio.wait_all_tasks_blocked()
        skip(10 * DEADLINE)

    async with anyio.create_task_group() as group:
        group.start_soon(hurry)
        yield


def out(nvml: Nvml) -> set[str]:
    """Name the lanes that somebody waits for, or is about to, GPUs without their uuids."""
    session = nvml._session
    lanes = [nvml._whole, *(nvml._lanes(session) if session else ())]
    return {lane.name.partition(" (")[0] for lane in lanes if lane._limiter.borrowed_tokens}

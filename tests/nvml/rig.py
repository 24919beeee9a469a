"""A simulated node with our NVML driver on it, and ways to make NVML odd."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from metagpu.core.driver import Survey
from metagpu.nvml import Nvml
from metagpu.sim.library import Library
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated

DEADLINE = 5.0
"""Seconds that a call may take where nothing hangs: a busy machine must not fail a test."""
SHORT = 0.5
"""Seconds that a call may take where something hangs on purpose."""


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

"""Lets backends keep their GPUs as they need them, for as long as the layout says so."""

from dataclasses import dataclass, field

import anyio
import structlog
from anyio.abc import TaskGroup

from metagpu.core.layout import Cut, Layout
from metagpu.core.tools import Tools

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Kept:
    """A `Backend.serve` that was begun, be it over or not."""

    cut: Cut
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class Keeper:
    """Runs `Backend.serve` for every GPU and backend of the layout that is in force."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._cuts: tuple[Cut, ...] = ()
        self._changed = anyio.Event()

    def keep(self, layout: Layout) -> None:
        """Let this layout be in force; returns at once."""
        self._cuts = layout.cuts
        self._changed.set()

    async def run(self) -> None:
        """Follow the layout until cancelled; what was begun has ended when this returns."""
        kept: list[_Kept] = []

        async with anyio.create_task_group() as group:
            while True:
                self._changed = anyio.Event()
                kept = await self._follow(kept, group)
                await self._changed.wait()

    async def _follow(self, kept: list[_Kept], group: TaskGroup) -> list[_Kept]:
        cuts = self._cuts
        staying = [it for it in kept if any(_same(it.cut, cut) for cut in cuts)]
        leaving = [it for it in kept if it not in staying]

        for it in leaving:
            it.scope.cancel()
        for it in leaving:
            await it.ended.wait()  # two of them would pull at one GPU

        new = [_Kept(cut) for cut in cuts if not any(_same(it.cut, cut) for it in staying)]
        for it in new:
            group.start_soon(self._serve, it)
        return [*staying, *new]

    async def _serve(self, it: _Kept) -> None:
        try:
            with it.scope:
                await it.cut.backend.serve(it.cut.gpu, self._tools)
        except Exception:
            log.exception("a backend failed to keep its GPU", gpu=str(it.cut.gpu))
        finally:
            it.ended.set()


def _same(one: Cut, other: Cut) -> bool:
    return one.gpu.id == other.gpu.id and one.options == other.options

"""Programs of the host that are written down instead of run."""

from dataclasses import dataclass, field

import anyio

from metagpu.core.errors import ToolError


@dataclass
class RecordedTools:
    """Notes every command.

    Attributes:
        calls: the commands so far, as one would type them.
        refusal: raised for every command, when given.
        refuses: how many commands it is raised for; all unless given.
        hold: once set, commands do not come back; what is cancelled stays noted.
    """

    calls: list[str] = field(default_factory=list)
    refusal: ToolError | None = None
    refuses: int | None = None
    hold: bool = False
    _more: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, program: str, *arguments: str) -> str:
        """Note a command."""
        self.calls.append(" ".join([program, *arguments]))
        self._more.set()
        self._more = anyio.Event()
        if self.hold:
            await anyio.sleep_forever()
        if self.refusal is not None and (self.refuses is None or len(self.calls) <= self.refuses):
            raise self.refusal
        return ""

    async def until(self, count: int) -> None:
        """Wait until there were so many commands."""
        with anyio.fail_after(30):
            while len(self.calls) < count:
                await self._more.wait()

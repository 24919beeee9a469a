"""The contract of companions: programs of the host that run for long and outlive the daemon."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec


class Companion(msgspec.Struct, frozen=True):
    """A program that runs for long, and how it is told from every other.

    Attributes:
        program: its name, as `core.tools.Tools` knows programs.
        arguments: the end of its command line.
        env: what is added to the environment; no other program is started with all of it.
        output: the file that has what it printed, since it was started last.
        mounts: folders of the host, by the folders in whose place it sees them.
    """

    program: str
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    output: Path
    mounts: Mapping[Path, Path] = msgspec.field(default_factory=dict)


class Process(msgspec.Struct, frozen=True):
    """One process for good: its number may be given away again, but not with its start time.

    Attributes:
        started: clock ticks from the machine's start to its own.
    """

    pid: int
    started: int


class Companions(Protocol):
    """Starts companions, finds them again after a restart, and speaks to them."""

    async def start(self, companion: Companion) -> Process:
        """Start it in a session of its own, where no signal meant for us reaches it.

        Raises:
            ToolMissing: if there is no such program here; says where it was looked for.
            ToolError: if it could not be started; says what was printed last.
        """
        ...

    async def find(self, companion: Companion, pid: int) -> Process | None:
        """Tell whether the process of this number runs and was started as this companion."""
        ...

    async def ask(self, companion: Companion, words: str, deadline: float) -> str:
        """Run the same program, which then speaks to its companion; give what it printed.

        Raises:
            ToolMissing: as in `start`.
            ToolError: if it failed or did not end within `deadline` seconds.
        """
        ...

    async def last_words(self, companion: Companion) -> str:
        """Read the last line that it printed; says so if there is none."""
        ...

    async def ended(self, process: Process) -> None:
        """Wait until a process has ended."""
        ...

    async def kill(self, process: Process) -> None:
        """End this process without asking it, and no other; returns when it is gone.

        Raises:
            ToolError: if it is still there after some seconds, or may not be ended by us.
        """
        ...

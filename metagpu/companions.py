"""Companions on this host: started apart from us, found again by their environment."""

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.companions import Companion, Process
from metagpu.core.errors import ToolError
from metagpu.host import running
from metagpu.tools import HostTools

KILL_DEADLINE: Final = 5.0
"""Seconds until a process that was killed has to be gone; one that hangs in a driver is not."""

_DETACHED: Final = 'output=$1; shift; "$@" </dev/null >"$output" 2>&1 & echo $!'
"""For `sh -c`: leave a program behind and tell its number. What is in its place keeps the number:
`unshare` and the inner `sh` are replaced by what they start.
"""
_SEES: Final = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
"""For `sh -c` in a mount namespace of its own: show one folder in the place of another."""


class HostCompanions(msgspec.Struct, frozen=True):
    """Starts companions among the host's programs (see `core.companions.Companions`).

    Attributes:
        mounts: whether they get the mounts they ask for, which takes the right to mount; a
            stand-in does without.
        proc: where it is read in whose container a process runs.
    """

    tools: HostTools
    mounts: bool = True
    proc: Path = Path("/proc")

    async def start(self, companion: Companion) -> Process:
        """Start a program that stays when we go.

        Raises:
            ToolMissing: if it, or a program that it takes to start it, is nowhere.
            ToolError: if it could not be started, or has ended already.
        """
        command, own = await self.tools.command(companion.program, *companion.arguments)
        path = _beside(Path(command[0]))
        if self.mounts:
            for place, folder in companion.mounts.items():
                command = ["sh", "-c", _SEES, "sh", str(folder), str(place), *command]
            if companion.mounts:
                unshare, _ = await self.tools.command("unshare")
                command = [*unshare, "--mount", "--propagation", "private", "--", *command]

        printed = await self.tools.ask(
            "sh",
            *("-c", _DETACHED, "sh", str(companion.output), *command),
            env={**own, "PATH": path, **companion.env},
            apart=True,
        )
        found = await to_thread.run_sync(running.read, int(printed))
        if found is None:
            words = await self.last_words(companion)
            raise ToolError(f"`{companion.program}` ended at once: {words}")
        return found.process

    async def find(self, companion: Companion, pid: int) -> Process | None:
        """Look whether a process was started as this companion, by no pod to look like it."""
        if await to_thread.run_sync(running.is_elsewhere, pid, self.proc):
            return None
        found = await to_thread.run_sync(running.read, pid)
        if found is None or not {f"{k}={v}" for k, v in companion.env.items()} <= found.env:
            return None

        # What a companion starts has its environment too, and other arguments.
        program, *arguments = (await self.tools.command(companion.program, *companion.arguments))[0]
        cut = len(found.arguments) - len(arguments)
        names = {Path(argument).name for argument in found.arguments[: max(0, cut)]}
        same = Path(program).name in names and list(found.arguments[cut:]) == arguments
        return found.process if same else None

    async def ask(self, companion: Companion, words: str, deadline: float) -> str:
        """Run the program that speaks to the companion.

        Raises:
            ToolMissing: if it is nowhere.
            ToolError: if it failed or did not end in time.
        """
        return await self.tools.ask(
            companion.program, words=words, env=companion.env, deadline=deadline
        )

    async def last_words(self, companion: Companion) -> str:
        """Read the last line of its output."""
        try:
            text = await anyio.Path(companion.output).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"{companion.output} cannot be read: {error.strerror}"
        return next(iter(text.strip().splitlines()[-1:]), "it printed nothing")

    async def ended(self, process: Process) -> None:
        """Wait until a process has ended."""
        async with AsyncExitStack() as stack:
            descriptor = await to_thread.run_sync(running.opened, process)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                await anyio.wait_readable(descriptor)
        await to_thread.run_sync(running.buried, process)

    async def kill(self, process: Process) -> None:
        """Kill a process through a descriptor that was verified to be its own.

        Raises:
            ToolError: if it is still there after some seconds, or we may not.
        """
        descriptor = await to_thread.run_sync(running.opened, process)
        if descriptor is None:
            return

        try:
            running.kill(descriptor)
            with anyio.fail_after(KILL_DEADLINE):
                await anyio.wait_readable(descriptor)
        except TimeoutError:
            raise ToolError(
                f"process {process.pid} was killed and is still there after {KILL_DEADLINE:g} s"
            ) from None
        except OSError as error:
            raise ToolError(f"process {process.pid} cannot be killed: {error.strerror}") from error
        finally:
            os.close(descriptor)
        await to_thread.run_sync(running.buried, process)


def _beside(program: Path) -> str:
    """Let a program find those that stand beside it, before the others."""
    return os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])

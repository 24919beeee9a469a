"""The programs of the host: the only place that starts any."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.errors import ToolError, ToolMissing

DEADLINE: Final = 10.0
"""Seconds for one run: nvidia-smi takes one or two where nobody keeps the driver loaded."""
DRIVER_ROOT: Final = Path("/run/nvidia/driver")
"""Where NVIDIA's gpu-operator shows the file system of its driver container."""

_PROGRAMS: Final = ("usr/bin", "bin", "usr/local/bin", "usr/local/nvidia/bin")
_LIBRARIES: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "lib64",
)
_NVML: Final = "libnvidia-ml.so.1"


class HostTools(msgspec.Struct, frozen=True):
    """Runs what stands in PATH, or else below one of `roots` with the driver library found there.

    Attributes:
        roots: file systems of the host or of a driver container, as seen from here.
        deadline: seconds after which a program is killed.
        instead: commands that stand in for programs of these names.
    """

    roots: tuple[Path, ...] = (DRIVER_ROOT,)
    deadline: float = DEADLINE
    instead: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict)

    async def run(self, program: str, *arguments: str) -> str:
        """Run a program to its end (see `core.tools.Tools`).

        Raises:
            ToolMissing: if it is nowhere.
            ToolError: if it failed or did not end in time.
        """
        return await self.ask(program, *arguments)

    async def ask(
        self,
        program: str,
        *arguments: str,
        words: str = "",
        env: Mapping[str, str] | None = None,
        deadline: float | None = None,
        apart: bool = False,
    ) -> str:
        """Run a program to its end, with words on its input and more in its environment.

        `apart` gives it a session of its own: what it leaves behind hears no signal of ours.

        Raises:
            ToolMissing: if it is nowhere.
            ToolError: if it failed or did not end in time.
        """
        command, own = await self.command(program, *arguments)
        limit = self.deadline if deadline is None else deadline
        said = await to_thread.run_sync(_spoken, words) if words else DEVNULL

        try:
            with anyio.fail_after(limit):
                done = await anyio.run_process(
                    command,
                    stdin=said,
                    stderr=STDOUT,
                    check=False,
                    env={**own, **(env or {})},
                    start_new_session=apart,
                )
        except TimeoutError:
            raise _failed(command, words, f"did not end within {limit:g} s") from None
        except OSError as error:
            raise _failed(command, words, f"could not be started: {error.strerror}") from error
        finally:
            if said != DEVNULL:
                os.close(said)

        printed = done.stdout.decode(errors="replace").strip()
        if done.returncode:
            last = printed.splitlines()[-1:] or ["it printed nothing"]
            raise _failed(command, words, f"failed with status {done.returncode}: {last[0]}")
        return printed

    async def command(self, program: str, *arguments: str) -> tuple[list[str], Mapping[str, str]]:
        """Find a program; give the command that starts it and the environment that it needs.

        Raises:
            ToolMissing: if it is nowhere.
        """
        if program in self.instead:
            return [*self.instead[program], *arguments], os.environ
        path, env = await to_thread.run_sync(self._find, program)
        return [str(path), *arguments], env

    def _find(self, program: str) -> tuple[Path, Mapping[str, str]]:
        if found := shutil.which(program):
            return Path(found), os.environ

        for root in self.roots:
            for path in (root / folder / program for folder in _PROGRAMS):
                if os.access(path, os.X_OK) and path.is_file():
                    return path, _with_libraries(root)

        places = ["PATH", *(f"{root}/{folder}" for root in self.roots for folder in _PROGRAMS)]
        raise ToolMissing(f"there is no {program} here; looked in {', '.join(places)}")


def _with_libraries(root: Path) -> Mapping[str, str]:
    """Let a program of another file system find the driver's library there, and only that."""
    folders = [str(root / folder) for folder in _LIBRARIES if (root / folder / _NVML).exists()]
    paths = [*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)} if folders else os.environ


def _spoken(words: str) -> int:
    """Put words into a pipe and give its end: a program may end without having read them."""
    heard, spoken = os.pipe()
    try:
        os.write(spoken, words.encode())  # a few words fit in any pipe
    finally:
        os.close(spoken)
    return heard


def _failed(command: Sequence[str], words: str, problem: str) -> ToolError:
    told = (
        f"{shlex.join(command)} <<< {shlex.quote(words.strip())}" if words else shlex.join(command)
    )
    return ToolError(f"`{told}` {problem}")

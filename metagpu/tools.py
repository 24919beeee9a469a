"""The programs of the host: the only place that starts any."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Final

import anyio
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


@dataclass(frozen=True, slots=True)
class HostTools:
    """Runs what stands in PATH, or else below one of `roots` with the driver library found there.

    Attributes:
        roots: file systems of the host or of a driver container, as seen from here.
        deadline: seconds after which a program is killed.
    """

    roots: tuple[Path, ...] = (DRIVER_ROOT,)
    deadline: float = DEADLINE

    async def run(self, program: str, *arguments: str) -> str:
        """Run a program to its end (see `core.tools.Tools`).

        Raises:
            ToolMissing: if it is nowhere.
            ToolError: if it failed or did not end in time.
        """
        path, env = await to_thread.run_sync(self._find, program)
        command = [str(path), *arguments]

        try:
            with anyio.fail_after(self.deadline):
                done = await anyio.run_process(
                    command, stdin=DEVNULL, stderr=STDOUT, check=False, env=env
                )
        except TimeoutError:
            raise _failed(command, f"did not end within {self.deadline:g} s") from None
        except OSError as error:
            raise _failed(command, f"could not be started: {error.strerror}") from error

        printed = done.stdout.decode(errors="replace").strip()
        if done.returncode:
            last = printed.splitlines()[-1:] or ["it printed nothing"]
            raise _failed(command, f"failed with status {done.returncode}: {last[0]}")
        return printed

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


def _failed(command: Sequence[str], problem: str) -> ToolError:
    return ToolError(f"`{shlex.join(command)}` {problem}")

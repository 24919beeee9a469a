"""Contracts of host programs, users' commands, children, and daemons.

A daemon is a host program that runs for long and outlives this agent.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec


class Programs(Protocol):
    """Runs programs of the host to their end."""

    async def run(self, program: str, *arguments: str) -> str:
        """Run a program by its name, such as `nvidia-smi`; return its output.

        Raises:
            ProgramMissing: the host has no such program; the message lists the folders searched.
            ProgramError: the program failed or exceeded its deadline; the message has the last
                line of its output.
        """
        ...


class CommandResult(msgspec.Struct, frozen=True):
    """The exit status and the output of a command that has ended."""

    status: int
    stdout: bytes
    stderr: bytes


class RunCommand(Protocol):
    """Runs a command that a configuration names, such as `exec` of a kubeconfig."""

    async def __call__(
        self, command: Sequence[str], *, env: Mapping[str, str], deadline: float
    ) -> CommandResult:
        """Run a command with exactly this environment and an empty standard input.

        At the deadline, in seconds, or at cancellation, the command ends with all that it started.

        Raises:
            TimeoutError: the command did not end within the deadline. It is an OSError too.
            OSError: the command cannot be started.
        """
        ...


class RunChild(Protocol):
    """Runs a command as a child of this process, for as long as it is of use."""

    def __call__(
        self, command: Sequence[str], *, stdin: int
    ) -> AbstractAsyncContextManager[object]:
        """Run a command while the block lasts, and kill it at the end.

        Its standard input is the descriptor `stdin`; it has no output, and its errors are this
        process's. It is in a session of its own, which no signal of a terminal reaches.

        Raises:
            OSError: the command cannot be started.
        """
        ...


class DaemonSpec(msgspec.Struct, frozen=True):
    """A long-running program, and what identifies its process.

    Attributes:
        program: its name, as `core.contracts.programs.Programs` knows programs.
        arguments: the end of its command line.
        env: additions to the environment; no other program is started with all of them.
        output: the file with its output since its last start, or the end of it.
        pid_file: the file with its process number, in a folder that no container sees.
        lock: the file that the program locks while it runs. Containers may write to its folder,
            which is emptied before each start.
        mounts: folders of the host, by the folders in whose place the program sees them.
        volumes: folders that containers may write to, each a tmpfs with so many bytes.
        cgroup: the daemon's cgroup, below the host's root cgroup; empty leaves it where it starts.
    """

    program: str
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    output: Path
    pid_file: Path
    lock: Path
    mounts: Mapping[Path, Path] = msgspec.field(default_factory=dict)
    volumes: Mapping[Path, int] = msgspec.field(default_factory=dict)
    cgroup: str = ""


class DaemonProcess(msgspec.Struct, frozen=True):
    """One process for good: the kernel reuses a pid, but not with the same start time.

    Attributes:
        started: clock ticks from the boot to the start of the process.
    """

    pid: int
    started: int


class Daemons(Protocol):
    """The daemons of the host; the agent finds them again after its restart."""

    async def start(self, daemon: DaemonSpec) -> DaemonProcess:
        """Start a daemon in a session of its own, with its volumes mounted.

        No signal to this agent reaches the daemon.

        Raises:
            ProgramMissing: if the host has no such program; says where it was looked for.
            ProgramError: if a volume cannot be mounted, or the daemon could not be started; has the
                end of its output.
        """
        ...

    async def find(self, daemon: DaemonSpec) -> DaemonProcess | None:
        """Return the process that runs as this daemon, whichever agent started it."""
        ...

    async def empty(self, folder: Path) -> None:
        """Remove the content of a folder that containers may write to.

        Raises:
            ProgramError: if the folder cannot be emptied.
        """
        ...

    async def unmount(self, daemon: DaemonSpec) -> None:
        """Unmount the volumes of a daemon that has ended, with their content.

        Raises:
            ProgramError: if one cannot be unmounted.
        """
        ...

    async def send_command(self, daemon: DaemonSpec, words: str, deadline: float) -> str:
        """Run the daemon's program once more, as its client; return the output.

        Raises:
            ProgramMissing: as in `start`.
            ProgramError: if the command failed or did not end within `deadline` seconds.
        """
        ...

    async def limit_output(self, daemon: DaemonSpec) -> None:
        """Discard the output of a running daemon if it has become long."""
        ...

    async def last_output_line(self, daemon: DaemonSpec) -> str:
        """Return the last line of the daemon's output; says so if there is none."""
        ...

    async def wait_ended(self, process: DaemonProcess) -> None:
        """Wait until a process has ended."""
        ...

    async def kill(self, process: DaemonProcess) -> None:
        """Kill this process, and no other; return when the process is gone.

        Raises:
            ProgramError: if the process is still there after some seconds, or the kernel refuses.
        """
        ...

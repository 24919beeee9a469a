"""Contracts of host programs, of commands that users configure, and of children."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
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

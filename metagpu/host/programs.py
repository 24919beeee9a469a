"""Host programs: the only module that starts programs."""

import os
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from subprocess import DEVNULL, STDOUT
from typing import Final

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import ByteReceiveStream, Process

from metagpu.core.contracts.programs import CommandResult
from metagpu.core.errors import ProgramError, ProgramMissing
from metagpu.host.driver_roots import PROGRAMS, TOOLKIT, follow_links, library_folders

DEADLINE: Final = 10.0
"""Seconds for one run: nvidia-smi takes one or two without persistence mode."""
LONGEST_OUTPUT: Final = 1 << 20
"""Bytes of a program's output that are kept; it may print what a container made it print."""
_DRAIN: Final = 1.0
"""Seconds for the pipes of a command that was ended; what it left behind may hold them open."""


class HostPrograms(msgspec.Struct, frozen=True):
    """Runs programs of PATH, or of one of `roots` with the driver library there.

    Attributes:
        roots: file systems of the host or of a driver container, as paths of this process.
        deadline: seconds after which a program is killed.
        substitutes: commands that stand in for programs of these names.
        links: a folder for links to the driver's libraries, of roots whose folders have the
            system's libraries too.
    """

    roots: tuple[Path, ...] = ()
    deadline: float = DEADLINE
    substitutes: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict)
    links: Path | None = None

    async def run(self, program: str, *arguments: str) -> str:
        """Run a program to its end (see `core.contracts.programs.Programs`).

        Raises:
            ProgramMissing: the host has no such program.
            ProgramError: the program failed or did not end in time.
        """
        return await self.run_with_input(program, *arguments)

    async def run_with_input(
        self,
        program: str,
        *arguments: str,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        deadline: float | None = None,
        new_session: bool = False,
    ) -> str:
        """Run a program to its end; return its output.

        Args:
            program: its name.
            arguments: of its command line.
            stdin: text for its standard input.
            env: additions to its environment.
            deadline: seconds; `self.deadline` by default.
            new_session: whether it gets a session of its own, so that no signal for this process
                reaches the processes that it leaves behind.

        Raises:
            ProgramMissing: the host has no such program.
            ProgramError: the program failed or did not end in time.
        """
        command, own = await self.resolve(program, *arguments)
        limit = self.deadline if deadline is None else deadline
        source = await to_thread.run_sync(_pipe, stdin) if stdin else DEVNULL

        try:
            with anyio.fail_after(limit):
                status, output = await _run_to_end(
                    command, source, {**own, **(env or {})}, new_session=new_session
                )
        except TimeoutError:
            raise _program_error(command, stdin, f"did not end within {limit:g} s") from None
        except OSError as error:
            raise _program_error(
                command, stdin, f"could not be started: {error.strerror}"
            ) from error
        finally:
            if source != DEVNULL:
                os.close(source)

        printed = output.decode(errors="replace").strip()
        if status:
            last = printed.splitlines()[-1:] or ["it printed nothing"]
            raise _program_error(command, stdin, f"failed with status {status}: {last[0]}")
        return printed

    async def resolve(self, program: str, *arguments: str) -> tuple[list[str], Mapping[str, str]]:
        """Find a program; return the command that starts it, and its environment.

        Raises:
            ProgramMissing: the host has no such program.
        """
        if program in self.substitutes:
            return [*self.substitutes[program], *arguments], os.environ
        path, env = await to_thread.run_sync(self._find, program)
        return [str(path), *arguments], env

    def _find(self, program: str) -> tuple[Path, Mapping[str, str]]:
        if found := shutil.which(program):
            return Path(found), os.environ

        for root in self.roots:
            for path in _possible_paths(root, program):
                if os.access(path, os.X_OK) and path.is_file():
                    return path, _with_libraries(root, self.links)

        searched = ["PATH", *(str(root / folder) for root in self.roots for folder in PROGRAMS)]
        raise ProgramMissing(f"there is no {program} here; looked in {', '.join(searched)}")


async def run_command(
    command: Sequence[str], *, env: Mapping[str, str], deadline: float
) -> CommandResult:
    """Run a command in a session of its own, and end all of it at the deadline.

    This is a `core.contracts.programs.RunCommand`.

    Raises:
        TimeoutError: the command did not end within the deadline. It is an OSError too.
        OSError: the command cannot be started.
    """
    # A start that is cancelled half way would leave the process and its pipes to nobody.
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(command, env=env, start_new_session=True)

    stdout, stderr = bytearray(), bytearray()
    try:
        with anyio.fail_after(deadline):
            if process.stdin is not None:
                await process.stdin.aclose()
            async with anyio.create_task_group() as group:
                group.start_soon(_drain, process.stdout, stdout)
                group.start_soon(_drain, process.stderr, stderr)
            status = await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, SIGKILL)
        # The event loop closes a pipe where it ends, and nowhere else.
        with anyio.move_on_after(_DRAIN, shield=True):
            await _drain(process.stdout, stdout)
            await _drain(process.stderr, stderr)
        await _close(process)
    return CommandResult(status, bytes(stdout), bytes(stderr))


async def _run_to_end(
    command: Sequence[str], source: int, env: Mapping[str, str], *, new_session: bool
) -> tuple[int, bytes]:
    """Run a program; return its status and its output. A cancelled one is killed."""
    output = bytearray()
    process = await anyio.open_process(
        command, stdin=source, stderr=STDOUT, env=env, start_new_session=new_session
    )
    try:
        await _drain(process.stdout, output)
        status = await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await _close(process)
    return status, bytes(output)


@asynccontextmanager
async def run_child(command: Sequence[str], *, stdin: int) -> AsyncIterator[Process]:
    """Run a command while the block lasts, and kill it at the end.

    This is a `core.contracts.programs.RunChild`. A child keeps its pid until it is waited for, so
    the signal reaches no other process. A child that the kernel cannot end yet is left behind.

    Raises:
        OSError: the command cannot be started.
    """
    # As in `run_command`: a start that is cancelled half way would leave the process to nobody.
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(
            command, stdin=stdin, stdout=DEVNULL, stderr=None, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        with anyio.move_on_after(_DRAIN, shield=True):
            await process.wait()


async def _close(process: Process) -> None:
    """Close the pipes of a process, and wait a moment for its end.

    A process that the kernel cannot end yet, such as one that waits for the driver, is left behind;
    `Process.aclose` would wait for it, and no deadline would help.
    """
    with anyio.move_on_after(_DRAIN, shield=True):
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                await stream.aclose()
        await process.wait()


async def _drain(stream: ByteReceiveStream | None, into: bytearray) -> None:
    """Read a stream to its end; keep `LONGEST_OUTPUT` bytes of it."""
    if stream is not None:
        async for part in stream:
            into += part[: LONGEST_OUTPUT - len(into)]


def _possible_paths(root: Path, program: str) -> Iterator[Path]:
    # The toolkit's own name is a script, which names the host's paths; the program is beside it.
    yield follow_links(root, f"{TOOLKIT}/{program}.real")
    yield from (follow_links(root, f"{folder}/{program}") for folder in PROGRAMS)


def _with_libraries(root: Path, links: Path | None) -> Mapping[str, str]:
    """Return an environment in which another root's program finds the driver."""
    folders: Sequence[Path] = library_folders(root)
    if any((folder / "libc.so.6").exists() for folder in folders):
        # Another system's C library beside our own linker ends the program at once.
        folders = (
            [_linked(folders, links / str(root).strip("/").replace("/", "-"))] if links else []
        )
    if not folders:
        return os.environ
    paths = [*map(str, folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _linked(folders: Sequence[Path], into: Path) -> Path:
    """Link the driver's libraries into a folder; return it."""
    into.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for pattern in ("libcuda*.so*", "libnv*.so*"):
            for library in folder.glob(pattern):
                with suppress(FileExistsError):
                    (into / library.name).symlink_to(library)
    return into


def _pipe(text: str) -> int:
    """Write text into a pipe; return its reading end, which may stay unread."""
    reader, writer = os.pipe()
    try:
        os.write(writer, text.encode())  # a few words fit in any pipe
    finally:
        os.close(writer)
    return reader


def _program_error(command: Sequence[str], stdin: str, problem: str) -> ProgramError:
    line = shlex.join(command)
    if stdin:
        line += f" <<< {shlex.quote(stdin.strip())}"
    return ProgramError(f"`{line}` {problem}")

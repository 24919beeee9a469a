"""Long-running host processes: started on the host, found by their environment.

Containers may write to their folders, which are never read, emptied and bounded.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.contracts.programs import DaemonProcess, DaemonSpec
from metagpu.core.errors import ProgramError
from metagpu.host import processes
from metagpu.host.driver_roots import LIBRARIES, PROGRAMS
from metagpu.host.programs import HostPrograms

EMPTY_DEADLINE: Final = 30.0
"""Seconds to empty a folder: a container may write into it faster than it is emptied."""
_BATCH: Final = 1024
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty(folder: Path) -> None:
    """Remove the content of a folder; a link is removed, and not followed.

    A container may leave a tree of any depth: folders move up before they are removed, so that
    neither paths nor calls get deep.

    Raises:
        ProgramError: something in the folder cannot be removed, or more is written all the time.
    """
    deadline = time.monotonic() + EMPTY_DEADLINE
    try:
        top = os.open(folder, _FOLDER)
        try:
            while names := _names(top):
                for name in names:
                    # A container may remove or exchange an entry meanwhile.
                    with suppress(FileNotFoundError, NotADirectoryError):
                        _remove(name, top)
                if time.monotonic() > deadline:
                    raise ProgramError(
                        f"{folder} cannot be emptied in {EMPTY_DEADLINE:g} s: a container writes "
                        "into it all the time; end the containers that use it"
                    )
        finally:
            os.close(top)
    except OSError as error:
        # Another user may have left a folder with the sticky bit.
        needed = "; metagpu needs the capability FOWNER" if error.errno == errno.EPERM else ""
        raise ProgramError(f"{folder} cannot be emptied: {error.strerror}{needed}") from error


def is_mounted(folder: Path) -> bool:
    """Return whether something is mounted at a folder, which may be missing."""
    return os.path.ismount(folder)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _BATCH)]


def _remove(name: str, top: int) -> None:
    """Remove one entry; a folder's folders move to the top, and are removed later."""
    if _unlink(name, top):
        return
    inner = os.open(name, _FOLDER, dir_fd=top)
    try:
        for child in _names(inner):
            if not _unlink(child, inner):
                os.rename(child, token_hex(), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    try:
        os.rmdir(name, dir_fd=top)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # it had more than one batch, or has something new
            raise


def _unlink(name: str, folder: int) -> bool:
    """Remove an entry that is no folder; return whether it is gone."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


KILL_DEADLINE: Final = 5.0
"""Seconds for the end of a killed process; a process that hangs in a driver does not end."""

LONGEST_OUTPUT: Final = 4 << 20
"""Bytes of a daemon's output that are kept: it writes lines about each command and each client."""
_LAST_OUTPUT: Final = 4096
_LAUNCHER: Final = str(Path(__file__).with_name("daemon_launcher.py"))


class HostDaemons(msgspec.Struct, frozen=True):
    """Starts and finds daemons on this host (see `core.contracts.daemons.Daemons`).

    Attributes:
        programs: finds and runs the daemons' programs.
        on_host: whether daemons run in the host's file system, with their mounts and a cgroup of
            their own, which needs rights; simulated daemons run where this process does.
        roots: the driver's roots, as paths of the host; `None` for those of `programs`.
        proc: the /proc that shows the containers of processes.
        host_process: a process in the host's namespaces.
    """

    programs: HostPrograms
    on_host: bool = True
    roots: Sequence[str] | None = None
    proc: Path = Path("/proc")
    host_process: int = 1

    async def start(self, daemon: DaemonSpec) -> DaemonProcess:
        """Start a daemon, which outlives this process.

        Raises:
            ProgramMissing: the daemon's program, or one that starts it, is missing.
            ProgramError: a volume cannot be mounted or emptied, another process has the daemon's
                lock, or the daemon could not be started, or ended at once.
        """
        # Also for a daemon on the host, which the launcher finds again: its commands start here.
        command, _ = await self.programs.resolve(daemon.program, *daemon.arguments)
        await self._refuse_second(daemon)
        if daemon.volumes and self.on_host:
            await self._mount(daemon)
        await self.empty(daemon.lock.parent)

        if self.on_host:
            command = [daemon.program, *daemon.arguments]
        env = daemon.env if self.on_host else {**os.environ, **daemon.env}
        pid = int(await self._launch("start", daemon, command=command, env=env))
        await to_thread.run_sync(processes.write_pid, daemon.pid_file, pid)
        found = await to_thread.run_sync(processes.read_process, pid)
        if found is None:
            words = await self.last_output_line(daemon)
            raise ProgramError(f"`{daemon.program}` ended at once: {words}")
        return found.process

    async def find(self, daemon: DaemonSpec) -> DaemonProcess | None:
        """Return the running process of a daemon, by its number or by its lock.

        The lock finds a daemon whose number nobody wrote. A container may take the lock, or show
        another file in its place, but none of its processes is taken for the daemon.

        Raises:
            ProgramMissing: the host has no such program.
        """
        for read, file in (
            (processes.read_pid, daemon.pid_file),
            (processes.lock_holder, daemon.lock),
        ):
            pid = await to_thread.run_sync(read, file)
            if pid is not None and (found := await self._verify(daemon, pid)) is not None:
                return found
        return None

    async def empty(self, folder: Path) -> None:
        """Remove the content of a folder that containers may write to.

        Raises:
            ProgramError: the folder cannot be emptied.
        """
        await to_thread.run_sync(empty, folder)

    async def unmount(self, daemon: DaemonSpec) -> None:
        """Unmount the volumes of a daemon, and remove its cgroup.

        The mounts of containers stay.

        Raises:
            ProgramError: a volume cannot be unmounted.
        """
        if self.on_host:
            await self._launch("unmount", daemon)

    async def send_command(self, daemon: DaemonSpec, words: str, deadline: float) -> str:
        """Run the program that talks to the daemon; return its output.

        Raises:
            ProgramMissing: the host has no such program.
            ProgramError: the program failed or did not end in time.
        """
        return await self.programs.run_with_input(
            daemon.program, stdin=words, env=daemon.env, deadline=deadline
        )

    async def last_output_line(self, daemon: DaemonSpec) -> str:
        """Return the last line of a daemon's output, or why there is none."""
        try:
            text = await to_thread.run_sync(_read_end, daemon.output)
        except OSError as error:
            return f"{daemon.output} cannot be read: {error.strerror}"
        return next(iter(text.strip().splitlines()[-1:]), "it printed nothing")

    async def limit_output(self, daemon: DaemonSpec) -> None:
        """Discard the output of a running daemon if it takes more than `LONGEST_OUTPUT`."""
        with suppress(OSError):
            await to_thread.run_sync(_limit, daemon.output)

    async def wait_ended(self, process: DaemonProcess) -> None:
        """Wait until a process has ended."""
        async with AsyncExitStack() as stack:
            descriptor = await to_thread.run_sync(processes.open_pidfd, process)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                if processes.is_running(descriptor):
                    await anyio.wait_readable(descriptor)
        # The caller's time may be over by now, on a busy node: it hears of the end all the same.
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(processes.reap, process)

    async def kill(self, process: DaemonProcess) -> None:
        """Kill a process through a descriptor that was verified to be its own.

        Raises:
            ProgramError: the process still exists after some seconds, or the kernel refuses.
        """
        descriptor = await to_thread.run_sync(processes.open_pidfd, process)
        if descriptor is None:
            return

        try:
            processes.kill(descriptor)
            with anyio.fail_after(KILL_DEADLINE):
                await anyio.wait_readable(descriptor)
        except TimeoutError:
            raise ProgramError(
                f"process {process.pid} was killed and is still there after {KILL_DEADLINE:g} s"
            ) from None
        except OSError as error:
            raise ProgramError(
                f"process {process.pid} cannot be killed: {error.strerror}"
            ) from error
        finally:
            os.close(descriptor)
        await to_thread.run_sync(processes.reap, process)

    async def _verify(self, daemon: DaemonSpec, pid: int) -> DaemonProcess | None:
        """Return a process if it was started as this daemon, not by an imitating pod."""
        if await to_thread.run_sync(processes.is_in_other_container, pid, self.proc):
            return None
        found = await to_thread.run_sync(processes.read_process, pid)
        if found is None or not {f"{k}={v}" for k, v in daemon.env.items()} <= found.env:
            return None

        # A child of a daemon has its environment too, but other arguments.
        program, *arguments = (await self.programs.resolve(daemon.program, *daemon.arguments))[0]
        cut = len(found.arguments) - len(arguments)
        names = {Path(argument).name for argument in found.arguments[: max(0, cut)]}
        same = Path(program).name in names and list(found.arguments[cut:]) == arguments
        return found.process if same else None

    async def _refuse_second(self, daemon: DaemonSpec) -> None:
        """Raise if a process of the host has the lock; a container loses it with the file."""
        pid = await to_thread.run_sync(processes.lock_holder, daemon.lock)
        if pid is None or await to_thread.run_sync(processes.is_in_other_container, pid, self.proc):
            return
        raise ProgramError(
            f"process {pid} holds {daemon.lock}, and metagpu did not start it as this daemon: "
            f"end it (`kill {pid}`)"
        )

    async def _mount(self, daemon: DaemonSpec) -> None:
        """Mount the volumes on the host, and check that this process sees them.

        An earlier start, or an earlier agent, may have mounted them.
        """
        if self.host_process == os.getpid():
            raise ProgramError("this daemon is started on the host: give the pod `hostPID: true`")
        await self._launch("mount", daemon)
        for folder in daemon.volumes:
            if not await to_thread.run_sync(is_mounted, folder):
                await self._launch("unmount", daemon)
                raise ProgramError(
                    f"a tmpfs that the host has at {folder} is not seen here: give the volume of "
                    "the run directory `mountPropagation: HostToContainer`, at the host's path"
                )

    async def _launch(self, operation: str, daemon: DaemonSpec, **more: object) -> str:
        """Run an operation of `daemon_launcher`; return its result."""
        roots = map(str, self.programs.roots) if self.roots is None else self.roots
        request = {
            "on_host": self.on_host,
            "host_process": self.host_process,
            "cgroup": daemon.cgroup if self.on_host else "",
            "volumes": {str(folder): size for folder, size in daemon.volumes.items()},
            "links": [str(volume) for volume in daemon.volumes if volume != daemon.lock.parent],
            "mounts": {str(at): str(path) for at, path in daemon.mounts.items() if self.on_host},
            "output": str(daemon.output),
            "folder": str(daemon.pid_file.parent),
            "path": os.environ.get("PATH", os.defpath),
            "roots": list(roots),
            "programs": PROGRAMS,
            "libraries": LIBRARIES,
            **more,
        }
        command = (sys.executable, "-I", "-S", _LAUNCHER, operation, json.dumps(request))
        answer = json.loads(await self.programs.run_with_input(*command))
        if "problem" in answer:
            raise ProgramError(answer["problem"])
        return str(answer["result"])


def _read_end(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - _LAST_OUTPUT))
        return opened.read(_LAST_OUTPUT).decode(errors="replace")


def _limit(file: Path) -> None:
    if file.stat().st_size > LONGEST_OUTPUT:
        os.truncate(file, 0)

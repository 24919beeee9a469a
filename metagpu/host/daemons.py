"""Long-running host processes: started detached, found by their environment."""

import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.contracts.daemons import DaemonProcess, DaemonSpec
from metagpu.core.errors import ProgramError
from metagpu.host import daemon_folders, daemon_processes
from metagpu.host.programs import HostPrograms

KILL_DEADLINE: Final = 5.0
"""Seconds for the end of a killed process; a process that hangs in a driver does not end."""

_DETACHED: Final = 'output=$1; shift; : >"$output"; "$@" </dev/null >>"$output" 2>&1 & echo $!'
"""For `sh -c`: start a program in the background and print its pid. The program keeps the pid:
`unshare` and the inner `sh` are replaced by the program that they start. The program appends, so
that its output can be shortened while it runs.
"""
LONGEST_OUTPUT: Final = 4 << 20
"""Bytes of a daemon's output that are kept: it writes lines about each command and each client."""
_LAST_OUTPUT: Final = 4096
_SEES: Final = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
"""For `sh -c` in a mount namespace of its own: mount one folder over another."""


class HostDaemons(msgspec.Struct, frozen=True):
    """Starts and finds daemons on this host (see `core.contracts.daemons.Daemons`).

    Attributes:
        programs: finds and runs the daemons' programs.
        mounts: whether daemons get their mounts, which needs the right to mount; simulated daemons
            run without.
        proc: the /proc that shows the containers of processes.
    """

    programs: HostPrograms
    mounts: bool = True
    proc: Path = Path("/proc")

    async def start(self, daemon: DaemonSpec) -> DaemonProcess:
        """Start a daemon, which outlives this process.

        Raises:
            ProgramMissing: the daemon's program, or one that starts it, is missing.
            ProgramError: a volume cannot be mounted or emptied, another process has the daemon's
                lock, or the daemon could not be started, or ended at once.
        """
        command, own = await self.programs.resolve(daemon.program, *daemon.arguments)
        path = _path_beside(Path(command[0]))
        await self._refuse_second(daemon)
        if self.mounts:
            for target, folder in daemon.mounts.items():
                command = ["sh", "-c", _SEES, "sh", str(folder), str(target), *command]
            if daemon.mounts:
                unshare, _ = await self.programs.resolve("unshare")
                command = [*unshare, "--mount", "--propagation", "private", "--", *command]
            for folder, size in daemon.volumes.items():
                await self._mount(folder, size, links=folder != daemon.lock.parent)
        await self.empty(daemon.lock.parent)

        printed = await self.programs.run_with_input(
            "sh",
            *("-c", _DETACHED, "sh", str(daemon.output), *command),
            env={**own, "PATH": path, **daemon.env},
            new_session=True,
        )
        await to_thread.run_sync(daemon_processes.write_pid, daemon.pid_file, int(printed))
        found = await to_thread.run_sync(daemon_processes.read_process, int(printed))
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
            (daemon_processes.read_pid, daemon.pid_file),
            (daemon_processes.lock_holder, daemon.lock),
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
        await to_thread.run_sync(daemon_folders.empty, folder)

    async def unmount(self, daemon: DaemonSpec) -> None:
        """Unmount the volumes of a daemon; the mounts of containers stay.

        Raises:
            ProgramError: a volume cannot be unmounted.
        """
        for folder in daemon.volumes if self.mounts else ():
            if await to_thread.run_sync(daemon_folders.is_mounted, folder):
                await self.programs.run("umount", "-l", str(folder))

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
            descriptor = await to_thread.run_sync(daemon_processes.open_pidfd, process)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                await anyio.wait_readable(descriptor)
        await to_thread.run_sync(daemon_processes.reap, process)

    async def kill(self, process: DaemonProcess) -> None:
        """Kill a process through a descriptor that was verified to be its own.

        Raises:
            ProgramError: the process still exists after some seconds, or the kernel refuses.
        """
        descriptor = await to_thread.run_sync(daemon_processes.open_pidfd, process)
        if descriptor is None:
            return

        try:
            daemon_processes.kill(descriptor)
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
        await to_thread.run_sync(daemon_processes.reap, process)

    async def _verify(self, daemon: DaemonSpec, pid: int) -> DaemonProcess | None:
        """Return a process if it was started as this daemon, not by an imitating pod."""
        if await to_thread.run_sync(daemon_processes.is_in_other_container, pid, self.proc):
            return None
        found = await to_thread.run_sync(daemon_processes.read_process, pid)
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
        pid = await to_thread.run_sync(daemon_processes.lock_holder, daemon.lock)
        if pid is None or await to_thread.run_sync(
            daemon_processes.is_in_other_container, pid, self.proc
        ):
            return
        raise ProgramError(
            f"process {pid} holds {daemon.lock}, and metagpu did not start it as this daemon: "
            f"end it (`kill {pid}`)"
        )

    async def _mount(self, folder: Path, size: int, *, links: bool) -> None:
        """Mount a tmpfs; without `links`, the kernel follows no link in it, where it can.

        Linux 5.10 and util-linux 2.38 can.
        """
        # An earlier start, or an earlier agent, may have mounted it.
        if not await to_thread.run_sync(daemon_folders.is_mounted, folder):
            await self._mount_tmpfs(folder, size, links=links)
        if not await to_thread.run_sync(daemon_folders.is_seen_by_host, folder, self.proc):
            await self.programs.run("umount", "-l", str(folder))
            raise ProgramError(
                f"a tmpfs at {folder} is not seen by the host: give the volume of the run "
                "directory `mountPropagation: Bidirectional`, and the pod `hostPID: true`"
            )

    async def _mount_tmpfs(self, folder: Path, size: int, *, links: bool) -> None:
        options = await to_thread.run_sync(daemon_folders.tmpfs_options, folder, size)
        mount = ("mount", "-t", "tmpfs", "tmpfs", str(folder), "-o")
        try:
            if not links:
                with suppress(ProgramError):
                    await self.programs.run(*mount, f"{options},nosymfollow")
            if not await to_thread.run_sync(daemon_folders.is_mounted, folder):
                await self.programs.run(*mount, options)
        except ProgramError as error:
            raise ProgramError(
                f"{folder} needs a limit, so that containers cannot fill the host's memory; "
                f"give metagpu the capability CAP_SYS_ADMIN ({error})"
            ) from error


def _read_end(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - _LAST_OUTPUT))
        return opened.read(_LAST_OUTPUT).decode(errors="replace")


def _limit(file: Path) -> None:
    if file.stat().st_size > LONGEST_OUTPUT:
        os.truncate(file, 0)


def _path_beside(program: Path) -> str:
    """Return a PATH in which a program finds the programs beside it first.

    Debian has NVIDIA's control daemon in `bin`, and the server that it starts in `sbin`.
    """
    beside = (program.parent, program.parent.parent / "sbin")
    return os.pathsep.join([*map(str, beside), os.environ.get("PATH", os.defpath)])

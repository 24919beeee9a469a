"""Long-running programs of the node: started, watched and ended by their pid.

A pid alone may belong to another process by now. The rig records every pid with the command
line of its start, and signals the pid only while /proc still shows that command line.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.rig.errors import EndedError, RigError
from tests.e2e.rig.waiting import wait_for

GRACE_S = 20.0


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty for a missing process or a zombie."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").rstrip("\0").split("\0") if raw else []


def running_processes() -> dict[int, list[str]]:
    """Return the command line of every process that has one, by pid."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid: arguments for pid in pids if (arguments := command_line(pid))}


def first_process(container: str) -> int:
    """Return the machine's pid of a running container's first process.

    With the host's process ids no process is number 1, and the first is the one that is not a
    child of another. CRI-O's monitor of a container has a cgroup beside it.

    Raises:
        RigError: there is none.
    """
    folders = [
        file.parent
        for file in Path("/proc").glob("[0-9]*/cgroup")
        if re.search(rf"(?<!conmon-){container}$", _read(file), re.MULTILINE)
    ]
    statuses = {int(folder.name): _read(folder / "status") for folder in folders}
    for pid, status in statuses.items():
        parent = re.search(r"^PPid:\t(\d+)$", status, re.MULTILINE)
        own = re.search(r"^NSpid:\t\d+$", status, re.MULTILINE)
        if re.search(r"^NSpid:.*\t1$", status, re.MULTILINE) or (
            own and parent and int(parent[1]) not in statuses
        ):
            return pid
    raise RigError(f"container {container} has no first process")


def _read(path: Path) -> str:
    """Return the text of a file of a process, empty when the process has gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to PID; an ended process is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def tail(log: Path, lines: int = 30, width: int = 300) -> str:
    """Return the end of a log file, or a note that there is no log."""
    try:
        end = log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line[:width] for line in end)
    except FileNotFoundError:
        return "(no log)"


class Program:
    """One program of the node, with its log and its pid file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        logs: Path,
        pids: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """Store the command of the program.

        LAUNCHER, if any, becomes COMMAND in the same process; it is read at each start.
        """
        self.name = name
        self.command = list(command)
        self.log = logs / f"{name}.log"
        self._pid_file = pids / f"{name}.json"
        self._environment = environment
        self._folder = folder
        self._launcher = launcher
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start the program, with further options; its output is appended to its log."""
        if self.alive:
            raise RigError(f"{self.name} is running already")
        command = [*self.command, *options]
        environment = dict(os.environ) | dict(self._environment or {})
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C in the terminal is for the rig alone
            )
        record = {"pid": self._process.pid, "command": command}
        self._pid_file.write_text(json.dumps(record))

    @property
    def alive(self) -> bool:
        """Return whether the program runs, started by this object."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Return the process id, None when the program was not started."""
        return None if self._process is None else self._process.pid

    def require_alive(self) -> None:
        """Raise unless the program runs, started by this object.

        Raises:
            EndedError: the program does not run; the text is the end of its log.
        """
        if not self.alive:
            raise EndedError(f"{self.name} is not running:\n{tail(self.log)}")

    def require_no_crash(self) -> None:
        """Raise if the program ended by itself; one that was stopped is no crash.

        Raises:
            EndedError: as `require_alive`.
        """
        if self._process is not None:
            self.require_alive()

    def notify(self, number: signal.Signals) -> None:
        """Send the program a signal that does not end it.

        Raises:
            EndedError: the program does not run; the text is the end of its log.
        """
        self.require_alive()
        if self._process is not None:
            send(self._process.pid, number)

    def stop(self) -> int | None:
        """End the program in an orderly way, by force if it takes too long.

        Returns:
            Its exit status, or None when it was not running.
        """
        return self._end(signal.SIGTERM)

    def kill(self) -> int | None:
        """End the program as a crash would."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(number)  # no effect on a polled process that has ended
        try:
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._pid_file.unlink(missing_ok=True)
        return process.returncode


def end_leftovers(pids: Path) -> None:
    """End the processes that an earlier run recorded under PIDS, and only these."""
    for record in sorted(pids.glob("*.json")):
        try:
            noted = json.loads(record.read_text())
        except ValueError:  # the earlier run died while writing the file
            continue
        if command_line(noted["pid"]) == noted["command"]:
            end_processes({noted["pid"]: noted["command"]})
        record.unlink()


def end_processes(processes: Mapping[int, Sequence[str]]) -> None:
    """Kill processes that still have the given command lines, and wait for their end."""

    def remaining() -> list[int]:
        return [pid for pid, command in processes.items() if command_line(pid) == list(command)]

    def none_remain() -> bool:
        for pid in remaining():
            send(pid, signal.SIGKILL)
        return not remaining()

    wait_for("killed processes to be gone", none_remain, within_s=GRACE_S, pause_s=0.02)

"""Long-running programs of the node: started, watched and ended by their pid.

A pid alone may belong to somebody else by now. Every pid that the rig writes down
comes with the command line it was started with, and is only ever signalled
while /proc still shows that command line.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.rig.errors import EndedError, RigError
from tests.e2e.rig.waiting import wait_for

GRACE_S = 20.0


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty when there is none, or only its zombie."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").rstrip("\0").split("\0") if raw else []


def running_processes() -> dict[int, list[str]]:
    """Every process that has a command line -> that command line."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid: arguments for pid in pids if (arguments := command_line(pid))}


def send(pid: int, number: signal.Signals) -> None:
    """Signal PID; one that has ended by itself is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def tail(log: Path, lines: int = 30, width: int = 300) -> str:
    """The end of a log file, or a word on why there is none."""
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
        """Say how it is started: LAUNCHER, if any, becomes COMMAND in the same process."""
        self.name = name
        self.command = list(command)
        self.log = logs / f"{name}.log"
        self._pid_file = pids / f"{name}.json"
        self._environment = environment
        self._folder = folder
        self._launcher = list(launcher)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start the program, with further options; its log goes on where an earlier run's ended."""
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
                start_new_session=True,  # a person's Ctrl-C is for the rig alone
            )
        record = {"pid": self._process.pid, "command": command}
        self._pid_file.write_text(json.dumps(record))

    @property
    def alive(self) -> bool:
        """Whether the program runs, started by this object."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process, None when it was not started."""
        return None if self._process is None else self._process.pid

    def require_alive(self) -> None:
        """Make sure that the program runs, started by this object.

        Raises:
            EndedError: it does not; the text is the end of its log.
        """
        if not self.alive:
            raise EndedError(f"{self.name} is not running:\n{tail(self.log)}")

    def notify(self, number: signal.Signals) -> None:
        """Send the program a signal that does not end it.

        Raises:
            EndedError: it does not run; the text is the end of its log.
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
        process.send_signal(number)  # a no-op on one that has ended and was polled
        try:
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._pid_file.unlink(missing_ok=True)
        return process.returncode


def end_leftovers(pids: Path) -> None:
    """End what an earlier run started and wrote down under PIDS, and only that."""
    for record in sorted(pids.glob("*.json")):
        try:
            noted = json.loads(record.read_text())
        except ValueError:  # that run died while writing it
            continue
        if command_line(noted["pid"]) == noted["command"]:
            end_processes({noted["pid"]: noted["command"]})
        record.unlink()


def end_processes(processes: Mapping[int, Sequence[str]]) -> None:
    """Kill processes that still have the given command lines, and see them gone."""

    def remaining() -> list[int]:
        return [pid for pid, command in processes.items() if command_line(pid) == list(command)]

    def none_remain() -> bool:
        for pid in remaining():
            send(pid, signal.SIGKILL)
        return not remaining()

    wait_for("killed processes to be gone", none_remain, within_s=GRACE_S, pause_s=0.02)

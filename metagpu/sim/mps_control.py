"""A stand-in for `nvidia-cuda-mps-control`, for simulated nodes and tests: a program of its own.

    mps_control.py -f            the control daemon, in the foreground
    mps_control.py <<< COMMAND   tells it a command and prints the answer

It keeps the files that NVIDIA's keeps in CUDA_MPS_PIPE_DIRECTORY: `control`, `control_lock`,
`control_privileged`, `log` and `nvidia-cuda-mps-control.pid`. Whoever holds a connection to
`control` is a client, as a CUDA process would be, and the first one starts a server.

A file `steer` in that folder makes it misbehave while it stands there; it says one of
`hang` (no answer), `garbage` (no sense), `crash` (ends at the next command, leaving all as it is),
`fault` (its server is said to be in a fault) and `refuse` (does not start).

It needs nothing but Python's own library, so that it starts quickly with `python -S -E`.
"""

import fcntl
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

NOT_FOUND: Final = "Cannot find MPS control daemon process"
ALREADY: Final = "An instance of this daemon is already running"
_CREDENTIALS: Final = struct.Struct("3i")
_LONGEST: Final = 4096
_SERVER: Final = "--server"


class Control:
    """The control daemon: one selector, no threads; the server is a process that only waits."""

    def __init__(self, pipes: Path, logs: Path) -> None:
        self._pipes, self._logs = pipes, logs
        self._steer = pipes / "steer"
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, int] = {}
        self._server: tuple[int, int] | None = None
        self._percentage = 100.0
        self._limits: dict[str, str] = {}
        self._quitting: list[socket.socket] = []

    def run(self) -> int:
        """Serve until `quit`; give the exit status."""
        if self._steered() == "refuse":
            return self._leave("steered to refuse")
        lock = os.open(self._pipes / "control_lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._leave(ALREADY)

        self._listen("control", 0o666)
        self._listen("control_privileged", 0o755)
        fifo = self._pipes / "log"
        if not fifo.exists():
            os.mkfifo(fifo, 0o777)
        pid_file = self._pipes / "nvidia-cuda-mps-control.pid"
        pid_file.write_text(str(os.getpid()))
        self._log(f"Starting control daemon using socket {self._pipes / 'control'}")

        while not (self._quitting and not self._clients):
            for key, _ in self._selector.select():
                self._serve(key)

        self._stop_server()
        pid_file.unlink()
        for asker in self._quitting:
            self._answer(asker, "")
        return 0

    def _serve(self, key: selectors.SelectorKey) -> None:
        found = key.fileobj
        if not isinstance(found, socket.socket):
            return
        if key.data in ("control", "control_privileged"):
            connection, _ = found.accept()
            if key.data == "control":
                self._join(connection)
            self._selector.register(
                connection, selectors.EVENT_READ, "client" if key.data == "control" else "asker"
            )
        elif key.data == "client":
            if not found.recv(_LONGEST):
                self._forget(found)
        else:
            self._hear(found)

    def _join(self, connection: socket.socket) -> None:
        """Take a client in; a daemon that quits takes none."""
        if self._quitting:
            connection.close()
            return
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        self._start_server(uid)
        self._clients[connection] = pid
        self._log(f"NEW CLIENT {pid} from user {uid}")

    def _hear(self, asker: socket.socket) -> None:
        said = asker.recv(_LONGEST).decode()
        if not said:
            self._forget(asker)
            return

        steered = self._steered()
        if steered == "hang":
            return
        if steered == "crash":
            os._exit(1)
        if steered == "garbage":
            self._answer(asker, "?\x07 not what you asked")
            return

        command, *words = said.split()
        self._log(f"Cmd:{' '.join([command, *words])}")
        if command == "quit":
            self._quitting.append(asker)
            if words[:1] == ["-t"]:
                for client in list(self._clients):
                    self._forget(client)
            return
        self._answer(asker, self._do(command, words))

    def _do(self, command: str, words: list[str]) -> str:
        answer = f"Unknown command: {command}"

        match command, words:
            case "get_server_list", []:
                answer = str(self._server[0]) if self._server else ""
            case (("get_client_list" | "get_server_status"), [pid]):
                answer = self._tell_of_server(command, pid)
            case "shutdown_server", [pid] if self._server and pid == str(self._server[0]):
                answer = ""
                if not self._clients:
                    self._stop_server()
            case "start_server", ["-uid", uid]:
                self._start_server(int(uid))
                answer = ""
            case "get_default_active_thread_percentage", []:
                answer = str(self._percentage)
            case "set_default_active_thread_percentage", [percentage]:
                self._percentage = float(percentage)
                answer = str(self._percentage)
            case "set_default_device_pinned_mem_limit", [device, limit]:
                self._limits[device] = limit
                answer = ""
            case "get_default_device_pinned_mem_limit", [device]:
                answer = self._limits.get(device, "0G")
        return answer

    def _tell_of_server(self, command: str, pid: str) -> str:
        if self._server is None or pid != str(self._server[0]):
            return f"Server {pid} not found"
        if command == "get_server_status":
            return "FAULT" if self._steered() == "fault" else "ACTIVE"
        return "\n".join(map(str, self._clients.values()))

    def _start_server(self, uid: int) -> None:
        if self._server is not None:
            return
        ending, kept = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(kept)
            os.dup2(ending, 0)
            os.execv(sys.executable, [sys.executable, "-S", "-E", __file__, _SERVER])  # noqa: S606
        os.close(ending)
        self._server = (pid, kept)
        self._log(f"Starting new server {pid} for user {uid}")

    def _stop_server(self) -> None:
        if self._server is not None:
            pid, kept = self._server
            os.close(kept)
            os.waitpid(pid, 0)
            self._server = None

    def _forget(self, connection: socket.socket) -> None:
        self._clients.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _answer(self, asker: socket.socket, text: str) -> None:
        with suppress(OSError):  # who asked may have gone
            asker.sendall(f"{text}\n".encode())
        with suppress(KeyError):
            self._forget(asker)

    def _listen(self, name: str, mode: int) -> None:
        path = self._pipes / name
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(128)
        self._selector.register(listener, selectors.EVENT_READ, name)

    def _steered(self) -> str:
        try:
            return self._steer.read_text().strip()
        except OSError:
            return ""

    def _leave(self, problem: str) -> int:
        self._log(problem)
        sys.stdout.write(f"{problem}\n")
        return 1

    def _log(self, text: str) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        with (self._logs / "control.log").open("a") as log:
            log.write(f"[{moment} Control {os.getpid():5}] {text}\n")


def tell(pipes: Path, commands: str) -> int:
    """Tell a control daemon some commands, print its answers; give the exit status."""
    for command in filter(None, commands.splitlines()):
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(pipes / "control_privileged"))
                connection.sendall(command.encode())
                with connection.makefile(encoding="utf-8") as answer:
                    text = answer.read()
            except OSError:
                text = ""
        if not text:
            sys.stdout.write(f"{NOT_FOUND}\n")
            return 1
        if text.strip():
            sys.stdout.write(text)
    return 0


def main(arguments: list[str]) -> int:
    """Do what the command line says; give the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - NVIDIA's
    logs = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))

    if arguments == [_SERVER]:
        os.closerange(3, 1024)
        sys.stdin.read()  # a server holds nothing here; it ends with its control daemon
        return 0
    if arguments == ["-f"]:
        return Control(pipes, logs).run()
    return tell(pipes, sys.stdin.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A stand-in for `nvidia-cuda-mps-control`, for simulated nodes and tests.

    mps_control.py [--driver=535] -f            the control daemon, in the foreground
    mps_control.py [--driver=535] <<< COMMAND   sends a command and prints the answer

The program keeps the files of NVIDIA's in CUDA_MPS_PIPE_DIRECTORY: `control`, `control_lock`,
`control_privileged`, `log` and, as driver 550 and newer, `nvidia-cuda-mps-control.pid`. It locks
`control_lock` as NVIDIA's does, by fcntl(2). Each connection to `control` is a client, as a CUDA
process is, and the first client starts a server. `tests/contract/test_mps.py` holds the program
against NVIDIA's.

A file `steer` in CUDA_MPS_LOG_DIRECTORY makes the program misbehave while the file
exists. Its text is `hang` (no answer), `garbage` (an answer without meaning), `crash` (exits at the
next command and leaves its files), `fault` (its server reports a fault) or `refuse` (does not
start).

The program imports Python's standard library only, so that it starts fast with `python -S -E`, and
neither pathlib nor typing, whose imports take a third of the time that one command takes.
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

NOT_FOUND = "Cannot find MPS control daemon process"
ALREADY = "An instance of this daemon is already running"
_CREDENTIALS = struct.Struct("3i")
_LONGEST = 4096
_DRIVER = "--driver="
_NEWEST = 555
_FIRST_WITH_PID_FILE = 550
"""Driver 535 has neither the pid file nor `get_server_status`; no version between was seen."""
_SERVER = "--server"


class SimMpsControl:
    """The MPS control daemon: one selector, no threads; its server process only waits."""

    def __init__(self, pipes: str, logs: str, driver: int = _NEWEST) -> None:
        self._pipes = pipes
        self._knows_status = driver >= _FIRST_WITH_PID_FILE
        self._pid_file = f"{pipes}/nvidia-cuda-mps-control.pid" if self._knows_status else None
        self._steer = f"{logs}/steer"
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, int] = {}
        self._server: tuple[int, int] | None = None
        self._percentage = 100.0
        self._limits: dict[str, str] = {}
        self._quitting: list[socket.socket] = []

    def run(self) -> int:
        """Serve until the command `quit`; return the exit status."""
        if self._steered() == "refuse":
            return self._leave("steered to refuse")
        lock = os.open(f"{self._pipes}/control_lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return self._leave(ALREADY)

        self._listen("control", 0o666)
        self._listen("control_privileged", 0o755)
        fifo = f"{self._pipes}/log"
        if not os.path.exists(fifo):
            os.mkfifo(fifo, 0o777)
        if self._pid_file:
            with open(self._pid_file, "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        self._log(f"Starting control daemon using socket {self._pipes}/control")

        while not (self._quitting and not self._clients):
            for key, _ in self._selector.select():
                # An earlier event of the same batch may have closed this connection.
                if self._selector.get_map().get(key.fd) is key:
                    self._serve(key)

        self._stop_server()
        for left in filter(None, (fifo, self._pid_file)):
            with suppress(FileNotFoundError):
                os.unlink(left)
        for asker in self._quitting:
            self._answer(asker, "")
        self._log("Exit with status 0")
        return 0

    def _serve(self, key: selectors.SelectorKey) -> None:
        found = key.fileobj
        if not isinstance(found, socket.socket):
            return
        if key.data in ("control", "control_privileged"):
            connection, _ = found.accept()
            if key.data == "control":
                self._accept_client(connection)
            elif self._is_asked:
                connection.close()  # NVIDIA's takes one command at a time, and loses the others
            else:
                self._selector.register(connection, selectors.EVENT_READ, "asker")
        elif key.data == "client":
            if not self._read(found):
                self._forget(found)
        else:
            self._receive(found)

    @property
    def _is_asked(self) -> bool:
        """True while a program is connected whose command is not answered, `quit` apart."""
        asking = (key for key in self._selector.get_map().values() if key.data == "asker")
        return any(key.fileobj not in self._quitting for key in asking)

    def _accept_client(self, connection: socket.socket) -> None:
        """Accept a client; a daemon that quits accepts none."""
        if self._quitting:
            connection.close()
            return
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        self._start_server(uid)
        self._clients[connection] = pid
        self._selector.register(connection, selectors.EVENT_READ, "client")
        self._log(f"NEW CLIENT {pid} from user {uid}")

    def _receive(self, asker: socket.socket) -> None:
        text = self._read(asker).decode(errors="replace")
        if not text:
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

        command, *words = text.split()
        self._log(f"Cmd:{' '.join([command, *words])}")
        if command == "quit":
            self._quitting.append(asker)
            if words[:1] == ["-t"]:
                for client in list(self._clients):
                    self._forget(client)
            return
        self._answer(asker, self._do(command, words))

    @staticmethod
    def _read(connection: socket.socket) -> bytes:
        """Return what was sent; nothing of a connection that is closed or reset."""
        with suppress(ConnectionError):
            return connection.recv(_LONGEST)
        return b""

    def _do(self, command: str, words: list[str]) -> str:  # noqa: C901 - one case a command
        answer = f'Unknown command "{command}"'

        match command, words:
            case "get_server_list", []:
                answer = str(self._server[0]) if self._server else ""
            case (("get_client_list" | "get_server_status"), [pid]) if (
                self._knows_status or command == "get_client_list"
            ):
                answer = self._server_report(command, pid)
            case "shutdown_server", [pid]:
                answer = "" if self._is_server(pid) else f"Server {pid} not found"
                if self._is_server(pid) and not self._clients:
                    self._stop_server()
            case "terminate_client", [pid, client]:
                answer = self._terminate(pid, client)
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

    def _server_report(self, command: str, pid: str) -> str:
        if not self._is_server(pid):
            return f"Server {pid} not found"
        if command == "get_server_status":
            return "FAULT" if self._steered() == "fault" else "ACTIVE"
        return "\n".join(map(str, self._clients.values()))

    def _terminate(self, pid: str, client: str) -> str:
        """End the connections of a client, as its contexts end; return CUDA's code."""
        if not self._is_server(pid):
            return f"Server {pid} not found\nServer {pid} not found!\n1"
        ended = [connection for connection, its in self._clients.items() if client == str(its)]
        for connection in ended:
            self._forget(connection)
        return "0" if ended else "1"

    def _is_server(self, pid: str) -> bool:
        return self._server is not None and pid == str(self._server[0])

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
        if (
            connection.fileno() < 0
        ):  # forgotten already: who sent `quit` may not wait for its answer
            return
        self._clients.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _answer(self, asker: socket.socket, text: str) -> None:
        with suppress(OSError):  # who asked may have gone
            asker.sendall(f"{text}\n".encode())
        self._forget(asker)

    def _listen(self, name: str, mode: int) -> None:
        path = f"{self._pipes}/{name}"
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(128)
        self._selector.register(listener, selectors.EVENT_READ, name)

    def _steered(self) -> str:
        try:
            with open(self._steer, encoding="utf-8") as file:
                return file.read().strip()
        except OSError:
            return ""

    def _leave(self, problem: str) -> int:
        sys.stdout.write(f"{problem}\n")
        return 1

    def _log(self, text: str) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        sys.stdout.write(f"[{moment}.000 Control {os.getpid():5}] {text}\n")
        sys.stdout.flush()


def send_commands(pipes: str, commands: str) -> int:
    """Send commands to a control daemon and print its answers; return the exit status."""
    for command in filter(None, commands.splitlines()):
        text = ""
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(f"{pipes}/control_privileged")
            except OSError:
                sys.stdout.write(f"{NOT_FOUND}\n")
                return 1
            # As NVIDIA's: a command that the daemon does not take looks like one without an answer.
            with suppress(OSError):
                connection.sendall(command.encode())
                with connection.makefile(encoding="utf-8") as answer:
                    text = answer.read()
        if text.strip():
            sys.stdout.write(text)
    return 0


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's
    logs = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")

    driver = _NEWEST
    if arguments and arguments[0].startswith(_DRIVER):
        driver = int(arguments.pop(0).removeprefix(_DRIVER))
    if arguments == [_SERVER]:
        os.closerange(3, 1024)
        sys.stdin.read()  # a server holds nothing here; it ends with its control daemon
        return 0
    if arguments == ["-f"]:
        return SimMpsControl(pipes, logs, driver).run()
    return send_commands(pipes, sys.stdin.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The `mgctl` of containers alone: a real program, and a socket with a test's answers."""

import fcntl
import json
import os
import platform
import pty
import socket
import struct
import subprocess
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from metagpu import __version__
from metagpu.plugins.pod_api.command import HELP
from metagpu.plugins.pod_api.frames import (
    REQUEST_LIMIT,
    PodRequest,
    exit_frame,
    parse_length,
    parse_request,
    stderr_frame,
    stdout_frame,
)
from tests.rigs.mgctl import PROGRAM, PROGRAMS, require_built

_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
"""`e_machine` in elf.h."""
_PT_INTERP: Final = 3


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """Skip all where the program is not built from this source."""
    require_built()


class Daemon:
    """A server that reads one request and sends the test's answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received = PodRequest(())
        self.answer = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(50)

    def serve(self) -> None:
        """Serve one connection."""
        connection, _ = self._listener.accept()
        with closing(connection), closing(connection.makefile("rb")) as file:
            self.received = parse_request(file.read(parse_length(file.read(2))))
            connection.sendall(self.answer)

    def close(self) -> None:
        """Close the socket."""
        self._listener.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Start such a server."""
    with closing(Daemon(tmp_path / "s")) as live_daemon:
        yield live_daemon


def run(path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program against this socket."""
    return subprocess.run(  # noqa: S603 - ours
        [PROGRAM, *arguments],
        env={"METAGPU_SOCKET": str(path), **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )


def call(daemon: Daemon, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program against a daemon that answers."""
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(daemon.serve)
        done = run(daemon.path, *arguments, **env)
        serving.result()
    return done


# --- the programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", _MACHINES)
def test_mgctl_needs_nothing_of_an_image(machine: str) -> None:
    """For each processor the program is an ELF file without an interpreter, under 200 KB."""
    data = (PROGRAMS / f"mgctl-{machine}").read_bytes()
    start, size, count = (
        struct.unpack_from(f, data, at)[0] for f, at in (("<Q", 32), ("<H", 54), ("<H", 56))
    )
    kinds = [struct.unpack_from("<I", data, start + size * n)[0] for n in range(count)]

    assert data[:6] == b"\x7fELF\x02\x01"
    assert struct.unpack_from("<H", data, 18)[0] == _MACHINES[machine]
    assert _PT_INTERP not in kinds
    assert len(data) < 200_000
    assert os.access(PROGRAMS / f"mgctl-{machine}", os.X_OK)


def test_mgctl_runs_in_an_empty_root(tmp_path: Path) -> None:
    """In an empty root, as another user, the program prints its error."""
    (tmp_path / "mgctl").write_bytes(PROGRAM.read_bytes())
    (tmp_path / "mgctl").chmod(0o755)
    tmp_path.chmod(0o755)
    inside = ["chroot", "--userspec=65534:65534", str(tmp_path), "/mgctl", "version"]
    # A chroot is root's alone; beside libraries that it does not use it says the same.
    command = inside if os.geteuid() == 0 else [str(tmp_path / "mgctl"), "version"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - ours

    assert done.returncode == 1
    assert done.stderr.startswith(
        "mgctl: there is no /run/metagpu/mgctl.sock: metagpu does not run"
    )


# --- what it carries ------------------------------------------------------------------------------


def test_arguments_are_sent(daemon: Daemon) -> None:
    """Every argument is sent, empty ones too, with the fact that there is no terminal."""
    daemon.answer = exit_frame(0)
    call(daemon, "get", "", "a b\n", "-o", "é")

    assert daemon.received == PodRequest(("get", "", "a b\n", "-o", "é"))


@pytest.mark.parametrize("name", ["MG_CTL_ADDR", "MG_CTL_TOKEN"])
def test_metagpus_variables_are_noticed(daemon: Daemon, name: str) -> None:
    """Variables of MetaGPU's images are reported to the daemon, and not used."""
    daemon.answer = exit_frame(0)
    call(daemon, **{name: "x"})

    assert daemon.received.has_metagpu_env


def test_the_answer_comes_back(daemon: Daemon) -> None:
    """Each part of the answer goes to its stream, and the status is the daemon's."""
    daemon.answer = (
        stdout_frame("one\n")
        + stderr_frame("careful\n")
        + stdout_frame("two\n" * 50_000)
        + exit_frame(3)
    )
    done = call(daemon)

    assert (done.returncode, done.stderr) == (3, "careful\n")
    assert done.stdout == "one\n" + "two\n" * 50_000


def test_a_terminal_is_reported(daemon: Daemon) -> None:
    """The terminal's size is sent to the daemon, which draws."""
    daemon.answer = exit_frame(0)
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(daemon.serve)
        subprocess.run(  # noqa: S603 - ours
            [PROGRAM], env={"METAGPU_SOCKET": str(daemon.path)}, stdout=theirs, check=True
        )
        serving.result()
    for file in (ours, theirs):
        os.close(file)

    assert daemon.received == PodRequest((), tty=True, columns=120, rows=40)


# --- what it says itself --------------------------------------------------------------------------


def test_no_socket(tmp_path: Path) -> None:
    """Without a socket the error names the path searched, and the meaning."""
    done = run(tmp_path / "none", "get", "pods")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"mgctl: there is no {tmp_path / 'none'}: metagpu does not run on this node now, or not "
        "for containers (`mgctl: {inPods: false}`), or this container holds no share of a GPU; "
        "METAGPU_SOCKET may name another path\n"
    )


@pytest.mark.parametrize(
    ("words", "status", "out", "err"),
    [
        ("", 0, HELP, ""),
        ("--help", 0, HELP, ""),
        ("get pods -h", 0, HELP, ""),
        ("--version", 0, f"mgctl {__version__}\n", ""),
        (
            "-o json statsu",
            2,
            "",
            "mgctl: unknown command 'statsu'; `mgctl --help` lists the commands\n",
        ),
    ],
)
def test_help_needs_no_daemon(tmp_path: Path, words: str, status: int, out: str, err: str) -> None:
    """Help, version and an unknown command have their answer where no daemon answers."""
    done = run(tmp_path / "none", *words.split())
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


def test_a_socket_without_a_listener(daemon: Daemon) -> None:
    """A dead daemon's socket has an error of its own, different from no socket."""
    daemon.close()
    done = run(daemon.path, "top")

    assert done.returncode == 1
    assert done.stderr == (
        f"mgctl: no daemon answers on {daemon.path} (Connection refused): metagpu does not run on "
        "this node now\n"
    )


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    """A path that is too long for a socket is refused before the connection."""
    done = run(tmp_path / ("x" * 200))

    assert done.returncode == 1
    assert done.stderr.endswith("xxx is too long for a socket's path\n")


def test_arguments_that_are_too_long(tmp_path: Path) -> None:
    """Arguments above the daemon's limit are misuse."""
    done = run(tmp_path / "none", "x" * REQUEST_LIMIT)

    assert done.returncode == 2
    assert done.stderr == "mgctl: the arguments are longer than 4096 bytes\n"


@pytest.mark.parametrize("answer", [b"", b"o", stdout_frame("half")[:-1], stdout_frame("no end")])
def test_an_answer_that_breaks_off(daemon: Daemon, answer: bytes) -> None:
    """An answer without its end is an error."""
    daemon.answer = answer
    done = call(daemon)

    assert done.returncode == 1
    assert done.stderr == (
        "mgctl: metagpu broke off its answer; it may have been restarted: try again\n"
    )


def test_an_answer_of_another_program(daemon: Daemon) -> None:
    """An answer that is not metagpu's is not printed."""
    daemon.answer = b"HTTP/1.1 400 Bad Request"
    done = call(daemon)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"mgctl: {daemon.path} is not metagpu's socket: its answer has an unknown format\n"
    )


@pytest.mark.parametrize(
    "option", ["-o json", "-ojson", "-o=json", "--output json", "--output=json"]
)
def test_with_json_a_failure_has_a_reason(tmp_path: Path, option: str) -> None:
    """With `-o json` an error is the object that the other programs print; no text breaks it."""
    path = tmp_path / 'a "\\ \n é'
    done = run(path, "get", "pods", *option.split())

    found = json.loads(done.stderr)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert list(found) == ["reason", "error"]
    assert found["reason"] == "no_daemon"
    assert found["error"].startswith(f"there is no {path}: metagpu does not run")


@pytest.mark.parametrize("words", ["get p -o yaml", "top --sort-by json", "get json", "-o"])
def test_without_json_a_failure_is_a_line(tmp_path: Path, words: str) -> None:
    """Any other command line has the text."""
    assert run(tmp_path / "none", *words.split()).stderr.startswith("mgctl: there is no ")


def test_misuse_is_a_line(tmp_path: Path) -> None:
    """Wrong arguments have a text, also with `-o json`, as those of the other programs."""
    done = run(tmp_path / "none", "-ojson", "x" * REQUEST_LIMIT)
    assert (done.returncode, done.stderr[:7]) == (2, "mgctl: ")


def test_this_machine_has_a_program() -> None:
    """The daemon finds this machine's program by the kernel's name of its processor."""
    assert PROGRAM.name == f"mgctl-{platform.machine()}"
    assert PROGRAM.exists()

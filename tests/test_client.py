"""The `mgctl` of containers by itself: a real program, and a socket that says what a test wants."""

import fcntl
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

from metagpu.plugins.frames import (
    REQUEST_LIMIT,
    Request,
    complaint,
    end,
    output,
    request_of,
    size_of,
)
from tests.mgctl_rig import PROGRAM, PROGRAMS, assert_built

_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
"""`e_machine` in elf.h."""
_PT_INTERP: Final = 3


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """Have the program of this source."""
    assert_built()


class Daemon:
    """Hears one request, and gives the answer that a test put there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard = Request(())
        self.answer = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(50)

    def serve(self) -> None:
        """Take one call."""
        connection, _ = self._listener.accept()
        with closing(connection), closing(connection.makefile("rb")) as file:
            self.heard = request_of(file.read(size_of(file.read(2))))
            connection.sendall(self.answer)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Have such a daemon."""
    with closing(Daemon(tmp_path / "s")) as it:
        yield it


def run(path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program, to call this socket."""
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
def test_it_needs_nothing_of_an_image(machine: str) -> None:
    """For each kind of processor: an ELF program, without an interpreter, under 200 KB."""
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


def test_it_runs_with_nothing_around_it(tmp_path: Path) -> None:
    """In a root without libraries, a shell or /proc, as another user, it says what it lacks."""
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


def test_arguments_go_there(daemon: Daemon) -> None:
    """Everything behind the program's name arrives, empty arguments too; no terminal is told."""
    daemon.answer = end(0)
    call(daemon, "get", "", "a b\n", "-o", "é")

    assert daemon.heard == Request(("get", "", "a b\n", "-o", "é"))


@pytest.mark.parametrize("name", ["MG_CTL_ADDR", "MG_CTL_TOKEN"])
def test_metagpus_variables_are_noticed(daemon: Daemon, name: str) -> None:
    """What an image for MetaGPU sets is told of, and not used."""
    daemon.answer = end(0)
    call(daemon, **{name: "x"})

    assert daemon.heard.old


def test_the_answer_comes_back(daemon: Daemon) -> None:
    """Each part goes where it belongs, and the status is the daemon's."""
    daemon.answer = output("one\n") + complaint("careful\n") + output("two\n" * 50_000) + end(3)
    done = call(daemon)

    assert (done.returncode, done.stderr) == (3, "careful\n")
    assert done.stdout == "one\n" + "two\n" * 50_000


def test_a_terminal_is_told(daemon: Daemon) -> None:
    """Its size reaches the daemon, which draws."""
    daemon.answer = end(0)
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

    assert daemon.heard == Request((), tty=True, columns=120, rows=40)


# --- what it says itself --------------------------------------------------------------------------


def test_no_socket(tmp_path: Path) -> None:
    """Without a socket it says where it looked, and what that means."""
    done = run(tmp_path / "none")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"mgctl: there is no {tmp_path / 'none'}: metagpu does not run on this node now, or this "
        "container holds no share of a GPU; METAGPU_SOCKET may name another path\n"
    )


def test_nobody_listens(daemon: Daemon) -> None:
    """A socket that a dead daemon left is told from none."""
    daemon.close()
    done = run(daemon.path)

    assert done.returncode == 1
    assert done.stderr == (
        f"mgctl: nobody answers on {daemon.path} (Connection refused): metagpu does not run on "
        "this node now\n"
    )


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    """Longer than a socket's path can be is told before it is tried."""
    done = run(tmp_path / ("x" * 200))

    assert done.returncode == 1
    assert done.stderr.endswith("xxx is too long for a socket's path\n")


def test_arguments_that_are_too_long(tmp_path: Path) -> None:
    """More than the daemon would read is misuse."""
    done = run(tmp_path / "none", "x" * REQUEST_LIMIT)

    assert done.returncode == 2
    assert done.stderr == "mgctl: the arguments are longer than 4096 bytes\n"


@pytest.mark.parametrize("answer", [b"", b"o", output("half")[:-1], output("no end")])
def test_an_answer_that_breaks_off(daemon: Daemon, answer: bytes) -> None:
    """Without its end, an answer is none."""
    daemon.answer = answer
    done = call(daemon)

    assert done.returncode == 1
    assert done.stderr == (
        "mgctl: metagpu broke off its answer; it may have been restarted: try again\n"
    )


def test_an_answer_that_is_somebody_elses(daemon: Daemon) -> None:
    """What is no answer of metagpu's is not shown."""
    daemon.answer = b"HTTP/1.1 400 Bad Request"
    done = call(daemon)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (f"mgctl: {daemon.path} is not metagpu's: it answers what is no answer\n")


def test_this_machine_has_a_program() -> None:
    """The daemon finds the program of the machine it runs on by the kernel's name for that."""
    assert PROGRAM.name == f"mgctl-{platform.machine()}"
    assert PROGRAM.exists()

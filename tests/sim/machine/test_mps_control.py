"""The stand-in for NVIDIA's MPS control daemon, where clients and commands end badly."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from metagpu.sim.machine import mps_control

DEADLINE = 30.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the stand-in until the test ends."""
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path),
    }
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - this project's own program
            [sys.executable, "-S", "-E", mps_control.__file__, "-f"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    yield process
    process.kill()
    process.wait()


def connect(path: Path) -> socket.socket:
    """Connect as soon as the daemon listens."""
    ends = time.monotonic() + DEADLINE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            if time.monotonic() > ends:
                raise
            time.sleep(0.01)
        else:
            return connection


def percentage(folder: Path) -> bytes:
    """Ask for the default percentage of threads; return nothing if the daemon does not hear it."""
    with connect(folder / "control_privileged") as command, suppress(ConnectionError):
        command.sendall(b"get_default_active_thread_percentage")
        return command.recv(64)
    return b""


def test_a_second_command_is_lost(daemon: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """While a program is connected whose command is not answered, others get no answer."""
    with connect(tmp_path / "control_privileged"):
        assert percentage(tmp_path) == b""
    while percentage(tmp_path) == b"":
        pass  # the daemon has not read the end of the first connection yet
    assert daemon.poll() is None


def test_quit_holds_though_its_sender_is_gone(
    daemon: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The daemon ends with its last client, with status 0, and answers nobody."""
    with connect(tmp_path / "control"):
        with connect(tmp_path / "control_privileged") as command:
            command.sendall(b"quit")
        while (answer := percentage(tmp_path)) == b"":
            pass  # the daemon has not read the first command yet, and loses this one
        assert answer == b"100.0\n"
        assert daemon.poll() is None

    assert daemon.wait(DEADLINE) == 0
    assert (tmp_path / "output").read_text().splitlines()[-1].endswith("Exit with status 0")


def test_a_quit_that_ends_clients_survives_their_last_words(
    daemon: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """`quit -t` closes clients' connections, also those with bytes to be read."""
    with (
        connect(tmp_path / "control") as client,
        connect(tmp_path / "control_privileged") as command,
    ):
        command.sendall(b"quit -t")
        client.sendall(b"x")
        assert daemon.wait(DEADLINE) == 0

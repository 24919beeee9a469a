"""The stand-in for NVIDIA's MPS control daemon, where clients and commands end badly."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metagpu.sim.machine import mps_control

DEADLINE = 10.0


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


def test_quit_holds_though_its_sender_is_gone(
    daemon: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The daemon ends with its last client, with status 0, and answers nobody."""
    with connect(tmp_path / "control"):
        with connect(tmp_path / "control_privileged") as command:
            command.sendall(b"quit")
        with connect(tmp_path / "control_privileged") as command:
            command.sendall(b"get_default_active_thread_percentage")
            assert command.recv(64) == b"100.0\n"  # read after the first connection's end
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

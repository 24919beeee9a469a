"""A command whose NVML hangs ends all the same: Python alone would wait for its threads."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

HANGING: Final = """
import sys, threading
from metagpu import cli, nvml
from metagpu.sim.library import Library

function, *arguments = sys.argv[1:]
real = getattr(Library, function)
calls = []

def first_hangs(*args):
    calls.append(args)
    return real(*args) if len(calls) > 1 else threading.Event().wait()

setattr(Library, function, first_hangs)
nvml.Nvml.__init__.__defaults__ = (None, 0.2)
nvml._OPENING = 0.2
sys.exit(cli.main(arguments))
"""
GPU, INIT = "nvmlDeviceGetMemoryInfo_v2", "nvmlInitWithFlags"
"""What hangs at its first call."""
PATIENCE = 50.0


def hanging(function: str, *arguments: str) -> list[str]:
    """Give a command line of metagpu on two simulated GPUs, where one call never comes back."""
    return [sys.executable, "-c", HANGING, function, *arguments, "--simulate", "t4:2"]


@pytest.mark.parametrize(("function", "status"), [(GPU, 0), (INIT, 1)])
def test_explain_ends_although_nvml_hangs(function: str, status: int) -> None:
    """Its output is whole, and its status is that of any other end."""
    done = subprocess.run(  # noqa: S603 - our own command
        hanging(function, "explain"), capture_output=True, text=True, timeout=PATIENCE, check=False
    )

    assert done.returncode == status, done.stderr
    assert ("Tesla T4" in done.stdout) == (status == 0)
    assert ("no answer from NVML" in done.stderr) == (status == 1)


def test_run_ends_although_nvml_hangs(tmp_path: Path) -> None:
    """SIGTERM ends the daemon with status 0, and it says what it leaves behind."""
    places = ("--run-dir", str(tmp_path), "--kubelet-dir", str(tmp_path / "kubelet"))
    command = hanging(GPU, "run", *places)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stderr is not None
            assert any("on offer" in line for line in process.stderr)
            process.terminate()
            _, told = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()

    assert process.returncode == 0, signal.strsignal(-process.returncode)
    assert "NVML still hangs; leaving it" in told

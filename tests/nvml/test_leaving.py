"""A command whose NVML hangs ends in time, although Python waits for its threads."""

import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import pynvml
import pytest

from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.spec import build_node
from tests.nvml.rig import altered_library
from tests.rigs.nvml_library import NvmlLibrary

HANGING: Final = """
import sys, threading
from metagpu.cli.metagpu import main
from metagpu.nvml import driver
from metagpu.sim.nvml.library import SimLibrary

function, *arguments = sys.argv[1:]
real = getattr(SimLibrary, function)
calls = []

def first_hangs(*args):
    calls.append(args)
    return real(*args) if len(calls) > 1 else threading.Event().wait()

setattr(SimLibrary, function, first_hangs)
# Also for what does not hang: a GPU's first read has four of them, before others go on without it.
deadline = 1.0
timing = driver.NvmlTiming(opening=deadline if "Init" in function else 30.0, straggler=30.0)
driver.NvmlDriver.__init__.__defaults__ = (None, deadline, timing)
sys.exit(main(arguments))
"""
PATIENT: Final = """
import sys
from metagpu.cli.metagpu import main
from metagpu.nvml import driver

driver.NvmlDriver.__init__.__defaults__ = (None, 30.0, driver.TIMING)
sys.exit(main())
"""
"""However slow the machine is, a wait for events is not past its deadline."""
GPU, INIT = "nvmlDeviceGetMemoryInfo_v2", "nvmlInitWithFlags"
"""What hangs at its first call."""
TIMEOUT = 50.0
TURNS = 100
"""Turns of the loop: enough for a session that waits for no thread, and over in no time."""


def hanging(function: str, *arguments: str) -> list[str]:
    """Return a command line of metagpu on two simulated GPUs, where one call hangs."""
    return [sys.executable, "-c", HANGING, function, *arguments, "--simulate", "t4:2"]


@pytest.mark.parametrize(("function", "status"), [(GPU, 0), (INIT, 1)])
def test_explain_ends_although_nvml_hangs(function: str, status: int) -> None:
    """`explain` has its whole output and status 0 although a call hangs."""
    done = subprocess.run(  # noqa: S603 - our own command
        hanging(function, "explain"), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )

    assert done.returncode == status, done.stderr
    assert ("Tesla T4" in done.stdout) == (status == 0)
    # Another GPU may miss its deadline too, on a busy machine: the log names it then.
    assert status == 0 or "no answer from NVML" in done.stderr


def test_run_ends_although_nvml_hangs(tmp_path: Path) -> None:
    """SIGTERM ends the daemon with status 0, and a log event names the hanging call."""
    places = ("--run-dir", str(tmp_path), "--kubelet-dir", str(tmp_path / "kubelet"))
    command = hanging(GPU, "run", *places)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stderr is not None
            assert any("resource offered" in line for line in process.stderr)
            process.terminate()
            _, output = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()

    assert process.returncode == 0, signal.strsignal(-process.returncode)
    assert "exit while NVML hangs" in output


def test_run_does_not_wait_for_nvmls_wait(tmp_path: Path) -> None:
    """SIGTERM ends the daemon while NVML waits for events, which nothing can interrupt."""
    library = NvmlLibrary(tmp_path / "nvml")
    library.hang("nvmlEventSetWait_v2", "-")
    places = ("--run-dir", str(tmp_path), "--kubelet-dir", str(tmp_path / "kubelet"))
    command = [sys.executable, "-c", PATIENT, "run", *places]

    with subprocess.Popen(  # noqa: S603 - our own command
        command, stderr=subprocess.PIPE, text=True, env=library.environment
    ) as process:
        try:
            assert process.stderr is not None
            assert any("resource offered" in line for line in process.stderr)
            process.terminate()
            _, output = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()

    assert process.returncode == 0, signal.strsignal(-process.returncode)
    assert "stopping" in output
    assert "NVML hangs" not in output  # that would be a wait past its deadline


async def test_a_cancelled_session_waits_for_nothing() -> None:
    """The end of the daemon waits for no thread: nothing of ours is lost with it."""
    library, waiting, released = altered_library(build_node("t4:1")), Event(), Event()

    def wait(*_: object) -> int:
        waiting.set()
        released.wait()
        return int(pynvml.NVML_ERROR_TIMEOUT)

    library.nvmlEventSetWait_v2 = wait  # type: ignore[method-assign, assignment]
    nvml = NvmlDriver(library)
    ended = False

    async def watch() -> None:
        nonlocal ended
        try:
            async with nvml.session():
                await nvml.survey()
                await nvml.events()
        finally:
            ended = not released.is_set()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await anyio.to_thread.run_sync(waiting.wait)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for _ in range(TURNS):
                await anyio.lowlevel.checkpoint()
        released.set()
    assert ended

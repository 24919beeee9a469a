"""Programs that use a real GPU, as processes of tests."""

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

PROGRAM: Final = Path(__file__).with_name("cuda_program.py")
ANSWER: Final = 60.0
"""Seconds; the first program on a GPU without persistence mode waits for the GPU's start."""


class CudaProgram:
    """A running program; `cuda_program.py` has its commands."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input = process.stdin
        self._output = BufferedByteReceiveStream(process.stdout)

    async def ask(self, command: str = "") -> str:
        """Send a command, if any, and return the next line: the first is about the start."""
        if command:
            await self._input.send(f"{command}\n".encode())
        with anyio.fail_after(ANSWER):
            return (await self._output.receive_until(b"\n", 4096)).decode()


@asynccontextmanager
async def cuda_process(
    gpu: str, env: Mapping[str, str] | None = None, shm: Path | None = None
) -> AsyncIterator[CudaProgram]:
    """Run a program on a GPU while the block lasts; its context may fail, see its first answer.

    Args:
        gpu: CUDA's name of the GPU.
        env: variables beside the test's own.
        shm: the folder that the program has as `/dev/shm`, which takes root.
    """
    command = [sys.executable, str(PROGRAM)]
    if shm is not None:
        mounted = 'mount --bind "$0" /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mounted, str(shm), *command]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, **(env or {})}
    process = await anyio.open_process(command, env=variables, stderr=None)
    try:
        yield CudaProgram(process)
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()


@asynccontextmanager
async def cuda_program(
    gpu: str, env: Mapping[str, str] | None = None, shm: Path | None = None
) -> AsyncIterator[CudaProgram]:
    """Run a program whose context was created."""
    async with cuda_process(gpu, env, shm) as program:
        answer = await program.ask()
        assert answer == "ready", answer
        yield program

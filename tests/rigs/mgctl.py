"""The real `mgctl` of containers, run as real processes in simulated containers."""

import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio.abc import Process, TaskGroup

from metagpu.core.model.shares import Holder
from metagpu.plugins.pod_api.frames import LENGTH
from metagpu.sim.machine.containers import SimHost

BUILD: Final = Path(__file__).parents[2] / "mgctl" / "build.py"
PROGRAMS: Final = Path(__file__).parents[2] / "metagpu" / "programs"
PROGRAM: Final = PROGRAMS / f"mgctl-{platform.machine()}"

_HOST_CGROUP: Final = "0::/user.slice/session-1.scope\n"


NOT_BUILT: Final = "mgctl is not built from this source: run `make mgctl`"


@cache
def is_built() -> bool:
    """Return whether the programs are there, and no older than their source."""
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, BUILD, "--check"], check=False, capture_output=True
    )
    return done.returncode == 0


def require_built() -> None:
    """Skip a test that needs the programs; one test fails for all where they are missing."""
    if not is_built():
        pytest.skip(NOT_BUILT)


@dataclass
class ProgramResult:
    """The output and exit status of a program."""

    status: int
    out: str
    err: str


@dataclass
class Pods:
    """Containers on one machine, as `mgctl` and its daemon see them."""

    machine: SimHost
    folder: Path
    group: TaskGroup
    running: list[Process] = field(default_factory=list)

    @asynccontextmanager
    async def started(
        self, of: Holder | None, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[Process]:
        """Run a program in a container, or on the host, while the block lasts.

        The program starts only once its process is in the container.
        """
        waiting = ["sh", "-c", 'read go && exec "$0" "$@"', *command]
        socket = {"METAGPU_SOCKET": str(self.folder / "mgctl.sock")}
        async with await anyio.open_process(waiting, env={**socket, **(env or {})}) as process:
            if of is None:
                self.machine.add_process(process.pid, _HOST_CGROUP)
            else:
                self.machine.add_container_process(process.pid, of)
            assert process.stdin is not None
            await process.stdin.send(b"\n")
            try:
                yield process
            finally:
                if process.returncode is None:
                    process.kill()

    async def mgctl(
        self, of: Holder | None, *arguments: str, env: Mapping[str, str] | None = None
    ) -> ProgramResult:
        """Run `mgctl` in a container until it ends."""
        async with self.started(of, PROGRAM, *arguments, env=env) as process:
            return await wait_ended(process)


async def wait_ended(process: Process) -> ProgramResult:
    """Wait until a program has ended; return its output."""
    output = {"out": b"", "err": b""}

    async def read(name: str) -> None:
        stream = process.stdout if name == "out" else process.stderr
        assert stream is not None
        async for part in stream:
            output[name] += part

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for name in output:
                group.start_soon(read, name)
        status = await process.wait()
    return ProgramResult(status, output["out"].decode(), output["err"].decode())


def pack_request(*arguments: str, facts: str = "mgctl/1 tty=0 columns=0 rows=0 old=0") -> bytes:
    """Return a request as `mgctl` sends it."""
    payload = b"".join(text.encode() + b"\0" for text in (facts, *arguments))
    return LENGTH.pack(len(payload)) + payload

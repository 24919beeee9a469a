"""The real `mgctl` of containers, started as real processes in containers of a test's making."""

import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import Process, TaskGroup

from metagpu.core.model import Holder
from metagpu.plugins.frames import LENGTH
from metagpu.sim.host import SimHost

BUILD: Final = Path(__file__).parents[1] / "mgctl" / "build.py"
PROGRAMS: Final = Path(__file__).parents[1] / "metagpu" / "programs"
PROGRAM: Final = PROGRAMS / f"mgctl-{platform.machine()}"

_STRANGER: Final = "0::/user.slice/session-1.scope\n"


def assert_built() -> None:
    """Fail where the programs are older than their source."""
    done = subprocess.run([sys.executable, BUILD, "--check"], check=False)  # noqa: S603 - ours
    assert done.returncode == 0, "mgctl is not built from this source: run `make mgctl`"


@dataclass
class Said:
    """What a program said until it ended."""

    status: int
    out: str
    err: str


@dataclass
class Pods:
    """Containers on one machine, as far as `mgctl` and its daemon can tell."""

    machine: SimHost
    folder: Path
    group: TaskGroup
    running: list[Process] = field(default_factory=list)

    @asynccontextmanager
    async def started(
        self, of: Holder | None, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[Process]:
        """Run a program in a container, or beside all of them, while the block lasts.

        It does nothing before it is in there.
        """
        waiting = ["sh", "-c", 'read go && exec "$0" "$@"', *command]
        socket = {"METAGPU_SOCKET": str(self.folder / "mgctl.sock")}
        async with await anyio.open_process(waiting, env={**socket, **(env or {})}) as process:
            if of is None:
                self.machine.show(process.pid, _STRANGER)
            else:
                self.machine.house(process.pid, of)
            assert process.stdin is not None
            await process.stdin.send(b"\n")
            try:
                yield process
            finally:
                if process.returncode is None:
                    process.kill()

    async def mgctl(
        self, of: Holder | None, *arguments: str, env: Mapping[str, str] | None = None
    ) -> Said:
        """Run `mgctl` in a container until it ends."""
        async with self.started(of, PROGRAM, *arguments, env=env) as process:
            return await ended(process)


async def ended(process: Process) -> Said:
    """Wait until a program has ended, and hear what it said."""
    heard = {"out": b"", "err": b""}

    async def listen(name: str) -> None:
        stream = process.stdout if name == "out" else process.stderr
        assert stream is not None
        async for part in stream:
            heard[name] += part

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for name in heard:
                group.start_soon(listen, name)
        status = await process.wait()
    return Said(status, heard["out"].decode(), heard["err"].decode())


def packed(*arguments: str, facts: str = "mgctl/1 tty=0 columns=0 rows=0 old=0") -> bytes:
    """Write a request as `mgctl` does."""
    payload = b"".join(text.encode() + b"\0" for text in (facts, *arguments))
    return LENGTH.pack(len(payload)) + payload

"""Runs the hostile process of `attacker.py` beside a test."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import Process

ATTACKER: Final = Path(__file__).with_name("attacker.py")


@dataclass
class Attacker:
    """A hostile process that waits for its command."""

    process: Process

    async def attack(self) -> str:
        """Attack; return `sent`, or `refused` where the kernel refuses."""
        assert self.process.stdin
        assert self.process.stdout
        await self.process.stdin.send(b"\n")
        with anyio.fail_after(30):
            return (await self.process.stdout.receive()).decode().strip()


@asynccontextmanager
async def attacker(kind: str, socket: Path, count: int) -> AsyncIterator[Attacker]:
    """Start a hostile process, which is there while the block lasts.

    A container sees the socket by a mount; here the folders above it are opened.
    """
    for folder in socket.parents[:-2]:
        folder.chmod(0o755)
    command = [sys.executable, "-I", "-S", str(ATTACKER), kind, str(socket), str(count)]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            yield Attacker(process)
        finally:
            process.kill()

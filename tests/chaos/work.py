"""Processes in pods' containers, and what enforcement owes them: it ends who is above, no other.

A process is a real one. Its folder in a made-up /proc names its container, and the simulated driver
counts its memory; a container's limit is computed from its devices and the tables of `node`.
"""

import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metagpu.core.model.shares import Holder
from metagpu.sim.machine.containers import SimHost
from tests.chaos.node import HEADROOM_MIB, MEMORY_MIB, PARTS, USABLE_MIB

SPARED_S: Final = 3.0
"""Seconds after a container was above its limit in which a signal may still be on its way."""
HOST: Final = """
import functools, pathlib
import metagpu.host.linux as linux
folder = pathlib.Path({folder!r})
linux.LinuxHost = functools.partial(
    linux.LinuxHost, folder / "proc", folder / "containers", folder / "cgroup"
)
"""
"""Python that gives a daemon the processes of the made-up /proc."""


class Place(NamedTuple):
    """A container's part of a GPU."""

    uid: str
    holder: Holder
    resource: str
    gpu: int
    shares: int

    @property
    def limit(self) -> int:
        """Return how much memory it may use, in MiB."""
        parts = PARTS[self.resource]
        usable = USABLE_MIB * self.shares // parts + HEADROOM_MIB
        return max(usable, MEMORY_MIB * self.shares // parts)


@dataclass
class Work:
    """All processes.

    Attributes:
        running: each with its place and its MiB, by pid.
        ended: the pid and the GPU of those of which the driver does not know it.
        above: when a container was last seen above its limit.
    """

    machine: SimHost
    running: dict[int, tuple[subprocess.Popen[bytes], Place, int]] = field(default_factory=dict)
    ended: list[tuple[int, int]] = field(default_factory=list)
    above: dict[Place, float] = field(default_factory=dict)

    def start(self, place: Place, mib: int, *, stubborn: bool) -> None:
        """Start a process, if the GPU has the memory; one that is stubborn ignores SIGTERM."""
        used = sum(held for _, at, held in self.running.values() if at.gpu == place.gpu)
        if used + mib > USABLE_MIB:
            return
        trap = "trap '' TERM; " if stubborn else ""
        process = subprocess.Popen(["/bin/sh", "-c", f"{trap}exec sleep infinity"])  # noqa: S603
        self.running[process.pid] = (process, place, mib)
        self.machine.add_container_process(process.pid, place.holder, uid=place.uid)

    def judge(self, alive: Collection[str]) -> Iterator[str]:
        """Take note of processes that ended; yield why one of them should not have."""
        now = time.monotonic()
        self.above |= dict.fromkeys(self.over(), now)
        for pid, (process, place, mib) in list(self.running.items()):
            if place.uid not in alive:
                process.kill()
            if process.poll() is None:
                continue
            del self.running[pid]
            self.ended.append((pid, place.gpu))
            shutil.rmtree(self.machine.proc / str(pid))
            if place.uid in alive and now - self.above.get(place, 0.0) > SPARED_S:
                yield f"{place.holder} was within {place.limit} MiB: its {mib} MiB were ended"

    def over(self) -> dict[Place, int]:
        """Return the containers above their limits, with their memory."""
        used = dict[Place, int]()
        for process, place, mib in self.running.values():
            if process.poll() is None:
                used[place] = used.get(place, 0) + mib
        return {place: mib for place, mib in used.items() if mib > place.limit}

    def end(self) -> None:
        """Kill all processes."""
        while self.running:
            _, (process, *_) = self.running.popitem()
            process.kill()
            process.wait()

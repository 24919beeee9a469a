"""`core.host.Host` on Linux: every read in a worker thread, every signal through a pidfd."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from signal import Signals, pidfd_send_signal
from socket import socket
from typing import Final

from anyio import CapacityLimiter, to_thread

from metagpu.core.errors import HostError
from metagpu.core.host import Container, Home, Identity, Particulars
from metagpu.core.model import Holder
from metagpu.host.homes import DEFAULT_ROOT, counts_devices, find_homes
from metagpu.host.logs import DEFAULT_FOLDER, read_containers, read_holders
from metagpu.host.peer import read_peer
from metagpu.host.process import read_boot_time, read_identity, read_particulars

_HOST_NAMESPACE: Final = 0xEFFFFFFC
"""The inode of the first pid namespace (`PROC_PID_INIT_INO` in Linux' proc_ns.h)."""
_CALLERS: Final = 4
"""Threads that look who calls."""
_REMEMBERED: Final = 1024
"""Names of containers: more than a node's pods ever are at once, so nothing is looked up twice."""


class LinuxHost:
    """See `core.host.Host`.

    Args:
        proc: where the kernel shows processes.
        logs: where the kubelet links the logs of containers.
        cgroups: where the kernel shows cgroups.
        own_pids: whether pids on GPUs are those of our own pid namespace, whichever that is: so it
            is where the GPUs are simulated.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        logs: Path = DEFAULT_FOLDER,
        cgroups: Path = DEFAULT_ROOT,
        *,
        own_pids: bool = False,
    ) -> None:
        self._proc = proc
        self._logs = logs
        self._cgroups = cgroups
        self._sees_all = own_pids
        self._holders: dict[Container, Holder] = {}
        # Several at once would wait for each other, at four times the processor time. What people
        # want to know has a place of its own: a command line may hang while its process does.
        self._identifying, self._describing = CapacityLimiter(1), CapacityLimiter(1)
        # Whoever calls too often waits for other callers, and nobody else waits for them.
        self._callers = CapacityLimiter(_CALLERS)

    async def hints(self) -> Sequence[str]:
        """Say what keeps us from knowing whose processes are whose, and how to mend it."""
        return await to_thread.run_sync(self._hints)

    async def identify(self, pids: Collection[int]) -> Mapping[int, Identity]:
        """Tell processes apart by their pids on the host; those that we cannot see are left out."""
        return await to_thread.run_sync(self._identify, pids, limiter=self._identifying)

    async def peer(self, connection: socket) -> Identity | None:
        """Identify the process that opened the other end of a unix socket."""
        if not await to_thread.run_sync(self._sees_host):
            return None
        return await to_thread.run_sync(read_peer, self._proc, connection, limiter=self._callers)

    async def describe(self, who: Collection[Identity]) -> Mapping[Identity, Particulars]:
        """Read what people want to know of processes; those that are gone are left out."""
        return await to_thread.run_sync(self._describe, who, limiter=self._describing)

    async def holders(self, containers: Collection[Container]) -> Mapping[Container, Holder]:
        """Name containers as the kubelet does; those nobody knows by name are left out."""
        unknown = [container for container in containers if container not in self._holders]
        if unknown:
            self._remember(await to_thread.run_sync(self._read_holders, unknown))
        return {one: self._holders[one] for one in containers if one in self._holders}

    async def homes(self, holders: Collection[Holder]) -> Sequence[Home]:
        """Find the cgroups of running containers by what the kubelet calls them."""
        return await to_thread.run_sync(self._find_homes, holders)

    async def signal(self, who: Identity, signal: Signals) -> bool:
        """Signal exactly this process; tell whether it was still there to get it.

        Raises:
            ValueError: if it runs in no container of a pod: that is never ours to end.
            HostError: if the kernel refuses; says what we need.
        """
        if who.container is None:
            raise ValueError(f"process {who.pid} is in no container of a pod")
        return await to_thread.run_sync(self._signal, who, signal)

    def _hints(self) -> Sequence[str]:
        hints = []
        if not self._sees_host():
            hints.append(
                "metagpu does not run in the host's pid namespace, and NVML names processes by the "
                "host's pids: nobody's can be told; set `hostPID: true` for its pod"
            )
        if not self._logs.is_dir():
            hints.append(
                f"there is no {self._logs}: containers have no names here, and their processes "
                "belong to nobody; mount the host's /var/log read-only at the same place"
            )
        return hints

    def _sees_host(self) -> bool:
        self._sees_all = self._sees_all or sees_host(self._proc)
        return self._sees_all

    def _identify(self, pids: Collection[int]) -> Mapping[int, Identity]:
        if not self._sees_host():
            return {}
        found = {pid: read_identity(self._proc, pid) for pid in pids}
        return {pid: identity for pid, identity in found.items() if identity is not None}

    def _describe(self, who: Collection[Identity]) -> Mapping[Identity, Particulars]:
        booted = read_boot_time(self._proc) if who else 0.0
        found = {one: read_particulars(self._proc, one, booted) for one in who}
        return {one: told for one, told in found.items() if told is not None}

    def _read_holders(self, containers: Collection[Container]) -> Mapping[Container, Holder]:
        try:
            return read_holders(self._logs, containers)
        except OSError:
            return {}  # `hints` says so

    def _find_homes(self, holders: Collection[Holder]) -> Sequence[Home]:
        if not counts_devices(self._cgroups):
            return ()
        try:
            containers = read_containers(self._logs, holders)
        except OSError:
            return ()  # `hints` says so
        found = find_homes(self._cgroups, containers)
        return [Home(it, containers[it], str(folder)) for it, folder in found.items()]

    def _remember(self, found: Mapping[Container, Holder]) -> None:
        self._holders.update(found)
        for oldest in list(self._holders)[:-_REMEMBERED]:
            del self._holders[oldest]

    def _signal(self, who: Identity, number: Signals) -> bool:
        try:
            process = os.pidfd_open(who.pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            raise _refused(who, number, error) from error

        try:
            # From here on the descriptor means one process, whoever gets its pid later: if it is
            # the one that was meant, nobody else can be hit.
            if read_identity(self._proc, who.pid) != who:
                return False
            pidfd_send_signal(process, number)
        except ProcessLookupError:
            return False
        except OSError as error:
            raise _refused(who, number, error) from error
        finally:
            os.close(process)
        return True


def sees_host(proc: Path) -> bool:
    """Say whether we see the pids that the host does; blocks."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == _HOST_NAMESPACE
    except OSError:
        return False


def _refused(who: Identity, number: Signals, error: OSError) -> HostError:
    return HostError(
        f"{number.name} cannot be sent to process {who.pid}: {error.strerror or error}; metagpu "
        "needs root with the capability KILL, and Linux 5.3 or newer"
    )

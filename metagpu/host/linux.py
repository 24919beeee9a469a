"""The `Host` contract on Linux: reads in worker threads, signals through pidfds."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from signal import Signals, pidfd_send_signal
from typing import Final

from anyio import CapacityLimiter, Lock, move_on_after, to_thread

from metagpu.core.contracts.host import (
    Container,
    ContainerCgroup,
    Peer,
    ProcessDetails,
    ProcessIdentity,
    StartingContainer,
)
from metagpu.core.errors import HostError
from metagpu.core.model.privileges import Privilege, privileges_in
from metagpu.core.model.shares import Holder
from metagpu.host.containers import (
    DEFAULT_FOLDER,
    DEFAULT_ROOT,
    find_container_cgroups,
    find_pods,
    is_cgroup_v2,
    is_populated,
    read_containers,
    read_holders,
    read_starting_holder,
)
from metagpu.host.processes import (
    read_boot_time,
    read_identity,
    read_peer,
    read_process_details,
    ticks_since_boot,
)

_HOST_NAMESPACE: Final = 0xEFFFFFFC
"""The inode of the first pid namespace (`PROC_PID_INIT_INO` in Linux' proc_ns.h)."""
_LONGEST_READ: Final = 2.0
"""Seconds for the details of processes."""
_CALLERS: Final = 4
"""Threads that identify callers of sockets."""
_REMEMBERED: Final = 1024
"""Cached names of containers: more than a node has at once, so each is read once."""


class _Identification:
    """One reading of processes for all callers that wait for it."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.found: Mapping[int, ProcessIdentity] | None = None


class LinuxHost:
    """Processes, containers and cgroups of this machine (`core.contracts.host.Host`).

    Args:
        proc: where the kernel shows processes.
        logs: where the kubelet links the logs of containers.
        cgroups: where the kernel shows cgroups.
        own_pids: whether pids on GPUs are of this process's pid namespace, as with simulated GPUs.
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
        self._starting: dict[Container, Holder] = {}
        """Names by the runtime, until the kubelet has made the links."""
        # Several at once would wait for each other, at four times the processor time.
        self._identifying, self._next = Lock(fast_acquire=True), _Identification()
        # Threads of their own: the read of a command line may hang while its process does.
        self._identifier, self._describing = CapacityLimiter(1), CapacityLimiter(1)
        # Callers that call too often wait for other callers, and delay nothing else.
        self._callers = CapacityLimiter(_CALLERS)

    async def hints(self) -> Sequence[str]:
        """Return the obstacles to identifying processes, each with its fix."""
        return await to_thread.run_sync(self._hints)

    def clock(self) -> int:
        """Return the present moment, in clock ticks since the boot."""
        return ticks_since_boot()

    async def identify(self, pids: Collection[int]) -> Mapping[int, ProcessIdentity]:
        """Identify processes by their pids on the host; hidden ones are left out.

        Callers that come while a thread reads share its next turn: a scrape asks for each GPU, and
        a turn costs as much as some processes.
        """
        if not pids:  # an idle GPU costs no thread's turn
            return {}
        reading = self._next
        reading.pids.update(pids)
        async with self._identifying:
            if reading.found is None:
                self._next = _Identification()
                reading.found = await to_thread.run_sync(
                    self._identify, reading.pids, limiter=self._identifier
                )
        return {pid: reading.found[pid] for pid in pids if pid in reading.found}

    async def peer(self, peer: Peer) -> ProcessIdentity | None:
        """Identify the process at the other end of a socket."""
        if not await to_thread.run_sync(self._sees_host):
            return None
        return await to_thread.run_sync(
            read_peer, self._proc, peer, self._cgroups, limiter=self._callers
        )

    async def describe(
        self, who: Collection[ProcessIdentity]
    ) -> Mapping[ProcessIdentity, ProcessDetails]:
        """Read the details of processes; ended ones are left out.

        A command line that cannot be read while its process waits for the driver costs the details.
        """
        if not who:
            return {}
        with move_on_after(_LONGEST_READ):
            return await to_thread.run_sync(
                self._describe, who, limiter=self._describing, abandon_on_cancel=True
            )
        return {}

    async def holders(self, containers: Collection[Container]) -> Mapping[Container, Holder]:
        """Return the kubelet's names of containers; those of unknown pods are left out."""
        found = {one: self._holders[one] for one in containers if one in self._holders}
        if unknown := [one for one in containers if one not in found]:
            read = await to_thread.run_sync(self._read_holders, unknown)
            # A name may still come: a container may be a moment older than its link.
            self._remember(read)
            found |= read
            found |= {one: self._starting[one] for one in unknown if one in self._starting}
        return found

    async def starting(self, container: StartingContainer) -> ContainerCgroup:
        """Find and name a container that starts; its name is known from now on."""
        found = await to_thread.run_sync(self._find_starting, container)
        if found.holder.container:
            self._starting[found.container] = found.holder
            for oldest in list(self._starting)[:-_REMEMBERED]:
                del self._starting[oldest]
        return found

    async def cgroups(self, holders: Collection[Holder]) -> Sequence[ContainerCgroup]:
        """Find the cgroups of running containers by what the kubelet calls them."""
        if self._starting:
            self._remember(await to_thread.run_sync(self._read_holders, list(self._starting)))
        starting = {one: name for one, name in self._starting.items() if name in holders}
        return await to_thread.run_sync(self._find_cgroups, holders, starting)

    async def pods(self, uids: Collection[str]) -> Collection[str]:
        """Find the pods of these that have a cgroup."""
        return await to_thread.run_sync(find_pods, self._cgroups, uids) if uids else ()

    async def signal(self, who: ProcessIdentity, signal: Signals) -> bool:
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
                "host's pids: no process has a known container; set `hostPID: true` for its pod"
            )
        if not self._logs.is_dir():
            hints.append(
                f"processes cannot be matched to containers: {self._logs} is missing; mount the "
                "host's /var/log read-only at the same place"
            )
        return hints

    def _sees_host(self) -> bool:
        self._sees_all = self._sees_all or sees_host(self._proc)
        return self._sees_all

    def _identify(self, pids: Collection[int]) -> Mapping[int, ProcessIdentity]:
        if not self._sees_host():
            return {}
        found = {pid: read_identity(self._proc, pid, self._cgroups) for pid in pids}
        return {pid: identity for pid, identity in found.items() if identity is not None}

    def _describe(
        self, who: Collection[ProcessIdentity]
    ) -> Mapping[ProcessIdentity, ProcessDetails]:
        booted = read_boot_time(self._proc)
        found = {one: read_process_details(self._proc, one, booted) for one in who}
        return {one: at for one, at in found.items() if at is not None}

    def _read_holders(self, containers: Collection[Container]) -> Mapping[Container, Holder]:
        try:
            return read_holders(self._logs, containers)
        except OSError:
            return {}  # `hints` reports it

    def _find_cgroups(
        self, holders: Collection[Holder], starting: Mapping[Container, Holder]
    ) -> Sequence[ContainerCgroup]:
        if not is_cgroup_v2(self._cgroups):
            return ()
        try:
            containers = dict(read_containers(self._logs, holders))
        except OSError:
            return ()  # `hints` says so
        containers |= starting
        found = find_container_cgroups(self._cgroups, containers)
        return [
            ContainerCgroup(container, containers[container], str(folder), is_populated(folder))
            for container, folder in found.items()
        ]

    def _find_starting(self, starts: StartingContainer) -> ContainerCgroup:
        """Find a container by the process that becomes its first.

        Raises:
            HostError: it is not a container of a pod here.
        """
        identity = self._identify([starts.pid]).get(starts.pid)
        container = identity.container if identity else None
        if container is None or container.id != starts.id:
            raise HostError(
                f"process {starts.pid} is not in the cgroup of a pod's container "
                f"{starts.id[:12]}; metagpu needs the host's pid namespace (`hostPID: true`)"
            )
        holder = read_starting_holder(self._logs, container, starts.annotations)
        if holder is None:
            raise HostError(f"nothing names the pod {container.pod_uid} of the container")
        is_new = is_cgroup_v2(self._cgroups)
        found = find_container_cgroups(self._cgroups, [container]) if is_new else {}
        path = str(found.get(container, ""))
        return ContainerCgroup(container, holder, path, hidden=is_new and not path)

    def _remember(self, found: Mapping[Container, Holder]) -> None:
        """Keep the names by the kubelet's links, which are certain."""
        certain = {one: holder for one, holder in found.items() if holder.container}
        self._holders.update(certain)
        for one in certain:
            self._starting.pop(one, None)
        for oldest in list(self._holders)[:-_REMEMBERED]:
            del self._holders[oldest]

    def _signal(self, who: ProcessIdentity, number: Signals) -> bool:
        try:
            process = os.pidfd_open(who.pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            raise _refused(who, number, error) from error

        try:
            # The descriptor stays one process's, whatever gets the pid later: if the identity
            # matches, the signal reaches no other process.
            if read_identity(self._proc, who.pid, self._cgroups) != who:
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
    """Return whether this process is in the host's pid namespace; blocks."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == _HOST_NAMESPACE
    except OSError:
        return False


def _refused(who: ProcessIdentity, number: Signals, error: OSError) -> HostError:
    return HostError(
        f"{number.name} cannot be sent to process {who.pid}: {error.strerror or error}; metagpu "
        "needs root with the capability KILL, and Linux 5.3 or newer"
    )


def held_privileges(proc: Path = Path("/proc")) -> frozenset[Privilege]:
    """Return the capabilities of this process that are in effect."""
    text = (proc / "self/status").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return privileges_in(int(found[1], 16)) if found else frozenset()

"""The contract of the host: its processes, their containers, and signals to them."""

from collections.abc import Collection, Mapping, Sequence
from signal import Signals
from typing import Protocol

import msgspec

from metagpu.core.model.shares import Holder


class Container(msgspec.Struct, frozen=True):
    """A container of a pod, as the kernel's cgroups name it.

    Attributes:
        id: the id of the container runtime, 64 hexadecimal digits.
        pod_uid: the uid of the pod, as the kubelet writes it, with dashes.
    """

    id: str
    pod_uid: str


class Peer(msgspec.Struct, frozen=True):
    """The process that opened the other end of a socket, as the kernel recorded it.

    Attributes:
        pid: in this process's pid namespace.
        pidfd: a descriptor of this very process, whatever gets its pid later.
    """

    pid: int
    pidfd: int


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process for good: a later process with the same pid has another identity.

    Attributes:
        pid: in the host's pid namespace.
        started: clock ticks from the boot to the start of the process.
        container: its container; `None` outside the containers of pods.
    """

    pid: int
    started: int
    container: Container | None


class ProcessDetails(msgspec.Struct, frozen=True):
    """The details of a process, for people.

    Attributes:
        inner_pid: its pid in the namespace of its container.
        uid: the number of its user on the host.
        command: program and arguments; in brackets the kernel's name of a process without them.
        started_at: seconds since the epoch.
        memory: resident bytes of the host's memory.
        cpu: seconds of processor time since its start.
    """

    inner_pid: int
    uid: int
    command: tuple[str, ...]
    started_at: float
    memory: int
    cpu: float


class ContainerCgroup(msgspec.Struct, frozen=True):
    """The cgroup folder (version 2) of a container that holds shares.

    Attributes:
        populated: whether a process is in it or below; an ended container may leave it empty.
        hidden: whether it cannot be seen here, and so has no path.
    """

    container: Container
    holder: Holder
    cgroup: str
    populated: bool = True
    hidden: bool = False


class StartingContainer(msgspec.Struct, frozen=True):
    """A container without a process yet: the state that its runtime gives to hooks.

    Attributes:
        id: the id of the container runtime.
        pid: the process that becomes the first one, on the host; it is in the container's cgroup.
        annotations: the runtime's, with those of the pod that its settings let through.
    """

    id: str
    pid: int
    annotations: dict[str, str] = {}


class HostProcesses(Protocol):
    """The processes of this machine. Reads happen in worker threads.

    Answers leave out processes that end while they are read.
    """

    async def hints(self) -> Sequence[str]:
        """Return what prevents the join of processes and containers, each with its fix."""
        ...

    def clock(self) -> int:
        """Return the present moment in clock ticks since the boot."""
        ...

    async def identify(self, pids: Collection[int]) -> Mapping[int, ProcessIdentity]:
        """Identify processes by their pids on the host; leave out invisible ones.

        Where the agent does not see the host's pids, the answer is empty: a process of the agent's
        own namespace with the same pid is another process.
        """
        ...

    async def describe(
        self, who: Collection[ProcessIdentity]
    ) -> Mapping[ProcessIdentity, ProcessDetails]:
        """Read the details of processes, without those that have ended."""
        ...

    async def holders(self, containers: Collection[Container]) -> Mapping[Container, Holder]:
        """Name containers as the kubelet does, without those of unknown pods.

        Where the kubelet's name fits several containers of a pod, the holder names the pod alone.
        """
        ...

    async def signal(self, who: ProcessIdentity, signal: Signals) -> bool:
        """Signal exactly this process; return whether it was still running.

        Raises:
            ValueError: if the process runs outside the containers of pods: metagpu never ends it.
            HostError: if the kernel refuses; names the missing right.
        """
        ...


class Host(HostProcesses, Protocol):
    """The processes of this machine, cgroups of containers, and peers of sockets."""

    async def peer(self, peer: Peer) -> ProcessIdentity | None:
        """Identify the process at the other end of a socket.

        `None` if the process has ended since, or is not visible, as in another pid namespace.
        """
        ...

    async def starting(self, container: StartingContainer) -> ContainerCgroup:
        """Find and name a container that starts; its name is known from now on.

        The holder names the pod alone where the name is not certain. The cgroup is empty where the
        host has none of version 2.

        Raises:
            HostError: it is not a container of a pod here.
        """
        ...

    async def cgroups(self, holders: Collection[Holder]) -> Sequence[ContainerCgroup]:
        """Find the cgroups of running containers by the kubelet's names.

        A name may have several cgroups while one pod replaces another. There are none with cgroups
        of version 1, or where cgroups are not visible.
        """
        ...

    async def pods(self, uids: Collection[str]) -> Collection[str]:
        """Find the pods of these that have a cgroup; none where cgroups are not visible."""
        ...

"""The contract of the machine beside its GPUs: its processes, whose they are, and how they end."""

from collections.abc import Collection, Mapping, Sequence
from signal import Signals
from socket import socket
from typing import Protocol

import msgspec

from metagpu.core.model import Holder


class Container(msgspec.Struct, frozen=True):
    """A container of a pod, as the kernel's cgroups name it.

    Attributes:
        id: the container runtime's, 64 hexadecimal digits.
        pod_uid: the pod's, as the kubelet writes it, with dashes.
    """

    id: str
    pod_uid: str


class Identity(msgspec.Struct, frozen=True):
    """What tells a process from every other one, also from a later one with the same pid.

    Attributes:
        pid: in the host's pid namespace.
        started: clock ticks from the boot to its start.
        container: where it runs; `None` when that is no container of a pod.
    """

    pid: int
    started: int
    container: Container | None


class Particulars(msgspec.Struct, frozen=True):
    """What people want to know of a process.

    Attributes:
        inner_pid: its pid as its own container knows it.
        uid: the user's number on the host.
        command: program and arguments; the kernel's name for it in brackets where it has none.
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


class Home(msgspec.Struct, frozen=True):
    """Where a container that holds something lives: the folder of its cgroup, of version 2."""

    container: Container
    holder: Holder
    cgroup: str


class Host(Protocol):
    """This machine's processes as metagpu needs them. Reads happen in worker threads.

    What ends while it is read is left out of the answer: it is simply gone.
    """

    async def hints(self) -> Sequence[str]:
        """Say what keeps us from knowing whose processes are whose, and how to mend it."""
        ...

    async def identify(self, pids: Collection[int]) -> Mapping[int, Identity]:
        """Tell processes apart, by their pids on the host; those that we cannot see are left out.

        Where we do not see the host's pids nobody is identified: one of ours with the same number
        is another process.
        """
        ...

    async def peer(self, connection: socket) -> Identity | None:
        """Identify the process that opened the other end of a unix socket.

        `None` when it has ended since, or we cannot see it, as from another pid namespace.
        """
        ...

    async def describe(self, who: Collection[Identity]) -> Mapping[Identity, Particulars]:
        """Read what people want to know of processes; those that are gone are left out."""
        ...

    async def holders(self, containers: Collection[Container]) -> Mapping[Container, Holder]:
        """Name containers as the kubelet does; those nobody knows by name are left out."""
        ...

    async def homes(self, holders: Collection[Holder]) -> Sequence[Home]:
        """Find the cgroups of running containers by what the kubelet calls them.

        A name may have several, while a pod takes another's place; where cgroups are of version 1,
        or not ours to see, there are none.
        """
        ...

    async def signal(self, who: Identity, signal: Signals) -> bool:
        """Signal exactly this process; tell whether it was still there to get it.

        Raises:
            ValueError: if it runs in no container of a pod: that is never ours to end.
            HostError: if the kernel refuses; says what we need.
        """
        ...

"""Who uses what: the processes on a GPU, joined with the leases of the containers they run in."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from metagpu.core.driver import GpuProcess
from metagpu.core.gpu import MIB, GpuId
from metagpu.core.host import Container, Identity
from metagpu.core.injection import memory_mib
from metagpu.core.model import FOREIGN, Holder, Share
from metagpu.core.snapshot import GpuState

Told = Mapping[tuple[str, str, GpuId], int]
"""Bytes of each GPU that containers were told, by their pod's uid and their name, where it is known
for certain."""
NOTHING_TOLD: Final[Told] = MappingProxyType({})


class Process(msgspec.Struct, frozen=True):
    """A process on a GPU.

    Attributes:
        memory: bytes of GPU memory, those of all its MIG instances together; `None` when the
            driver does not say.
        who: `None` when it cannot be seen.
    """

    pid: int
    memory: int | None
    who: Identity | None


class Usage(msgspec.Struct, frozen=True):
    """What one container has of one GPU.

    Attributes:
        pod_uid: tells a pod from an earlier one of its name; `None` when no process tells it.
        shares: what it holds of this GPU.
        processes: its processes there, the largest first.
        told: bytes that it was told, where that is known for certain.
    """

    gpu: GpuId
    holder: Holder
    pod_uid: str | None
    shares: tuple[Share, ...]
    processes: tuple[Process, ...] = ()
    told: int | None = None

    @property
    def memory(self) -> int:
        """Bytes that its processes are known to have, together: it may be more, never less."""
        return sum(process.memory or 0 for process in self.processes)

    @property
    def share(self) -> int | None:
        """Bytes that its shares stand for, as the container was told; `None` when nobody knows.

        Shares that were granted under another configuration may look like ones of today: what the
        container was told counts, where it is known.
        """
        if self.told is not None:
            return self.told
        if any(share.backend == FOREIGN or not share.memory for share in self.shares):
            return None
        return memory_mib(self.shares) * MIB


class Stranger(msgspec.Struct, frozen=True):
    """A process on a GPU that belongs to no lease of it; `why` says how we know."""

    gpu: GpuId
    process: Process
    why: str
    holder: Holder | None = None


class Account(msgspec.Struct, frozen=True):
    """Everybody on one GPU: each container that holds shares of it, used or not, and strangers."""

    gpu: GpuId
    usages: tuple[Usage, ...] = ()
    strangers: tuple[Stranger, ...] = ()


def account(
    state: GpuState,
    processes: Sequence[GpuProcess],
    identities: Mapping[int, Identity],
    names: Mapping[Container, Holder],
    told: Told = NOTHING_TOLD,
) -> Account:
    """Give every process on a GPU to the container whose it is."""
    gpu = state.gpu.id
    shares: defaultdict[Holder, list[Share]] = defaultdict(list)
    for lease in state.leases.values():
        if lease.holder is not None:
            shares[lease.holder].append(lease.share)

    housed: defaultdict[tuple[Holder, str], list[Process]] = defaultdict(list)
    strangers = []
    for process in _whole(processes, identities):
        container = process.who and process.who.container
        holder = names.get(container) if container else None
        if container and holder and holder in shares:
            housed[holder, container.pod_uid].append(process)
        else:
            strangers.append(Stranger(gpu, process, _strangeness(process, holder), holder))

    # A pod that is being replaced by another of its name may still have processes: each of the
    # two is judged by what its own have.
    usages = [
        Usage(
            gpu,
            holder,
            uid,
            tuple(shares[holder]),
            tuple(its),
            told.get((uid, holder.container, gpu)),
        )
        for (holder, uid), its in housed.items()
    ]
    used = {holder for holder, _ in housed}
    usages += [
        Usage(gpu, holder, None, tuple(held))
        for holder, held in shares.items()
        if holder not in used
    ]
    return Account(gpu, tuple(sorted(usages, key=_place)), tuple(strangers))


def _whole(
    processes: Sequence[GpuProcess], identities: Mapping[int, Identity]
) -> Sequence[Process]:
    """Sum up the instances of each process; the largest process first."""
    amounts: defaultdict[int, list[int | None]] = defaultdict(list)
    for process in processes:
        amounts[process.pid].append(process.memory)

    whole = [Process(pid, _sum(parts), identities.get(pid)) for pid, parts in amounts.items()]
    return sorted(whole, key=lambda process: (-(process.memory or 0), process.pid))


def _sum(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _strangeness(process: Process, holder: Holder | None) -> str:
    if process.who is None:
        return "it cannot be seen: it has just ended, or is in another pid namespace"
    if process.who.container is None:
        return "it is in no container of a pod"
    if holder is None:
        container = process.who.container
        return f"container {container.id[:12]} of the pod {container.pod_uid} has no name here"
    return f"{holder} holds no share of this GPU"


def _place(usage: Usage) -> tuple[str, str, str, str]:
    holder = usage.holder
    return holder.namespace, holder.pod, holder.container, usage.pod_uid or ""

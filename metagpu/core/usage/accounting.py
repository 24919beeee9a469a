"""GPU usage of containers: processes joined with the leases of their containers."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.contracts.host import Container, ProcessIdentity
from metagpu.core.grants.injection import memory_mib
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.mig import is_mig, placed_at
from metagpu.core.model.shares import UNKNOWN_BACKEND, Holder, Share, holders_of
from metagpu.core.model.snapshot import GpuState, Snapshot

PromisedMemory = Mapping[tuple[str, str, GpuId], int]
"""Bytes of each GPU that were promised to containers, by pod uid, container name and GPU.

Only amounts that are known for certain are in the mapping.
"""
NO_PROMISED_MEMORY: Final[PromisedMemory] = MappingProxyType({})


class ProcessUsage(msgspec.Struct, frozen=True):
    """GPU memory of one process.

    Attributes:
        memory: bytes of GPU memory, the sum over all MIG instances of the GPU; `None` when the
            driver does not report it.
        identity: `None` when the process has ended, or cannot be seen from this daemon.
    """

    pid: int
    memory: int | None
    identity: ProcessIdentity | None


class ContainerUsage(msgspec.Struct, frozen=True):
    """Shares and processes of one container on one GPU.

    Attributes:
        holder: the container; the pod alone where a process may be of several of its containers.
        pod_uid: distinguishes the pod from an earlier pod of the same name; `None` when no process
            of the container is on the GPU.
        shares: the shares of this GPU that the container holds.
        processes: the container's processes on the GPU, the largest first.
        promised_memory: bytes that were promised to the container, where known for certain.
    """

    gpu: GpuId
    holder: Holder
    pod_uid: str | None
    shares: tuple[Share, ...]
    processes: tuple[ProcessUsage, ...] = ()
    promised_memory: int | None = None

    @property
    def memory(self) -> int:
        """Bytes of all processes whose memory is known: a lower bound."""
        return sum(process.memory or 0 for process in self.processes)

    @property
    def share_memory(self) -> int | None:
        """Bytes that were promised to the container by its shares; `None` when unknown.

        Shares that were granted under another configuration may look like shares of the present
        one. The promised amount takes precedence where it is known.
        """
        if self.promised_memory is not None:
            return self.promised_memory
        if any(share.backend == UNKNOWN_BACKEND or not share.memory for share in self.shares):
            return None
        return memory_mib(self.shares) * MIB


class UnauthorizedProcess(msgspec.Struct, frozen=True):
    """A process on a GPU that belongs to no lease of that GPU.

    Attributes:
        reason: the evidence, as a sentence.
        holder: the container's name, `None` when it is not known.
    """

    gpu: GpuId
    process: ProcessUsage
    reason: str
    holder: Holder | None = None


class GpuUsage(msgspec.Struct, frozen=True):
    """Usage of one GPU.

    Attributes:
        containers: every container that holds shares of the GPU, also one without processes.
        unauthorized: the processes that belong to no lease.
    """

    gpu: GpuId
    containers: tuple[ContainerUsage, ...] = ()
    unauthorized: tuple[UnauthorizedProcess, ...] = ()


class HeldParts:
    """The one measure of how much of a GPU is held, from 0 to 1.

    Shares that do not exclude each other are never more than 1 together. A share of a MIG instance
    is the instance's memory slices of the GPU's, divided among the instance's shares; another one
    that is on offer is one of those of its resource; an earlier one is its memory of the GPU's.

    Attributes:
        numbers: the number of shares on offer of each resource.
    """

    def __init__(self, state: GpuState) -> None:
        self._state = state
        self._offered = {share.id: share for share in state.shares}
        self.numbers = Counter(share.resource for share in state.shares)

    def of_share(self, share: Share) -> float:
        """Return the part that a share stands for."""
        gpu = self._state.gpu
        if is_mig(share.id):
            for profile, placement in placed_at(gpu.mig_profiles, share.id):
                slices = max(at.end for each in gpu.mig_profiles for at in each.placements)
                return placement.size / slices * min(1.0, share.memory / profile.memory)
        if gpu.memory and share.memory and self._offered.get(share.id) != share:
            return min(1.0, share.memory / gpu.memory)
        return 1 / max(1, self.numbers[share.resource])

    def of_leases(self) -> float:
        """Return the part of the GPU that is held."""
        return min(1.0, sum(self.of_share(lease.share) for lease in self._state.leases.values()))

    def of_container(self, usage: ContainerUsage) -> float:
        """Return the part that a container holds, of a share of several an equal part.

        An init container has the shares of its pod's other containers, and adds nothing to them.
        """
        part = 0.0
        for share in usage.shares:
            lease = self._state.leases.get(share.id)
            holders = holders_of(lease) if lease else (usage.holder,)
            own = sum(usage.holder.covers(holder) for holder in holders)
            part += self.of_share(share) * own / max(1, len(holders))
        return part


def attribute_processes(
    state: GpuState,
    processes: Sequence[GpuProcess],
    identities: Mapping[int, ProcessIdentity],
    names: Mapping[Container, Holder],
    promised: PromisedMemory = NO_PROMISED_MEMORY,
    *,
    of_claims: Mapping[Container, Sequence[Share]] = MappingProxyType({}),
) -> GpuUsage:
    """Attribute every process on a GPU to its container. Pure.

    A pod with a process in a container of unknown name is judged as one: all its processes on the
    GPU count against all its shares of the GPU. An init container, which the kubelet lists nowhere,
    has the shares that the checkpoint names for it, and those of its claims.
    """
    gpu = state.gpu.id
    shares = _with_unlisted(state, names, of_claims)
    charged = _charged(names, shares)
    attributed: defaultdict[tuple[Holder, str], list[ProcessUsage]] = defaultdict(list)
    unauthorized = []
    for process in _merge_processes(processes, identities):
        container = process.identity.container if process.identity else None
        if container and container in charged:
            attributed[charged[container], container.pod_uid].append(process)
        else:
            known = names.get(container) if container else None
            reason = _unauthorized_reason(process, known)
            unauthorized.append(UnauthorizedProcess(gpu, process, reason, known))

    # A pod that is being replaced by another pod of the same name may still have processes: each
    # of the two pods is judged by its own processes.
    containers, active = [], set[Holder]()
    for (holder, uid), own in attributed.items():
        holders = (
            [holder] if holder in shares else [share for share in shares if holder.covers(share)]
        )
        active.update(holders)
        held = tuple(dict.fromkeys(share for sharer in holders for share in shares[sharer]))
        amounts = [promised.get((uid, sharer.container, gpu)) for sharer in holders]
        amount = None if None in amounts else _sum_known(amounts)
        containers.append(ContainerUsage(gpu, holder, uid, held, tuple(own), amount))
    containers += [
        ContainerUsage(gpu, holder, None, tuple(held))
        for holder, held in shares.items()
        if holder not in active
    ]
    return GpuUsage(gpu, tuple(sorted(containers, key=_sort_key)), tuple(unauthorized))


def allocated_shares(state: GpuState) -> Iterator[Share]:
    """Yield the shares that the checkpoint names, as granted rather than as offered."""
    offered = {share.id: share for share in state.shares}
    for share_id in state.allocated:
        if share := lease.share if (lease := state.leases.get(share_id)) else offered.get(share_id):
            yield share


def shares_of_claims(
    snapshot: Snapshot, names: Mapping[Container, Holder]
) -> Mapping[Container, Sequence[Share]]:
    """Return the shares of containers that only their Pods' claims name.

    A container that names one request of a claim counts as one that names the claim.
    """
    found = {}
    for container, holder in names.items():
        pod = snapshot.pods.by_uid.get(container.pod_uid)
        if pod is None or not pod.claims:
            continue
        if not any(holder in state.shares_by_holder for state in snapshot.gpus.values()):
            of_container = (pod.claims.get(holder.container, ()),)
            named = chain.from_iterable(of_container if holder.container else pod.claims.values())
            claims = {(pod.namespace, claim) for claim, _ in named}
            found[container] = [
                lease.share
                for claim, lease in snapshot.claim_leases
                if (claim.namespace, claim.name) in claims
            ]
    return found


def _with_unlisted(
    state: GpuState,
    names: Mapping[Container, Holder],
    of_claims: Mapping[Container, Sequence[Share]],
) -> Mapping[Holder, Sequence[Share]]:
    """Return each container's shares, also of those that the kubelet does not list."""
    if not (state.allocated or of_claims):
        return state.shares_by_holder
    shares = defaultdict[Holder, list[Share]](list)
    shares.update((holder, list(held)) for holder, held in state.shares_by_holder.items())
    unlisted = [
        (names[container], share)
        for container, claimed in of_claims.items()
        for share in claimed
        if share.gpu == state.gpu.id
    ]
    seen = {
        (process_container.pod_uid, holder.container): holder
        for process_container, holder in names.items()
    }
    for share in allocated_shares(state):
        for uid, name in state.allocated[share.id]:
            holder = seen.get((uid, name))
            if holder is None and (pod := seen.get((uid, ""))) is not None:
                holder = replace(pod, container=name)
            if holder is not None:
                unlisted.append((holder, share))
    for holder, share in unlisted:
        if share not in shares[holder]:
            shares[holder].append(share)
    return shares


def _charged(
    names: Mapping[Container, Holder], shares: Collection[Holder]
) -> Mapping[Container, Holder]:
    """Return the holder of the shares that each container's processes count against."""
    unknown = {
        (holder, process_container.pod_uid)
        for process_container, holder in names.items()
        if not holder.container
    }
    charged: dict[Container, Holder] = {}

    for container, holder in names.items():
        pod = replace(holder, container="")
        if (pod, container.pod_uid) not in unknown:
            if holder in shares:
                charged[container] = holder
        elif holders := [each for each in shares if pod.covers(each)]:
            charged[container] = pod if len(holders) > 1 else holders[0]
    return charged


def _merge_processes(
    processes: Sequence[GpuProcess], identities: Mapping[int, ProcessIdentity]
) -> Sequence[ProcessUsage]:
    """Add up the MIG instances of each process; return the largest process first."""
    amounts: defaultdict[int, list[int | None]] = defaultdict(list)
    for process in processes:
        amounts[process.pid].append(process.memory)

    merged = [
        ProcessUsage(pid, _sum_known(parts), identities.get(pid)) for pid, parts in amounts.items()
    ]
    return sorted(merged, key=lambda process: (-(process.memory or 0), process.pid))


def _sum_known(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _unauthorized_reason(process: ProcessUsage, holder: Holder | None) -> str:
    if process.identity is None:
        return "the process cannot be seen: it has ended, or is in another pid namespace"
    if process.identity.container is None:
        return "the process runs in no container of a pod"
    if holder is None:
        container = process.identity.container
        return f"container {container.id[:12]} of the pod {container.pod_uid} has no known name"
    return f"{holder} holds no share of this GPU"


def _sort_key(usage: ContainerUsage) -> tuple[str, str, str, str]:
    holder = usage.holder
    return holder.namespace, holder.pod, holder.container, usage.pod_uid or ""

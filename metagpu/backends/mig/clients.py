"""Which units of instances under MPS a container gets, and what of the instance they are. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from metagpu.backends.mig.division import MpsTerms
from metagpu.backends.mps_daemon import parts
from metagpu.backends.mps_daemon.control import Folders
from metagpu.backends.placement import Seat, placed_or_gathered
from metagpu.core.errors import OneDeviceOnly, TooManyClients
from metagpu.core.gpu import GpuId
from metagpu.core.grant import Grant
from metagpu.core.mig import slot_of
from metagpu.core.model import Lease, Share, by_gpu
from metagpu.core.snapshot import GpuState, Snapshot

Instance = tuple[GpuId, str]
"""A GPU, and the instance's profile and slice."""


def choose(
    size: int,
    available: Sequence[Share],
    required: Sequence[Share],
    snapshot: Snapshot,
    terms: MpsTerms,
) -> list[Share]:
    """Choose units of one instance that takes another client; others come last."""
    must = _by_instance(required)
    seats, sound = list[Seat](), list[Seat]()

    for gpu, those in by_gpu([*available, *required]).items():
        state = snapshot.gpus[gpu]
        whole = Counter(slot_of(it.id) for it in snapshot.offers[those[0].resource].by_gpu[gpu])
        shut, opened = state.shut, state.open_to(those[0].backend)
        for instance, free in sorted(_by_instance(those).items()):
            seat = Seat(state.gpu, whole[instance[1]], free, frozenset(must.get(instance, ())))
            seats.append(seat)
            gives = opened and not any(share.id in shut for share in free)
            if seat.required or (gives and _takes_more(instance, state, terms)):
                sound.append(seat)
    return placed_or_gathered(size, sound, seats, terms.placement, largest=size)


def check(shares: Sequence[Share], snapshot: Snapshot, terms: MpsTerms) -> None:
    """Refuse units of several instances, and one container more than an instance serves.

    Raises:
        OneDeviceOnly: saying what is free where.
        TooManyClients: saying how many there are.
    """
    taken = _by_instance(shares)
    if len(taken) > 1:
        resource = shares[0].resource
        chosen = {instance: len(those) for instance, those in taken.items()}
        raise OneDeviceOnly(
            resource,
            len(shares),
            _told(chosen, snapshot),
            _told(_free(shares[0], snapshot), snapshot),
            kind="MIG instance",
            larger="larger instances",
        )

    for instance, those in taken.items():
        state = snapshot.gpus[instance[0]]
        # What an init container had is handed on, and not one container more.
        ids = {share.id for share in those}
        others = [lease for lease in _leases(instance, state) if lease.share.id not in ids]
        most = _clients(instance, state, terms)
        if parts.containers(others) >= most:
            name = f"instance {instance[1]} of GPU {state.gpu}"
            raise TooManyClients(those[0].resource, name, most)


def as_client(grant: Grant, shares: Sequence[Share], snapshot: Snapshot, run_dir: str) -> Grant:
    """Make a container that is given an instance a client of its control daemon."""
    [(instance, held)] = _by_instance(shares).items()
    # Another pool may have divided it, under the same name.
    offered = snapshot.offers[held[0].resource].by_gpu[instance[0]]
    units = sum(slot_of(share.id) == instance[1] for share in offered)
    made = snapshot.gpus[held[0].gpu].stocks[held[0].backend].made[held[0].id]
    return parts.as_client(grant, Folders.of(run_dir, made.device), held, units)


def _by_instance(shares: Sequence[Share]) -> dict[Instance, list[Share]]:
    found: dict[Instance, list[Share]] = {}
    for share in dict.fromkeys(shares):
        found.setdefault((share.gpu, slot_of(share.id)), []).append(share)
    return found


def _leases(instance: Instance, state: GpuState) -> list[Lease]:
    return [lease for i, lease in state.leases.items() if slot_of(i) == instance[1]]


def _takes_more(instance: Instance, state: GpuState, terms: MpsTerms) -> bool:
    return parts.containers(_leases(instance, state)) < _clients(instance, state, terms)


def _clients(instance: Instance, state: GpuState, terms: MpsTerms) -> int:
    name = instance[1].rpartition("@")[0]
    profile = next(it for it in state.gpu.mig_profiles if it.name == name)
    return terms.clients(profile, state.gpu)


def _free(like: Share, snapshot: Snapshot) -> Mapping[Instance, int]:
    """Count what could be granted of each instance under a resource's name."""
    found: dict[Instance, int] = {}
    for gpu, shares in snapshot.offers[like.resource].by_gpu.items():
        state = snapshot.gpus[gpu]
        shut = state.shut | state.leases.keys()
        for instance, those in _by_instance(shares).items():
            free = sum(share.id not in shut for share in those)
            found[instance] = free if state.verdict.healthy else 0
    return found


def _told(counts: Mapping[Instance, int], snapshot: Snapshot) -> str:
    by_place = {
        (snapshot.gpus[gpu].gpu.index, slot): count for (gpu, slot), count in counts.items()
    }
    return ", ".join(
        f"GPU {index} {slot}: {count}" for (index, slot), count in sorted(by_place.items())
    )

"""The choice and the grant of units of instances under MPS. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from metagpu.backends.common.mps_daemon.client_limits import grant_to_client
from metagpu.backends.common.mps_daemon.control import MpsDirectories
from metagpu.backends.common.packing import GpuCandidate, choose_shares_or_fallback
from metagpu.backends.mig.sharing import MigMpsOptions
from metagpu.core.grants.grant import Grant
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.mig import slot_of
from metagpu.core.model.request_errors import MultipleDevices, TooManyClients
from metagpu.core.model.shares import Lease, Share, by_gpu, count_containers
from metagpu.core.model.snapshot import GpuState, Snapshot

InstanceKey = tuple[GpuId, str]
"""A GPU, and the slot of an instance on it."""


def choose_units(
    size: int,
    available: Sequence[Share],
    required: Sequence[Share],
    snapshot: Snapshot,
    options: MigMpsOptions,
) -> list[Share]:
    """Choose units of one instance that takes another client; others come last."""
    required_units = _by_instance(required)
    candidates, open_candidates = list[GpuCandidate](), list[GpuCandidate]()

    for gpu, shares in by_gpu([*available, *required]).items():
        state = snapshot.gpus[gpu]
        offered = snapshot.offers[shares[0].resource].by_gpu[gpu]
        units = Counter(slot_of(share.id) for share in offered)
        is_open = state.open_to(shares[0].backend)
        for instance, free in sorted(_by_instance(shares).items()):
            must = frozenset(required_units.get(instance, ()))
            candidate = GpuCandidate(state.gpu, units[instance[1]], free, must)
            candidates.append(candidate)
            gives = is_open and not any(share.id in state.unhealthy_shares for share in free)
            if candidate.required or (gives and _takes_more(instance, state, options)):
                open_candidates.append(candidate)
    return choose_shares_or_fallback(
        size, open_candidates, candidates, options.placement, largest=size
    )


def check_units(shares: Sequence[Share], snapshot: Snapshot, options: MigMpsOptions) -> None:
    """Refuse units of several instances, and a container too many for an instance.

    Raises:
        MultipleDevices: with the free units of each instance.
        TooManyClients: with the number of clients that the instance serves.
    """
    by_instance = _by_instance(shares)
    if len(by_instance) > 1:
        chosen = {instance: len(units) for instance, units in by_instance.items()}
        raise MultipleDevices(
            shares[0].resource,
            len(shares),
            _format_counts(chosen, snapshot),
            _format_counts(_free_units(shares[0], snapshot), snapshot),
            kind="MIG instance",
            larger="larger instances",
            most=max(
                len(units)
                for offered in snapshot.offers[shares[0].resource].by_gpu.values()
                for units in _by_instance(offered).values()
            ),
        )

    for instance, units in by_instance.items():
        state = snapshot.gpus[instance[0]]
        # The units of an init container go to the next container: no client is added.
        ids = {share.id for share in units}
        others = [lease for lease in _leases(instance, state) if lease.share.id not in ids]
        limit = _max_clients(instance, state, options)
        if count_containers(others) >= limit:
            name = f"instance {instance[1]} of GPU {state.gpu}"
            raise TooManyClients(units[0].resource, name, limit)


def grant_units(grant: Grant, shares: Sequence[Share], snapshot: Snapshot, run_dir: str) -> Grant:
    """Make the container a client of its instance's control daemon."""
    [(instance, held)] = _by_instance(shares).items()
    # Another pool may have divided the instance, under the same resource name.
    offered = snapshot.offers[held[0].resource].by_gpu[instance[0]]
    units = sum(slot_of(share.id) == instance[1] for share in offered)
    device = snapshot.gpus[held[0].gpu].provisioned[held[0].backend].devices[held[0].id]
    directories = MpsDirectories.for_device(run_dir, device.device)
    return grant_to_client(grant, directories, held, units)


def _by_instance(shares: Sequence[Share]) -> dict[InstanceKey, list[Share]]:
    found: dict[InstanceKey, list[Share]] = {}
    for share in dict.fromkeys(shares):
        found.setdefault((share.gpu, slot_of(share.id)), []).append(share)
    return found


def _leases(instance: InstanceKey, state: GpuState) -> list[Lease]:
    return [lease for i, lease in state.leases.items() if slot_of(i) == instance[1]]


def _takes_more(instance: InstanceKey, state: GpuState, options: MigMpsOptions) -> bool:
    clients = count_containers(_leases(instance, state))
    return clients < _max_clients(instance, state, options)


def _max_clients(instance: InstanceKey, state: GpuState, options: MigMpsOptions) -> int:
    name = instance[1].rpartition("@")[0]
    profile = next(it for it in state.gpu.mig_profiles if it.name == name)
    return options.clients_of(profile, state.gpu)


def _free_units(like: Share, snapshot: Snapshot) -> Mapping[InstanceKey, int]:
    """Count the units of each instance that could be granted under a resource's name."""
    found: dict[InstanceKey, int] = {}
    for gpu, shares in snapshot.offers[like.resource].by_gpu.items():
        state = snapshot.gpus[gpu]
        taken = state.unhealthy_shares | state.leases.keys()
        for instance, units in _by_instance(shares).items():
            free = sum(share.id not in taken for share in units)
            found[instance] = free if state.verdict.healthy else 0
    return found


def _format_counts(counts: Mapping[InstanceKey, int], snapshot: Snapshot) -> str:
    by_index = {
        (snapshot.gpus[gpu].gpu.index, slot): count for (gpu, slot), count in counts.items()
    }
    return ", ".join(
        f"GPU {index} {slot}: {count}" for (index, slot), count in sorted(by_index.items())
    )

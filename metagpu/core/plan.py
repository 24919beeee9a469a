"""What a change of configuration would do: one layout against another, as values."""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from metagpu.core.config import Config
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.layout import Layout
from metagpu.core.model import Lease, ResourceName, Share
from metagpu.core.sharing import strays
from metagpu.core.snapshot import Snapshot


class Change(StrEnum):
    """What happens to something.

    - untouched: nothing; a resource's list hears not one message.
    - terms: the list stays, and other terms hold from the next request on.
    - changed, added, removed: a new list, a new resource, a list that becomes empty and ends.
    """

    UNTOUCHED = "untouched"
    TERMS = "terms"
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


class ResourceChange(msgspec.Struct, frozen=True):
    """One resource before and after: how many shares, cut by which backend; `None` is not there."""

    resource: ResourceName
    change: Change
    shares: tuple[int, int]
    backend: tuple[str | None, str | None]


class GpuChange(msgspec.Struct, frozen=True):
    """One GPU before and after: its pool and the backends that may cut it.

    Attributes:
        waits_for: leases on what is not on offer afterwards: the GPU serves nobody else until they
            end, or only they keep it when it is in no pool.
    """

    gpu: Gpu
    change: Change
    pool: tuple[str | None, str | None]
    backends: tuple[tuple[str, ...], tuple[str, ...]]
    waits_for: tuple[Lease, ...]


class Plan(msgspec.Struct, frozen=True):
    """All that a change would do; `settings` are the keys of the file as a whole that differ."""

    resources: tuple[ResourceChange, ...]
    gpus: tuple[GpuChange, ...]
    settings: tuple[str, ...]


class State(msgspec.Struct, frozen=True):
    """A configuration, if there is one, and what it makes of the GPUs."""

    layout: Layout
    config: Config | None = None


def compare(snapshot: Snapshot, before: State, after: State) -> Plan:
    """Say what going from one state to the other would do to the node as it is now. Pure."""
    names = dict.fromkeys([*before.layout.backends, *after.layout.backends])
    seen = (_Side(before), _Side(after))

    return Plan(
        tuple(_resource(name, *seen) for name in names),
        tuple(_gpu(snapshot, gpu, *seen) for gpu in snapshot.gpus),
        _settings(before.config, after.config),
    )


def told(plan: Plan) -> dict[str, Any]:
    """Say a plan as plain data, for people and programs."""
    return {
        "resources": {
            each.resource: {
                "change": str(each.change),
                "before": each.shares[0],
                "after": each.shares[1],
                "backendBefore": each.backend[0],
                "backendAfter": each.backend[1],
            }
            for each in plan.resources
        },
        "gpus": [
            {
                "index": each.gpu.index,
                "uuid": each.gpu.id,
                "product": each.gpu.name,
                "change": str(each.change),
                "poolBefore": each.pool[0],
                "poolAfter": each.pool[1],
                "backendsBefore": list(each.backends[0]),
                "backendsAfter": list(each.backends[1]),
                "waitsFor": _waiting(each.waits_for),
            }
            for each in plan.gpus
        ],
        "settings": list(plan.settings),
    }


def _waiting(leases: Sequence[Lease]) -> list[dict[str, Any]]:
    """Say who has to end, each holder once for each resource."""
    counted = Counter((str(lease.holder or ""), lease.share.resource) for lease in leases)

    return [
        {"holder": holder or None, "resource": resource, "shares": count}
        for (holder, resource), count in counted.items()
    ]


class _Side:
    """One state, by resource and by GPU."""

    def __init__(self, state: State) -> None:
        self.backends = state.layout.backends
        self.pools = {each.gpu.id: each.pool for each in state.layout.assignments}
        self.rules = {
            pool.name: pool.memory_enforcement
            for pool in (state.config.envelope.pools if state.config else ())
        }
        self._layout = state.layout

    def offered(self, resource: ResourceName) -> list[Share]:
        return [share for share in self._layout.shares if share.resource == resource]

    def shares(self, gpu: GpuId) -> list[Share]:
        return [share for share in self._layout.shares if share.gpu == gpu]

    def terms(self, gpu: GpuId) -> dict[str, Any]:
        """Give what each backend of a GPU was told."""
        return {cut.backend.name: cut.options for cut in self._layout.cuts if cut.gpu.id == gpu}

    def name(self, resource: ResourceName) -> str | None:
        return self.backends[resource].name if resource in self.backends else None


def _resource(name: ResourceName, before: _Side, after: _Side) -> ResourceChange:
    old, new = before.offered(name), after.offered(name)
    change = _changed(
        was=name in before.backends,
        will=name in after.backends,
        same=old == new and before.name(name) == after.name(name),
        terms=_terms_of(before, old) == _terms_of(after, new),
    )
    return ResourceChange(name, change, (len(old), len(new)), (before.name(name), after.name(name)))


def _terms_of(side: _Side, shares: Sequence[Share]) -> list[Any]:
    """Give what the backends were told that cut these shares, GPU by GPU."""
    pairs = dict.fromkeys((share.gpu, share.backend) for share in shares)
    return [side.terms(gpu).get(backend) for gpu, backend in pairs]


def _gpu(snapshot: Snapshot, gpu: GpuId, before: _Side, after: _Side) -> GpuChange:
    state = snapshot.gpus[gpu]
    old, new = before.shares(gpu), after.shares(gpu)
    pools = before.pools.get(gpu), after.pools.get(gpu)
    backends = tuple(before.terms(gpu)), tuple(after.terms(gpu))
    change = _changed(
        was=pools[0] is not None,
        will=pools[1] is not None,
        same=old == new and pools == pools[::-1] and backends == backends[::-1],
        terms=before.terms(gpu) == after.terms(gpu)
        and before.rules.get(pools[0] or "") == after.rules.get(pools[1] or ""),
    )
    return GpuChange(state.gpu, change, pools, backends, strays(new, state.leases))


def _changed(*, was: bool, will: bool, same: bool, terms: bool) -> Change:
    if was != will:
        return Change.ADDED if will else Change.REMOVED
    if not was or (same and terms):
        return Change.UNTOUCHED
    return Change.TERMS if same else Change.CHANGED


def _settings(before: Config | None, after: Config | None) -> tuple[str, ...]:
    """Name the keys of the file as a whole, pools aside, that say something else."""
    if before is None or after is None:
        return ()
    old, new = before.envelope, after.envelope
    keys = zip(new.__struct_encode_fields__, new.__struct_fields__, strict=True)
    return tuple(
        key for key, name in keys if name != "pools" and getattr(old, name) != getattr(new, name)
    )

"""The effects of a change of configuration: one layout against another, as values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from metagpu.core.availability.conflict import orphaned_leases, shares_to_wait
from metagpu.core.config.config import Config, Pool
from metagpu.core.layout.layout import Layout, pool_of
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import Lease, ResourceName, Share, holders_of
from metagpu.core.model.snapshot import Snapshot

_POOL_SETTINGS: Final = frozenset(Pool.__struct_fields__) - {"name", "backends", "gpus", "reason"}
"""The settings of a pool, without those that choose its GPUs, and are compared as options."""


class ChangeKind(StrEnum):
    """The change of a resource or of a GPU.

    - unchanged: nothing; the list of a resource gets no message.
    - options: the list stays, and other options hold from the next request on.
    - changed, added, removed: a new list, a new resource, a list that becomes empty and ends.
    """

    UNCHANGED = "unchanged"
    OPTIONS = "options"
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


class ResourceChange(msgspec.Struct, frozen=True):
    """One resource before and after the change.

    Attributes:
        shares: the number of shares before and after.
        backend: the backend's name before and after; `None` without the resource.
    """

    resource: ResourceName
    change: ChangeKind
    shares: tuple[int, int]
    backend: tuple[str | None, str | None]


class GpuChange(msgspec.Struct, frozen=True):
    """One GPU before and after the change.

    Attributes:
        pool: the pool's name before and after; `None` without a pool.
        backends: the names of the backends before and after.
        waits_for: leases that keep the GPU, or a part of it, from other containers until they end;
            a GPU without a pool is held by them alone.
    """

    gpu: Gpu
    change: ChangeKind
    pool: tuple[str | None, str | None]
    backends: tuple[tuple[str, ...], tuple[str, ...]]
    waits_for: tuple[Lease, ...]


class LayoutDiff(msgspec.Struct, frozen=True):
    """All effects of a change of configuration.

    Attributes:
        settings: the differing keys of the configuration outside its pools.
    """

    resources: tuple[ResourceChange, ...]
    gpus: tuple[GpuChange, ...]
    settings: tuple[str, ...]


class ConfiguredLayout(msgspec.Struct, frozen=True):
    """A layout with its configuration, if there is one."""

    layout: Layout
    config: Config | None = None


def diff_layouts(
    snapshot: Snapshot, before: ConfiguredLayout, after: ConfiguredLayout
) -> LayoutDiff:
    """Return the effects that a change would have on the present node. Pure."""
    names = dict.fromkeys([*before.layout.backends, *after.layout.backends])
    sides = (_Side(before), _Side(after))

    return LayoutDiff(
        tuple(_resource_change(name, *sides) for name in names),
        tuple(_gpu_change(snapshot, gpu, *sides) for gpu in snapshot.gpus),
        _changed_settings(before.config, after.config),
    )


def to_dict(diff: LayoutDiff) -> dict[str, Any]:
    """Return a diff as plain data, for tables and JSON."""
    return {
        "resources": {
            each.resource: {
                "change": str(each.change),
                "before": each.shares[0],
                "after": each.shares[1],
                "backendBefore": each.backend[0],
                "backendAfter": each.backend[1],
            }
            for each in diff.resources
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
            for each in diff.gpus
        ],
        "settings": list(diff.settings),
    }


def _waiting(leases: Sequence[Lease]) -> list[dict[str, Any]]:
    """Return the holders whose leases have to end, once for each resource."""
    counted = Counter((holders_of(lease), lease.share.resource) for lease in leases)

    return [
        {
            "holder": str(holders[0]) if holders else None,
            **({"sharers": list(map(str, holders[1:]))} if holders[1:] else {}),
            "resource": resource,
            "shares": count,
        }
        for (holders, resource), count in counted.items()
    ]


class _Side:
    """One configured layout, by resource and by GPU."""

    def __init__(self, state: ConfiguredLayout) -> None:
        self.backends = state.layout.backends
        self.apis = state.layout.apis
        self.pools = {each.gpu.id: each.pool for each in state.layout.pool_assignments}
        self._layout, self._config = state.layout, state.config

    def offered(self, resource: ResourceName) -> list[Share]:
        return [share for share in self._layout.shares if share.resource == resource]

    def shares(self, gpu: GpuId) -> list[Share]:
        return [share for share in self._layout.shares if share.gpu == gpu]

    def options(self, gpu: GpuId) -> dict[str, Any]:
        """Return the options of each backend of a GPU."""
        return {
            each.backend.name: each.options
            for each in self._layout.backend_assignments
            if each.gpu.id == gpu
        }

    def settings(self, gpu: GpuId) -> Mapping[str, Any]:
        """Return the settings of a GPU's pool that say what is done with its GPUs."""
        pool = pool_of(self._config, self._layout, gpu) if self._config else None
        return (
            {} if pool is None else {setting: getattr(pool, setting) for setting in _POOL_SETTINGS}
        )

    def answers_as(self, resource: ResourceName) -> tuple[str | None, Api]:
        """Return the backend of a resource, and its API."""
        return self.name(resource), self.apis.get(resource, Api.DEVICE_PLUGIN)

    def name(self, resource: ResourceName) -> str | None:
        return self.backends[resource].name if resource in self.backends else None


def _resource_change(name: ResourceName, before: _Side, after: _Side) -> ResourceChange:
    old, new = before.offered(name), after.offered(name)
    change = _change_kind(
        was=name in before.backends,
        will=name in after.backends,
        same=old == new and before.answers_as(name) == after.answers_as(name),
        same_options=_options_of(before, old) == _options_of(after, new),
    )
    return ResourceChange(name, change, (len(old), len(new)), (before.name(name), after.name(name)))


def _options_of(side: _Side, shares: Sequence[Share]) -> list[Any]:
    """Return the options of the backends of these shares, GPU by GPU."""
    pairs = dict.fromkeys((share.gpu, share.backend) for share in shares)
    return [side.options(gpu).get(backend) for gpu, backend in pairs]


def _gpu_change(snapshot: Snapshot, gpu: GpuId, before: _Side, after: _Side) -> GpuChange:
    state = snapshot.gpus[gpu]
    old, new = before.shares(gpu), after.shares(gpu)
    pools = before.pools.get(gpu), after.pools.get(gpu)
    backends = tuple(before.options(gpu)), tuple(after.options(gpu))
    change = _change_kind(
        was=pools[0] is not None,
        will=pools[1] is not None,
        same=old == new and pools == pools[::-1] and backends == backends[::-1],
        same_options=before.options(gpu) == after.options(gpu)
        and before.settings(gpu) == after.settings(gpu),
    )
    waits = shares_to_wait(new, state.leases) != frozenset()
    waits_for = orphaned_leases(new, state.leases) if waits else ()
    return GpuChange(state.gpu, change, pools, backends, waits_for)


def _change_kind(*, was: bool, will: bool, same: bool, same_options: bool) -> ChangeKind:
    if was != will:
        return ChangeKind.ADDED if will else ChangeKind.REMOVED
    if not was or (same and same_options):
        return ChangeKind.UNCHANGED
    return ChangeKind.OPTIONS if same else ChangeKind.CHANGED


def _changed_settings(before: Config | None, after: Config | None) -> tuple[str, ...]:
    """Return the keys of the configuration outside its pools that differ."""
    if before is None or after is None:
        return ()
    old, new = before.root, after.root
    keys = zip(new.__struct_encode_fields__, new.__struct_fields__, strict=True)
    return tuple(
        key for key, name in keys if name != "pools" and getattr(old, name) != getattr(new, name)
    )

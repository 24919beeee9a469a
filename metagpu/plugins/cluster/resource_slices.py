"""The ResourceSlices that metagpu wrote for this node, and DeviceClasses.

A dry run says which fields the API server still drops.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2s
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from metagpu.core.availability.reasons import CORDONED, UNHEALTHY
from metagpu.core.devices.devices import (
    ExtendedResource,
    classes_of_driver,
    extended_resource_of,
    gpu_of_device,
)
from metagpu.core.devices.slices import GpuSlices, dropped_fields, sent_fields
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Fault
from metagpu.plugins.cluster.node_object import FIELD_MANAGER, KubeObject
from metagpu.plugins.cluster.watch import Informer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
_MAX_NODE: Final = 140
"""Characters of the Node in the name of a slice, which has 253 at most."""


class OwnSlices(Informer):
    """The ResourceSlices of this node that metagpu wrote, and those that another left.

    Of another are those under the driver's name: it is NVIDIA's where metagpu replaces its driver.

    Args:
        driver: returns the name of the DRA driver.
        on_change: called with the name of a slice that somebody edited, and with an empty name
            after a deletion and a list.

    Attributes:
        objects: the slices by name. The writer of one puts the answer here.
        known: whether the API server has answered yet.
        version: of the last list or watched change: an answer of before is no news.
    """

    version = 0

    def __init__(
        self,
        client: "KubeClient",
        node: str,
        driver: Callable[[], str],
        on_change: Callable[[str], None],
    ) -> None:
        super().__init__(client, SLICES, f"spec.nodeName={node}", "ResourceSlices of this node")
        self.objects: dict[str, KubeObject] = {}
        self.known = False
        self._driver = driver
        self._on_change = on_change

    async def _list(self) -> str:
        listed = await super()._list()
        self.version = int(listed)
        return listed

    def _is_known(self, item: KubeObject) -> bool:
        return is_own(item) or item["spec"]["driver"] == self._driver()

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in all slices of this node."""
        self.objects = {item["metadata"]["name"]: item for item in items if self._is_known(item)}
        self.known = True
        self._on_change("")

    def on_update(self, item: KubeObject) -> None:
        """Take in a slice that is not the one this daemon wrote last."""
        known, self.version = self.objects.get(item["metadata"]["name"]), version_of(item)
        newer = known is None or version_of(item) > version_of(known)
        if newer and (known is not None or self._is_known(item)):
            self.objects[item["metadata"]["name"]] = item
            self._on_change(item["metadata"]["name"])

    def on_delete(self, item: KubeObject) -> None:
        """Take in the deletion of a slice."""
        known, self.version = self.objects.get(item["metadata"]["name"]), version_of(item)
        if known is not None and known["metadata"].get("uid") == item["metadata"].get("uid"):
            del self.objects[item["metadata"]["name"]]
            self._on_change("")

    def in_pool(self, driver: str, pool: str) -> Mapping[str, KubeObject]:
        """Return the slices of a pool, by name."""
        return {
            name: piece
            for name, piece in self.objects.items()
            if (piece["spec"]["driver"], pool_of(piece)) == (driver, pool)
        }


class DeviceClasses(Informer):
    """The DeviceClasses that have an extended resource."""

    def __init__(self, client: "KubeClient") -> None:
        super().__init__(client, CLASSES, "", "DeviceClasses")
        self._known: dict[str, ExtendedResource] = {}

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in all DeviceClasses."""
        self._known = {}
        for item in items:
            self.on_update(item)

    def on_update(self, item: KubeObject) -> None:
        """Take in one of them; it may have lost its extended resource."""
        self.on_delete(item)
        if (found := extended_resource_of(item)) is not None:
            self._known[found.device_class] = found

    def on_delete(self, item: KubeObject) -> None:
        """Take in a deletion."""
        self._known.pop(item["metadata"]["name"], None)

    def of_driver(self, driver: str) -> Mapping[str, str]:
        """Return the class of each extended resource whose selectors name a driver."""
        return classes_of_driver(self._known.values(), driver)


def named(specs: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the slices of a pool by name: in this order the scheduler reads them.

    A hash tells pools and nodes apart whose names begin alike.
    """
    return {f"{_prefix(spec)}-{number:02d}": spec for number, spec in enumerate(specs)}


def _prefix(spec: Mapping[str, Any]) -> str:
    node, pool = spec["nodeName"][:_MAX_NODE].rstrip(".-"), spec["pool"]["name"].encode()
    return f"{spec['driver']}-{node}-{blake2s(pool, digest_size=4).hexdigest()}"


def slice_object(
    name: str, spec: Mapping[str, Any], generation: int, node: KubeObject
) -> KubeObject:
    """Return the ResourceSlice of a spec in a generation of its pool."""
    owner = {
        "apiVersion": "v1",
        "kind": "Node",
        "name": node["metadata"]["name"],
        "uid": node["metadata"]["uid"],
        "controller": True,
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "name": name,
            "labels": {_MANAGED_BY: FIELD_MANAGER},
            "ownerReferences": [owner],
        },
        "spec": {**spec, "pool": {**spec["pool"], "generation": generation}},
    }


def pool_of(item: KubeObject) -> str:
    """Return the name of a slice's pool."""
    return str(item["spec"]["pool"]["name"])


def gpus_of(spec: Mapping[str, Any]) -> list[GpuId]:
    """Return the GPUs whose counters or devices a slice has."""
    parts = (*(spec.get("sharedCounters") or ()), *(spec.get("devices") or ()))
    return list(dict.fromkeys(gpu_of_device(part["name"]) for part in parts))


def are_apart(due: Mapping[str, Mapping[str, Any]], before: Mapping[str, KubeObject]) -> bool:
    """Return whether slices may be replaced one by one in a pool that is used.

    Counters change alone, and a slice keeps its GPUs: between two writes, one would be in two.
    """
    counted = any("sharedCounters" in spec for spec in due.values())
    return len(due) <= 1 or (
        not counted
        and all(gpus_of(spec) == gpus_of(before[name]["spec"]) for name, spec in due.items())
    )


class PoolPlan(NamedTuple):
    """The next writes of a pool, all in one generation.

    Attributes:
        apart: slices that are replaced one by one, in a pool that stays complete.
        together: the steps in which slices are written that only all together are a pool.
        later: seconds until another slice may be written.
    """

    generation: int
    apart: Mapping[str, Mapping[str, Any]] = {}
    together: tuple[Mapping[str, Mapping[str, Any]], ...] = ()
    later: float | None = None


def plan_pool(
    wanted: Mapping[str, Mapping[str, Any]],
    before: Mapping[str, KubeObject],
    waits: Mapping[str, float],
) -> PoolPlan:
    """Return the writes that make a pool as wanted. Pure.

    Slices that differ are replaced in their generation. If slices come or go, or change together,
    all are written in the next generation. Nobody uses an incomplete pool: it is completed in the
    generation that it has.

    Args:
        wanted: the slices of the pool, by name.
        before: those that the API server has.
        waits: seconds until each one that differs may be written.
    """
    generation = max((1, *map(generation_of, before.values())))
    newest = {name: old for name, old in before.items() if generation_of(old) == generation}
    is_same_pool = newest.keys() <= wanted.keys() and all(
        count_of(old) == len(wanted) for old in newest.values()
    )
    missing = {name: spec for name, spec in wanted.items() if name not in newest}
    if is_same_pool and not missing:
        due = {name: wanted[name] for name, wait in waits.items() if wait <= 0}
        if are_apart(due, newest):
            later = min((wait for wait in waits.values() if wait > 0), default=None)
            return PoolPlan(generation, due, later=later)
    if not (is_same_pool and missing):
        return PoolPlan(generation + 1, together=(wanted,))
    # Last what is missing: once all are there, all are as wanted.
    differing = {name: wanted[name] for name in waits if name in newest}
    return PoolPlan(generation, together=(differing, missing))


def gpu_of_slice(item: KubeObject) -> GpuId:
    """Return the GPU of a slice that has counters or devices of one GPU."""
    return gpus_of(item["spec"])[0]


def unread_slices(
    pool: Iterable[KubeObject], monitoring: Iterable[KubeObject]
) -> dict[GpuId, GpuSlices]:
    """Return what slices say of GPUs, in order, for those that cannot be read now.

    Their devices have a taint: claims keep them, and no other gets one.
    """
    looking = {
        gpu_of_device(device["name"]): device
        for old in monitoring
        for device in old["spec"].get("devices") or ()
    }
    found: dict[GpuId, list[KubeObject]] = {}
    for old in sorted(pool, key=lambda old: str(old["metadata"]["name"])):
        for gpu in gpus_of(old["spec"]):
            found.setdefault(gpu, []).append(old)
    return {
        gpu: GpuSlices(tuple(map(_unread, _of_newest(parts))), looking[gpu])
        for gpu, parts in found.items()
        if gpu in looking
    }


def _of_newest(parts: Sequence[KubeObject]) -> list[KubeObject]:
    newest = max(map(generation_of, parts))
    return [old for old in parts if generation_of(old) == newest]


def _unread(item: KubeObject) -> Mapping[str, Any]:
    """Return what one slice has in its pool, with a taint on each device."""
    spec = item["spec"]
    if not spec.get("devices"):
        return {"sharedCounters": spec["sharedCounters"]}
    taint = {"key": UNHEALTHY, "value": Fault.NO_ANSWER, "effect": "NoSchedule"}
    return {"devices": [{**device, "taints": [taint]} for device in spec["devices"]]}


def count_of(item: KubeObject) -> int:
    """Return how many slices the pool of a slice has."""
    return int(item["spec"]["pool"].get("resourceSliceCount") or 0)


def generation_of(item: KubeObject) -> int:
    """Return the generation of a slice in its pool."""
    return int(item["spec"]["pool"].get("generation") or 0)


def is_own(item: KubeObject) -> bool:
    """Return whether metagpu wrote a slice."""
    labels = item["metadata"].get("labels") or {}
    return labels.get(_MANAGED_BY) == FIELD_MANAGER


def version_of(item: KubeObject) -> int:
    """Return the version of an object."""
    return int(item["metadata"].get("resourceVersion") or 0)


_NEEDED: Final = frozenset(("sharedCounters", "consumesCounters", "allowMultipleAllocations"))
"""Fields without which the scheduler would allocate devices that exclude each other."""
_PROBE: Final = "-probe"
"""The end of the names of slices that are sent by a dry run, and never stored."""


def has_needed(paths: Iterable[str]) -> bool:
    """Return whether one of the fields is needed wherever fractions are published."""
    return any(path.rpartition(".")[2] in _NEEDED for path in paths)


async def find_still_dropped(
    client: "KubeClient", slices: Iterable[KubeObject], dropped: Sequence[str]
) -> tuple[str, ...]:
    """Return which dropped fields the API server still drops; all, if a needed one is.

    As few slices are sent as have all of these fields. A field that no slice has is still dropped:
    a cluster without taints shows so only while a device has one.

    Raises:
        ClusterError: the API server does not answer, or a webhook supports no dry run.
    """
    sent, found = set[str](), set[str]()
    for piece in slices:
        probe = probe_of(piece)
        fields = {
            path
            for path in sent_fields(probe["spec"]) - sent
            if path in dropped or has_needed((path,))
        }
        if not fields:
            continue
        answer = await client.call("POST", SLICES, query={"dryRun": "All"}, body=probe)
        sent |= fields
        found.update(dropped_fields(probe["spec"], answer["spec"]))
        if has_needed(found):
            return tuple(dropped)
    return tuple(path for path in dropped if path in found or path not in sent)


def probe_of(wanted: KubeObject) -> KubeObject:
    """Return a slice for a dry run: one more device has a taint, since often none has."""
    metadata, spec = dict(wanted["metadata"]), dict(wanted["spec"])
    metadata["name"] += _PROBE
    if devices := spec.get("devices"):
        taint = {"key": CORDONED, "effect": "NoSchedule"}
        spec["devices"] = [*devices[:-1], {**devices[-1], "taints": [taint]}]
    return {**wanted, "metadata": metadata, "spec": spec}

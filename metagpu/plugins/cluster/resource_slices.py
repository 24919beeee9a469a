"""The ResourceSlices that metagpu wrote for this node, and their dry runs.

A dry run says which fields the API server still drops.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from metagpu.core.availability.reasons import CORDONED
from metagpu.core.devices.slices import dropped_fields, sent_fields
from metagpu.plugins.cluster.node_object import FIELD_MANAGER, KubeObject
from metagpu.plugins.cluster.watch import Informer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
_MAX_NODE: Final = 140
"""Characters of the Node in the name of a slice, which has 253 at most."""


class OwnSlices(Informer):
    """The ResourceSlices of this node that metagpu wrote, under any driver's name.

    Args:
        on_change: called with the pool of a slice that somebody edited, and with an empty name
            after a deletion and a list.

    Attributes:
        objects: the slices by name. The writer of one puts the answer here.
        known: whether the API server has answered yet.
    """

    def __init__(self, client: "KubeClient", node: str, on_change: Callable[[str], None]) -> None:
        super().__init__(client, SLICES, f"spec.nodeName={node}", "ResourceSlices of this node")
        self.objects: dict[str, KubeObject] = {}
        self.known = False
        self._on_change = on_change

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in all slices of this node."""
        self.objects = {it["metadata"]["name"]: it for it in items if is_own(it)}
        self.known = True
        self._on_change("")

    def on_update(self, item: KubeObject) -> None:
        """Take in a slice that is not the one this daemon wrote last."""
        known = self.objects.get(item["metadata"]["name"])
        newer = known is None or _version(item) > _version(known)
        if newer and (known is not None or is_own(item)):
            self.objects[item["metadata"]["name"]] = item
            self._on_change(pool_of(item))

    def on_delete(self, item: KubeObject) -> None:
        """Take in the deletion of a slice."""
        known = self.objects.get(item["metadata"]["name"])
        if known is not None and known["metadata"].get("uid") == item["metadata"].get("uid"):
            del self.objects[item["metadata"]["name"]]
            self._on_change("")

    def in_pool(self, driver: str, pool: str) -> Mapping[str, KubeObject]:
        """Return the slices of a pool, by name."""
        return {
            name: it
            for name, it in self.objects.items()
            if (it["spec"]["driver"], pool_of(it)) == (driver, pool)
        }


def slice_name(spec: Mapping[str, Any], number: int) -> str:
    """Return the name of a slice; the scheduler reads the slices of a pool by name."""
    node, _, gpu = spec["pool"]["name"].rpartition("/")
    return f"{spec['driver']}-{node[:_MAX_NODE].rstrip('.-')}-{gpu}-{number:02d}"


def slice_object(
    spec: Mapping[str, Any], number: int, generation: int, node: KubeObject
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
            "name": slice_name(spec, number),
            "labels": {_MANAGED_BY: FIELD_MANAGER},
            "ownerReferences": [owner],
        },
        "spec": {**spec, "pool": {**spec["pool"], "generation": generation}},
    }


def pool_of(item: KubeObject) -> str:
    """Return the name of a slice's pool."""
    return str(item["spec"]["pool"]["name"])


def generation_of(item: KubeObject) -> int:
    """Return the generation of a slice in its pool."""
    return int(item["spec"]["pool"].get("generation") or 0)


def is_own(item: KubeObject) -> bool:
    """Return whether metagpu wrote a slice."""
    labels = item["metadata"].get("labels") or {}
    return labels.get(_MANAGED_BY) == FIELD_MANAGER


def _version(item: KubeObject) -> int:
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
    for it in slices:
        probe = _probe_of(it)
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


def _probe_of(wanted: KubeObject) -> KubeObject:
    """Return a slice for a dry run: one more device has a taint, since often none has."""
    metadata, spec = dict(wanted["metadata"]), dict(wanted["spec"])
    metadata["name"] += _PROBE
    if devices := spec.get("devices"):
        taint = {"key": CORDONED, "effect": "NoSchedule"}
        spec["devices"] = [*devices[:-1], {**devices[-1], "taints": [taint]}]
    return {**wanted, "metadata": metadata, "spec": spec}

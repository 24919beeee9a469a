"""The ResourceSlices of this node at the API server: those that metagpu wrote."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

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

"""The ResourceSlices that metagpu wrote for this node, and their dry runs.

A dry run says which fields the API server still drops.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2s
from typing import TYPE_CHECKING, Any, Final

from metagpu.core.availability.reasons import CORDONED
from metagpu.core.devices.devices import gpu_of_device
from metagpu.core.devices.slices import dropped_fields, sent_fields
from metagpu.core.model.gpu import GpuId
from metagpu.plugins.cluster.node_object import FIELD_MANAGER, KubeObject
from metagpu.plugins.cluster.watch import Informer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

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
    """

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

    def _is_known(self, item: KubeObject) -> bool:
        return is_own(item) or item["spec"]["driver"] == self._driver()

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in all slices of this node."""
        self.objects = {item["metadata"]["name"]: item for item in items if self._is_known(item)}
        self.known = True
        self._on_change("")

    def on_update(self, item: KubeObject) -> None:
        """Take in a slice that is not the one this daemon wrote last."""
        known = self.objects.get(item["metadata"]["name"])
        newer = known is None or _version(item) > _version(known)
        if newer and (known is not None or self._is_known(item)):
            self.objects[item["metadata"]["name"]] = item
            self._on_change(item["metadata"]["name"])

    def on_delete(self, item: KubeObject) -> None:
        """Take in the deletion of a slice."""
        known = self.objects.get(item["metadata"]["name"])
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


def gpu_of_slice(item: KubeObject) -> GpuId:
    """Return the GPU of a slice that has counters or devices of one GPU."""
    spec = item["spec"]
    return gpu_of_device((spec.get("sharedCounters") or spec["devices"])[0]["name"])


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

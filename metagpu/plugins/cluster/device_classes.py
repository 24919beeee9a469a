"""The DeviceClasses of the cluster: resources that pods may request in `limits`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.watch import Informer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"


class _Class(msgspec.Struct, frozen=True):
    resource: str
    created: str
    selectors: str


class DeviceClasses(Informer):
    """The DeviceClasses that have an extended resource."""

    def __init__(self, client: "KubeClient") -> None:
        super().__init__(client, CLASSES, "", "DeviceClasses")
        self._known: dict[str, _Class] = {}

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in all DeviceClasses."""
        self._known = {}
        for it in items:
            self.on_update(it)

    def on_update(self, item: KubeObject) -> None:
        """Take in one of them; it may have lost its extended resource."""
        self.on_delete(item)
        metadata, spec = item["metadata"], item.get("spec") or {}
        if resource := spec.get("extendedResourceName"):
            created = str(metadata.get("creationTimestamp") or "")
            found = _Class(resource, created, _expressions(spec))
            self._known[metadata["name"]] = found

    def on_delete(self, item: KubeObject) -> None:
        """Take in a deletion."""
        self._known.pop(item["metadata"]["name"], None)

    def of_driver(self, driver: str) -> Mapping[str, str]:
        """Return the class of each extended resource whose selectors name a driver.

        Of two classes with one resource the scheduler takes the younger.
        """
        oldest_first = sorted(self._known.items(), key=lambda it: it[1].created)
        return {
            it.resource: name
            for name, it in oldest_first
            if any(quoted in it.selectors for quoted in (f"'{driver}'", f'"{driver}"'))
        }


def _expressions(spec: KubeObject) -> str:
    """Return the CEL expressions of a class, as they are written."""
    return "\n".join(it.get("cel", {}).get("expression", "") for it in spec.get("selectors") or ())

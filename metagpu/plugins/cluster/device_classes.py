"""The DeviceClasses of the cluster: resources that pods may request in `limits`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from metagpu.core.devices.extended_resources import (
    ExtendedResource,
    classes_of_driver,
    extended_resource_of,
)
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.watch import Informer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"


class DeviceClasses(Informer):
    """The DeviceClasses that have an extended resource."""

    def __init__(self, client: "KubeClient") -> None:
        super().__init__(client, CLASSES, "", "DeviceClasses")
        self._known: dict[str, ExtendedResource] = {}

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in all DeviceClasses."""
        self._known = {}
        for it in items:
            self.on_update(it)

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

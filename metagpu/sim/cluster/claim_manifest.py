"""Manifests of ResourceClaims and their pods, as users write them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.sim.machine.bounds import check_name, check_range

REQUEST: Final = "gpu"
"""The name of the only request of a claim without a file."""
_MAX_COUNT: Final = 32


class ClaimManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim with one request, and the pod of its name that uses it.

    Attributes:
        device_class: the DeviceClass of the request.
        count: the number of devices.
        capacity: the requested amount of each capacity.
        selectors: expressions in CEL that the devices fulfil.
    """

    name: str
    device_class: str
    count: int = 1
    capacity: Mapping[str, str] = {}
    selectors: tuple[str, ...] = ()
    namespace: str = "default"

    def documents(self) -> Sequence[Mapping[str, Any]]:
        """Return the ResourceClaim and the Pod.

        Raises:
            SimError: a name or a number is not valid.
        """
        check_name("the claim", self.name)
        check_name("the namespace", self.namespace)
        check_range("the number of devices", self.count, 1, _MAX_COUNT)
        exactly: dict[str, Any] = {"deviceClassName": self.device_class, "count": self.count}
        if self.capacity:
            exactly["capacity"] = {"requests": dict(self.capacity)}
        if self.selectors:
            exactly["selectors"] = [
                {"cel": {"expression": selector}} for selector in self.selectors
            ]
        return claim_with_pod(self.name, {"exactly": exactly}, self.namespace)


def claim_with_pod(
    name: str, request: Mapping[str, Any], namespace: str = "default"
) -> Sequence[Mapping[str, Any]]:
    """Return a ResourceClaim with one request, and the Pod of its name that uses it."""
    metadata = {"name": name, "namespace": namespace}
    containers = [{"name": "main", "resources": {"claims": [{"name": REQUEST}]}}]
    used = [{"name": REQUEST, "resourceClaimName": name}]
    return [
        {
            "kind": "ResourceClaim",
            "metadata": metadata,
            "spec": {"devices": {"requests": [{"name": REQUEST, **request}]}},
        },
        {
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"resourceClaims": used, "containers": containers},
        },
    ]

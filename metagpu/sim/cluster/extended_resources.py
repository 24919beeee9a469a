"""The claim that the scheduler makes of names in `limits` of DeviceClasses. Pure.

As kube-scheduler 1.36.3 does (`extendeddynamicresources.go`): one claim for a pod, with a request
for each container and name. Ordinary init containers reuse the devices of later containers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import NAMESPACE_OID, uuid5

import msgspec
from msgspec.structs import replace

from metagpu.sim.apiserver.objects import Key, Object

_OF_CLASS: Final = "deviceclass.resource.kubernetes.io/"
"""The prefix of the name that each DeviceClass has without an `extendedResourceName`."""
_ANNOTATION: Final = "resource.kubernetes.io/extended-resource-claim"


class _Request(msgspec.Struct, frozen=True):
    name: str
    count: int
    device_class: str

    @property
    def document(self) -> Mapping[str, Any]:
        exactly = {
            "deviceClassName": self.device_class,
            "allocationMode": "ExactCount",
            "count": self.count,
        }
        return {"name": self.name, "exactly": exactly}


class _Use(msgspec.Struct, frozen=True):
    """A container gets the devices of a request for a resource."""

    container: str
    resource: str
    request: str


class ExtendedClaim(msgspec.Struct, frozen=True):
    """The claim of a pod, before it is created.

    Attributes:
        status: what the pod's status says of it.
    """

    key: Key
    claim: Object
    status: Mapping[str, Any]


def class_of_names(classes: Iterable[Object]) -> Mapping[str, str]:
    """Return the class of each name in `limits`: the younger, then the lower name."""
    found: dict[str, str] = {}
    by_name = sorted(classes, key=lambda each: str(each["metadata"]["name"]), reverse=True)
    for each in sorted(
        by_name, key=lambda each: str(each["metadata"].get("creationTimestamp") or "")
    ):
        name = str(each["metadata"]["name"])
        found[_OF_CLASS + name] = name
        if resource := (each.get("spec") or {}).get("extendedResourceName"):
            found[resource] = name
    return found


def served_names(
    requests: Mapping[str, int], classes: Mapping[str, str], allocatable: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the class of each name that a pod requests and the Node has no amount of."""
    return {
        name: classes[name]
        for name, count in requests.items()
        if count and name in classes and str(allocatable.get(name, 0)) == "0"
    }


def extended_claim(pod: Object, served: Mapping[str, str]) -> ExtendedClaim | None:
    """Return the claim of a pod for the names that classes serve, `None` without one."""
    if not served:
        return None
    metadata, spec = pod["metadata"], pod["spec"]
    first = spec.get("initContainers") or ()
    containers = [*first, *(spec.get("containers") or ())]
    requests: list[_Request] = []
    uses: list[_Use] = []
    for resource, device_class in sorted(served.items()):
        of_resource, its = _requests(containers, len(first), resource, device_class)
        requests += of_resource
        uses += its
    suffix = uuid5(NAMESPACE_OID, metadata["uid"]).hex[:5]  # the same in each message of the pod
    name = f"{metadata['name']}-extended-resources-{suffix}"
    owner = {"kind": "Pod", "name": metadata["name"], "uid": metadata["uid"], "controller": True}
    claim = {
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "annotations": {_ANNOTATION: "true"},
            "ownerReferences": [{"apiVersion": "v1", **owner}],
        },
        "spec": {
            "devices": {
                "requests": [
                    request.document for request in sorted(requests, key=lambda one: one.name)
                ]
            }
        },
        "status": {},
    }
    mappings = [
        {"containerName": use.container, "resourceName": use.resource, "requestName": use.request}
        for use in uses
    ]
    status = {"resourceClaimName": name, "requestMappings": mappings}
    key = ("resourceclaims", metadata["namespace"], name)
    return ExtendedClaim(key, claim, {"extendedResourceClaimStatus": status})


def _requests(
    containers: Sequence[Object], first: int, resource: str, device_class: str
) -> tuple[Sequence[_Request], Sequence[_Use]]:
    """Return the requests of a pod for one name, and who uses them.

    Args:
        containers: the init containers, then the others.
        first: the number of init containers.
        resource: the name.
        device_class: serves it.
    """
    passing = {
        index
        for index, container in enumerate(containers[:first])
        if container.get("restartPolicy") != "Always"
    }
    lasting: dict[int, _Request] = {}
    uses: list[_Use] = []
    for index, container in enumerate(containers):
        if index not in passing:
            made, its = _of_container(index, container, resource, device_class, ())
            uses += its
            if made is not None:
                lasting[index] = made

    brief: list[_Request] = []
    brief_uses: list[_Use] = []
    for index in sorted(passing):
        later = [request for place, request in lasting.items() if place > index]
        made, its = _of_container(index, containers[index], resource, device_class, later)
        brief_uses += its
        brief += [made] if made is not None else []
    if brief:
        largest = max(brief, key=lambda request: request.count)  # the first of equals
        names = {request.name for request in brief}
        brief_uses = [
            replace(use, request=largest.name) if use.request in names else use
            for use in brief_uses
        ]
        brief = [largest]
    return [*brief, *lasting.values()], [*uses, *brief_uses]


def _of_container(
    index: int, container: Object, resource: str, device_class: str, reusable: Iterable[_Request]
) -> tuple[_Request | None, Sequence[_Use]]:
    """Return a container's request, beyond those of later ones that it uses first."""
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    wanted = int(amounts.get(resource, 0))
    if not wanted:
        return None, ()

    def use(request: str) -> _Use:
        return _Use(container["name"], resource, request)

    uses: list[_Use] = []
    for request in reusable:
        wanted -= request.count
        uses.append(use(request.name))
        if wanted <= 0:
            return None, uses
    name = f"container-{index}-request-{sorted(amounts).index(resource)}"
    return _Request(name, wanted, device_class), [*uses, use(name)]


def extended_uses(pod: Object) -> Iterator[tuple[str, str, str]]:
    """Yield container, claim and request of each name that a claim serves."""
    status = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    for mapping in status.get("requestMappings") or ():
        yield mapping["containerName"], status["resourceClaimName"], mapping["requestName"]

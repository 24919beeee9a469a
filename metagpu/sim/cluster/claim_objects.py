"""ResourceClaims and their classes as objects of the API server. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

from metagpu.plugins.dra.retries import claim_names
from metagpu.sim.allocation.allocator import AllocationResult
from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.cluster.pod_objects import ENDED, Patch, phase_of

DRIVER: Final = "gpu.metagpu.io"
_NVIDIA: Final = "gpu.nvidia.com"
_WHOLE_OF_NVIDIA: Final = "gpu.nvidia.com"
"""NVIDIA's class of whole GPUs, which serves `nvidia.com/gpu` in `limits`."""
_TYPES: Final = ("gpu", "fraction", "timeslice", "mps", "mig", "monitor")
_POD_CLAIM: Final = "resource.kubernetes.io/pod-claim-name"


def device_classes(driver: str = DRIVER) -> Iterator[tuple[Key, Object]]:
    """Yield the DeviceClasses that the chart brings for a driver, with their keys."""
    classes = {f"{kind}.metagpu.io": kind for kind in _TYPES}
    if driver == _NVIDIA:
        classes |= {f"{kind}.nvidia.com": kind for kind in ("gpu", "mig")}
    for name, kind in classes.items():
        expression = (
            f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'"
        )
        spec: dict[str, Any] = {"selectors": [{"cel": {"expression": expression}}]}
        if name == _WHOLE_OF_NVIDIA:
            spec["extendedResourceName"] = "nvidia.com/gpu"
        content = {"metadata": {}, "spec": spec}
        yield ("deviceclasses", "", name), content


def claim_key(claim: Object) -> Key:
    """Return the key of a ResourceClaim."""
    metadata = claim["metadata"]
    return "resourceclaims", metadata["namespace"], metadata["name"]


def claims_of(pod: Object) -> Sequence[Key]:
    """Return the keys of a Pod's claims that have been made."""
    return [("resourceclaims", pod["metadata"]["namespace"], name) for name in claim_names(pod)]


def unmade_claims(pod: Object) -> Sequence[Mapping[str, str]]:
    """Return the entries of a Pod for which a claim has to be made from a template."""
    statuses = pod.get("status", {}).get("resourceClaimStatuses") or ()
    made = {status["name"] for status in statuses}
    return [
        claim
        for claim in pod["spec"].get("resourceClaims") or ()
        if "resourceClaimTemplateName" in claim and claim["name"] not in made
    ]


def claim_of_template(
    pod: Object, entry: Mapping[str, str], template: Object
) -> tuple[str, Object]:
    """Return the name and the content of a claim that a template gives a Pod."""
    metadata = pod["metadata"]
    owner = {"kind": "Pod", "name": metadata["name"], "uid": metadata["uid"], "controller": True}
    content = {
        "metadata": {
            "annotations": {_POD_CLAIM: entry["name"]},
            "ownerReferences": [{"apiVersion": "v1", **owner}],
        },
        "spec": template["spec"]["spec"],
        "status": {},
    }
    return f"{metadata['name']}-{entry['name']}-{uuid4().hex[:5]}", content


def made_from_template(pod: Object, entry: str, claim: str) -> Patch:
    """Return the status of a Pod one of whose claims has been made."""
    statuses = pod["status"].get("resourceClaimStatuses") or ()
    return {
        "status": {
            "resourceClaimStatuses": [*statuses, {"name": entry, "resourceClaimName": claim}]
        }
    }


def allocated(
    results: Iterable[AllocationResult], claim: Object, classes: Mapping[str, Object], node: str
) -> Patch:
    """Return the status of a claim that has devices."""
    found = list(results)
    on_node = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "status": {
            "allocation": {
                "devices": {
                    "results": [_result(result) for result in found],
                    "config": list(_config(found, claim, classes)),
                },
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [on_node]}]},
            }
        }
    }


def reserved(claim: Object, pod: Object) -> Patch:
    """Return the status of a claim that one more Pod uses."""
    users = (claim.get("status") or {}).get("reservedFor") or ()
    user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    return {"status": {"reservedFor": [*users, user]}}


def released(claim: Object, pods: Iterable[Object]) -> Patch | None:
    """Return a claim's status without the Pods that have ended, `None` if it stays.

    Without a Pod it has no devices.
    """
    users = (claim.get("status") or {}).get("reservedFor") or ()
    running = {pod["metadata"]["uid"] for pod in pods if phase_of(pod) not in ENDED}
    left = [user for user in users if user["uid"] in running]
    if len(left) == len(users):
        return None
    return {
        "status": {
            "reservedFor": left or None,
            **({} if left else {"allocation": None, "devices": None}),
        }
    }


def _result(result: AllocationResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "request": result.request,
        "driver": result.id.driver,
        "pool": result.id.pool,
        "device": result.id.device,
    }
    if result.consumed is not None:
        found |= {"shareID": str(uuid4()), "consumedCapacity": dict(result.consumed)}
    if result.tolerations:
        found["tolerations"] = list(result.tolerations)
    return found


def _config(
    results: Sequence[AllocationResult], claim: Object, classes: Mapping[str, Object]
) -> Iterator[dict[str, Any]]:
    """Yield the driver's parameters: those of the classes, then those of the claim."""
    for kind in dict.fromkeys(result.device_class for result in results):
        requests = dict.fromkeys(
            result.request for result in results if result.device_class == kind
        )
        for config in (classes[kind].get("spec") or {}).get("config") or ():
            yield {**config, "source": "FromClass", "requests": list(requests)}
    names = {result.request for result in results} | {
        result.request.partition("/")[0] for result in results
    }
    for config in claim["spec"]["devices"].get("config") or ():
        if not config.get("requests") or not names.isdisjoint(config["requests"]):
            yield {**config, "source": "FromClaim"}

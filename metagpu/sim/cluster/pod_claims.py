"""The claims of pods, between the API server and the kubelet's DRA manager."""

from collections.abc import Mapping, Sequence
from typing import Any

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.kubelet.claims import ClaimPrepareError, ClaimUse, PodClaims


def pod_claims(pod: Object, objects: Mapping[Key, Object]) -> PodClaims:
    """Return the claims of a pod as its kubelet prepares them.

    Raises:
        ClaimPrepareError: a claim is gone, or not reserved for the pod.
    """
    metadata = pod["metadata"]
    names = _claim_names(pod)
    refs, drivers = {}, {}
    for entry, name in names.items():
        claim = objects.get(("resourceclaims", metadata["namespace"], name))
        if claim is None:
            raise ClaimPrepareError(f'resourceclaims.resource.k8s.io "{name}" not found')
        status = claim.get("status") or {}
        if metadata["uid"] not in {it["uid"] for it in status.get("reservedFor") or ()}:
            raise ClaimPrepareError(f"ResourceClaim {name} is not reserved for the pod")
        refs[entry] = ResourceClaimRef(metadata["namespace"], name, claim["metadata"]["uid"])
        results = status["allocation"]["devices"]["results"]
        drivers[refs[entry]] = tuple(dict.fromkeys(it["driver"] for it in results))
    containers = {it["name"]: _uses(it, refs) for it in pod["spec"]["containers"]}
    return PodClaims(metadata["uid"], drivers, containers)


def _claim_names(pod: Object) -> Mapping[str, str]:
    """Return the name of each claim by its entry in the Pod."""
    made = pod["status"].get("resourceClaimStatuses") or ()
    entries = [*(pod["spec"].get("resourceClaims") or ()), *made]
    return {it["name"]: it["resourceClaimName"] for it in entries if it.get("resourceClaimName")}


def _uses(container: Mapping[str, Any], refs: Mapping[str, ResourceClaimRef]) -> Sequence[ClaimUse]:
    used = (container.get("resources") or {}).get("claims") or ()
    return [ClaimUse(refs[it["name"]], it.get("request", "")) for it in used if it["name"] in refs]

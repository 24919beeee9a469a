"""ResourceClaims of a Pod: which container names which request."""

from collections import defaultdict
from collections.abc import Mapping

from metagpu.plugins.cluster.node_object import KubeObject


def requests_by_container(item: KubeObject) -> Mapping[str, frozenset[tuple[str, str]]]:
    """Return claim and request of each container; an empty request is the whole claim.

    The claim of extended resources is in the status alone.
    """
    spec, status = item.get("spec") or {}, item.get("status") or {}
    extended = status.get("extendedResourceClaimStatus") or {}
    if not spec.get("resourceClaims") and not extended:
        return {}
    statuses = status.get("resourceClaimStatuses") or ()
    made = {it["name"]: it.get("resourceClaimName") for it in statuses}
    names = {
        it["name"]: it.get("resourceClaimName") or made.get(it["name"])
        for it in spec.get("resourceClaims") or ()
    }
    found = defaultdict[str, set[tuple[str, str]]](set)
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for it in (container.get("resources") or {}).get("claims") or ():
            if name := names.get(it["name"]):
                found[container["name"]].add((name, it.get("request") or ""))
    for it in extended.get("requestMappings") or ():
        found[it["containerName"]].add((extended["resourceClaimName"], it["requestName"]))
    return {container: frozenset(those) for container, those in found.items()}

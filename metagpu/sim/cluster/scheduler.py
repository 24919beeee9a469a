"""The simulated scheduler's decisions, for a cluster of one node. Pure.

It counts as kube-scheduler's NodeResourcesFit: for each resource name, the Node's allocatable minus
the requests of the pods that are bound and have not ended. It knows no device, no GPU and no health
of either. Before it, taints and node labels are checked; after it, ResourceClaims get their
devices. A pod is tried again whenever an object changes.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from metagpu.core.model.quantities import whole_number
from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.cluster.claim_scheduler import ClaimFit, ClaimScheduler
from metagpu.sim.cluster.pod_objects import (
    ENDED,
    key_of,
    node_of,
    phase_of,
    requests_of,
)
from metagpu.translation.affinity import NodeSelection, required_terms, tolerates


class SchedulingDecision(msgspec.Struct, frozen=True):
    """The decision on one pod: its node, or why there is none for it.

    Attributes:
        claims: how its ResourceClaims change, and which is made.
    """

    pod: Key
    node: str = ""
    message: str = ""
    claims: ClaimFit = ClaimFit()


def schedule(
    node: Object, pods: Sequence[Object], claims: ClaimScheduler
) -> Sequence[SchedulingDecision]:
    """Decide on every pod without a node, in order; the next pod sees the rest."""
    free = free_on(node, pods)
    found = []

    for pod in pods:
        if node_of(pod) or phase_of(pod) in ENDED or "deletionTimestamp" in pod["metadata"]:
            continue
        requests = requests_of(pod)
        served = claims.served(requests, node.get("status", {}).get("allocatable") or {})
        requests = {name: count for name, count in requests.items() if name not in served}
        reasons = blockers(node, pod["spec"], requests, free)
        fit = ClaimFit() if reasons else claims.fit(pod, served)
        if reasons := [*reasons, *([fit.problem] if fit.problem else ())]:
            text = ", ".join(f"1 {reason}" for reason in reasons)
            message = f"0/1 nodes are available: {text}."
            found.append(SchedulingDecision(key_of(pod), message=message))
            continue
        for resource, count in requests.items():
            free[resource] = free.get(resource, 0) - count
        found.append(SchedulingDecision(key_of(pod), node["metadata"]["name"], claims=fit))
    return found


def requested_on(node: str, pods: Iterable[Object]) -> Mapping[str, int]:
    """Return the requests of the pods that are bound to a node and have not ended."""
    totals: dict[str, int] = {}
    for pod in pods:
        if node_of(pod) == node and phase_of(pod) not in ENDED:
            for resource, count in requests_of(pod).items():
                totals[resource] = totals.get(resource, 0) + count
    return totals


def free_on(node: Object, pods: Iterable[Object]) -> dict[str, int]:
    """Return what counts as free, by resource; negative if too much is bound."""
    allocatable = node.get("status", {}).get("allocatable") or {}
    requested = requested_on(node["metadata"]["name"], pods)
    return {
        resource: (whole_number(count) or 0) - requested.get(resource, 0)
        for resource, count in allocatable.items()
    }


def blockers(
    node: Object, spec: Object, requests: Mapping[str, int], free: Mapping[str, int]
) -> Sequence[str]:
    """Return why a pod does not fit on the node, in kube-scheduler's words."""
    taints = [
        taint
        for taint in node["spec"].get("taints") or ()
        if taint["effect"] != "PreferNoSchedule"
        and not tolerates(spec.get("tolerations") or (), taint)
    ]
    if taints:
        taint = taints[0]
        return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
    name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
    if NodeSelection(spec.get("nodeSelector") or {}, required_terms(spec)).missing(name, labels):
        return ["node(s) didn't match Pod's node affinity/selector"]
    return [
        f"Insufficient {resource}"
        for resource, count in sorted(requests.items())
        if count > free.get(resource, 0)
    ]

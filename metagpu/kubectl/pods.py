"""Demands of a pod on a node: shares, labels, tolerations; pure functions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.compat.kube_documents import KubeDocument
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.model.quantities import whole_number
from metagpu.kubectl.claims import ClaimRef, ClaimRequest, claim_refs
from metagpu.kubectl.pod_places import places_in
from metagpu.translation import affinity

Object = Mapping[str, Any]

_KUBERNETES: Final = ("kubernetes.io", "k8s.io")
"""Domains of Kubernetes' own resources."""


class Request(msgspec.Struct, frozen=True):
    """A container's request for an extended resource."""

    container: str
    resource: str
    count: int


class PodDemand(msgspec.Struct, frozen=True):
    """The part of a pod that is compared with a node, as far as GPUs are concerned.

    Attributes:
        requests: of all containers that run at once; an init container's only where it is larger.
        node: the node that the pod is bound to, or names itself; empty for any.
        selector: the node selector.
        terms: of the required node affinity: one of them must hold; empty without an affinity.
        tolerations: as in the pod's specification.
        claims: its ResourceClaims.
        new_claims: the names, in the pod, of those that are still to be made from a template.
        devices: what these ask metagpu for.
    """

    namespace: str
    name: str
    requests: tuple[Request, ...]
    node: str = ""
    selector: Mapping[str, str] = msgspec.field(default_factory=dict)
    terms: tuple[Object, ...] = ()
    tolerations: tuple[Object, ...] = ()
    claims: tuple[ClaimRef, ...] = ()
    new_claims: tuple[str, ...] = ()
    devices: tuple[ClaimRequest, ...] = ()

    @property
    def totals(self) -> Mapping[str, int]:
        """The sum of the requests, by resource."""
        totals: Counter[str] = Counter()
        for request in self.requests:
            totals[request.resource] += request.count
        return totals

    @property
    def asks(self) -> bool:
        """Return whether it asks for GPUs, by a name or by a claim."""
        return bool(self.requests or self.devices)


def demand_of(pod: Object) -> PodDemand:
    """Return what a Pod object asks for.

    Raises:
        MetagpuError: an amount is no whole number.
    """
    spec, metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    claims = claim_refs(metadata.get("namespace") or "", spec)
    made = {
        status["name"] for status in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    }
    return PodDemand(
        metadata.get("namespace") or "",
        metadata.get("name") or metadata.get("generateName") or "",
        tuple(_requests(spec)),
        spec.get("nodeName") or "",
        spec.get("nodeSelector") or {},
        tuple(affinity.required_terms(spec)),
        tuple(spec.get("tolerations") or ()),
        claims,
        tuple(claim.used_as for claim in claims if claim.is_template and claim.used_as not in made),
    )


def controllers_of(pod: Object) -> Iterator[tuple[str, str]]:
    """Yield kind and name of a pod's controllers, of a ReplicaSet's too."""
    metadata = pod["metadata"]
    template = (metadata.get("labels") or {}).get("pod-template-hash")
    for owner in metadata.get("ownerReferences") or ():
        yield owner["kind"].lower(), owner["name"]
        if owner["kind"] == "ReplicaSet" and template:
            yield "deployment", owner["name"].removesuffix(f"-{template}")


def scheduler_says(pod: Object) -> str:
    """Return the scheduler's message about a pod that waits, empty for none."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("status") != "True":
            return str(condition.get("message") or "")
    return ""


def pods_in(documents: Iterable[KubeDocument]) -> Sequence[Object]:
    """Return the pods of a manifest, each with the name of its object."""
    found = []
    for document in documents:
        places, outer = places_in(document.value), document.value.get("metadata") or {}
        named = {key: outer[key] for key in ("name", "namespace") if key in outer}
        for place in places:
            pod = place.pod(document.value)
            metadata = {**(pod.get("metadata") or {}), **named}
            if len(places) > 1:
                metadata["name"] = f"{named.get('name', '')} {place.text}".strip()
            found.append({**pod, "metadata": metadata})
    return found


def missing_label(demand: PodDemand, name: str, labels: Mapping[str, str]) -> str:
    """Return what a pod's selector or affinity misses at a node, empty for nothing."""
    return affinity.NodeSelection(demand.selector, demand.terms).missing(name, labels)


def _requests(spec: Object) -> Iterator[Request]:
    beside: Counter[str] = Counter()
    for container in spec.get("containers") or ():
        for request in _of_container(container):
            beside[request.resource] += request.count
            yield request
    # Init containers run alone; sidecars (restartPolicy: Always) run beside the others.
    for container in spec.get("initContainers") or ():
        for request in _of_container(container):
            if container.get("restartPolicy") == "Always":
                yield request
            elif request.count > beside[request.resource]:
                more = request.count - beside[request.resource]
                beside[request.resource] = request.count
                yield Request(request.container, request.resource, more)


def _of_container(container: Object) -> Iterator[Request]:
    resources = container.get("resources") or {}
    amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    name = str(container.get("name") or "")
    for resource, amount in amounts.items():
        domain, slash, _ = str(resource).partition("/")
        if not slash or domain.endswith(_KUBERNETES):
            continue
        count = whole_number(amount)
        if count is None:
            problem = f"container {name}: {resource}: {amount!r} is not a whole number"
            raise ConfigError(problem, ConfigReason.INVALID_VALUE)
        if count:
            yield Request(name, str(resource), count)

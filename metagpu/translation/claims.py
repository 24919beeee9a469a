"""A pod's request as a ResourceClaimTemplate, for clusters with DRA.

A resource name is one way to serve a pod; a claim has several, in order of preference, and the
scheduler takes the first that a node has free.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final

import msgspec

from metagpu.core.model.quantities import whole_number
from metagpu.translation.choices import Choice, choose, held_together, serve
from metagpu.translation.hami_annotations import (
    GPUS_PREFIX,
    NOUSE_TYPE,
    USE_TYPE,
    annotations_of,
    names_model,
)
from metagpu.translation.node_offers import FRACTION, GPU_COUNT, MIG, MPS, WHOLE, NodeGroups
from metagpu.translation.patch import apply_patch
from metagpu.translation.plans import NodeParts, policy_of, survey, techniques_of
from metagpu.translation.requests import GpuRequest
from metagpu.translation.translate import translate_among
from metagpu.translation.values import NodeOffer, Object, Translation, TranslationSettings
from metagpu.translation.vocabularies import read_requests
from metagpu.translation.warnings import cores_text, warnings_for

DRIVER: Final = "gpu.metagpu.io"
NVIDIA: Final = "gpu.nvidia.com"
CLAIM: Final = "gpus"
"""The name of the claim in a pod, with a number behind it where another has it."""
MOST_ALTERNATIVES: Final = 8
"""The API server's limit of `firstAvailable`."""
_CLASSES: Final = {
    FRACTION: "fraction.metagpu.io",
    MPS: "mps.metagpu.io",
    MIG: "mig.metagpu.io",
    WHOLE: "gpu.metagpu.io",
}
_OF_NVIDIA: Final = {MIG: "mig.nvidia.com", WHOLE: "gpu.nvidia.com"}


class ClaimedPod(msgspec.Struct, frozen=True):
    """A pod that asks by a claim.

    Attributes:
        template: the ResourceClaimTemplate, `None` where there is nothing to claim.
        outcome: the translation that the claim takes the place of.
    """

    pod: Object
    template: Mapping[str, Any] | None
    outcome: Translation


def claim_pod(
    pod: Object, name: str, nodes: Iterable[NodeOffer], settings: TranslationSettings, driver: str
) -> ClaimedPod:
    """Return a pod that asks for a claim of a template of this name.

    A pod that nothing is translated of, or that no node could serve, stays as it is.
    """
    groups = NodeGroups(map(offer_by_labels, nodes))
    outcome = translate_among(pod, groups, settings)
    found = read_requests(pod, groups.offered, settings)
    requests = [request for request in found.requests if request.count]
    if not outcome.operations or not requests:
        return ClaimedPod(apply_patch(pod, outcome.operations), None, outcome)
    if not all(request.container for request in requests):
        unnamed = "a container without a name gets no claim: give it a name"
        return ClaimedPod(pod, None, Translation((), impossible=unnamed))
    techniques = techniques_of(pod, requests, settings)
    allowed = [
        parts for parts in survey(pod, groups, found.others & groups.offered) if not parts.refused
    ]
    spread = policy_of(pod, settings) == "spread"
    asked = [
        {
            "name": request.container,
            "firstAvailable": _alternatives(request, allowed, techniques, driver, spread=spread),
        }
        for request in requests
    ]
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": asked}}},
    }
    kept = [
        operation
        for operation in outcome.operations
        if not operation["path"].startswith("/spec/affinity")
    ]
    claimed = _with_claim(apply_patch(pod, kept), requests, name)
    warnings = (*_warnings(pod, requests, settings), *_too_much(requests, allowed, techniques))
    return ClaimedPod(claimed, template, msgspec.structs.replace(outcome, warnings=warnings))


def offer_by_labels(node: NodeOffer) -> NodeOffer:
    """Return a Node with what its labels name, and its device plugins do not count.

    A pool with `api: dra` has labels and no extended resource.
    """
    counted = dict(node.allocatable)
    for label in node.labels:
        if label.startswith("metagpu.io/") and label.endswith(".backend"):
            key = label.removesuffix(".backend")
            resource = key.removeprefix("metagpu.io/").replace("_", "/", 1)
            shares, gpus = (
                whole_number(node.labels.get(f"{key}.{suffix}")) for suffix in ("replicas", "gpus")
            )
            counted.setdefault(resource, (shares or 0) * (gpus or 0))
    return msgspec.structs.replace(node, allocatable=counted)


def _alternatives(
    request: GpuRequest,
    allowed: Sequence[NodeParts],
    techniques: Sequence[str],
    driver: str,
    *,
    spread: bool,
) -> list[dict[str, Any]]:
    """Return the ways to serve a request, the preferred one first."""
    ways: dict[str, dict[str, Any]] = {}
    for technique in techniques:
        choices = [
            choice
            for parts in allowed
            if (choice := choose(request, technique, parts.parts)) is not None
        ]
        for choice in sorted(choices, key=lambda option: _rank(option, spread=spread)):
            for way in _ways(request, choice, choices, driver):
                ways.setdefault(msgspec.json.encode(way).decode(), way)
    return [
        {"name": f"{number}-{way['deviceClassName'].split('.')[0]}", **way}
        for number, way in enumerate([*ways.values()][:MOST_ALTERNATIVES], 1)
    ]


def _rank(choice: Choice, *, spread: bool) -> tuple[int, int, str]:
    room = choice.part.most if spread else 0
    return -room, choice.waste, choice.resource


def _ways(
    request: GpuRequest, choice: Choice, choices: Sequence[Choice], driver: str
) -> Iterator[dict[str, Any]]:
    """Yield the devices of one choice; shares are counted by number, or by memory."""
    technique = choice.part.technique
    way: dict[str, Any] = {"deviceClassName": _class_of(technique, driver)}
    if request.count > 1:
        way["count"] = request.count
    if technique == WHOLE:
        if request.memory:
            quantity = f"quantity('{request.memory}Mi')"
            memory = f"device.capacity['{driver}'].memory.compareTo({quantity}) >= 0"
            way["selectors"] = _selectors(memory)
        yield way
    elif technique == MIG:
        profile = re.sub(r"\.(me|gfx)\b", r"+\1", choice.resource.partition("/mig-")[2])
        name, value = ("profile", profile) if profile else ("resource", choice.resource)
        way["selectors"] = _selectors(f"device.attributes['{driver}'].{name} == '{value}'")
        yield way
    else:
        same = [option for option in choices if option.resource == choice.resource]
        shares = max(option.count for option in same) // request.count
        way["selectors"] = _selectors(
            f"device.attributes['{driver}'].resource == '{choice.resource}'"
        )
        yield {**way, "capacity": {"requests": {"shares": str(shares)}}}
        if technique == FRACTION and request.memory:  # where the pool has a memoryUnit
            yield {**way, "capacity": {"requests": {"memory": f"{request.memory}Mi"}}}


def _class_of(technique: str, driver: str) -> str:
    own = _CLASSES[technique]
    return _OF_NVIDIA.get(technique, own) if driver == NVIDIA else own


def _selectors(expression: str) -> list[dict[str, Any]]:
    return [{"cel": {"expression": expression}}]


def _with_claim(
    pod: dict[str, Any], requests: Sequence[GpuRequest], template: str
) -> dict[str, Any]:
    """Change a pod: the claim takes the place of the resources of a translation."""
    annotations = pod["metadata"]["annotations"]
    for request in requests:
        annotations.pop(GPUS_PREFIX + request.container, None)  # the claim has the count
    spec = pod["spec"]
    others = spec.get("resourceClaims") or ()
    used = {other.get("name") for other in others}
    names = (f"{CLAIM}-{number}" if number > 1 else CLAIM for number in count(1))
    claim = next(name for name in names if name not in used)
    spec["resourceClaims"] = [*others, {"name": claim, "resourceClaimTemplateName": template}]
    for request in requests:
        *_, kind, index = request.path.split("/")
        container = spec[kind][int(index)]
        resources = container["resources"]
        for where in ("limits", "requests"):
            amounts = resources.get(where) or {}
            kept = {name: amounts[name] for name in amounts if name in request.others}
            resources[where] = kept
            if not kept:
                del resources[where]
        claims = resources.get("claims") or ()
        resources["claims"] = [*claims, {"name": claim, "request": request.container}]
    return pod


def _warnings(
    pod: Object, requests: Sequence[GpuRequest], settings: TranslationSettings
) -> Iterator[str]:
    """Yield what a pod asks for and a claim does not say."""
    for request in requests:
        if request.cores and not request.whole:
            yield (
                f"container {request.container}: {cores_text(request, settings)} has no effect "
                "but on shares of backend mps, which limit threads by their number"
            )
        if request.limit:
            yield (
                f"container {request.container}: gpu-memory.limit counts on fractions alone, "
                "where the pool has `allowAnnotations: [limit]` (docs/enforcement.md)"
            )
    yield from warnings_for(pod, (), settings, requests)
    if names_model(annotations_of(pod)):
        yield (
            f"{USE_TYPE} and {NOUSE_TYPE} choose the alternatives of the claim, and no GPU: add a "
            "selector of productName"
        )


def _too_much(
    requests: Sequence[GpuRequest], allowed: Sequence[NodeParts], techniques: Sequence[str]
) -> Iterator[str]:
    """Yield that no node has at once what containers ask for one after the other."""
    alone = [request.container for request in requests if request.alone]
    if alone and not any(_may_have(parts, requests, techniques) for parts in allowed):
        yield (
            f"init container {', '.join(alone)}: a claim holds the devices of init containers and "
            "of the other containers together, and no node has as many at once, so that the pod "
            "waits without end: ask for less in one of them, or translate without --claims"
        )


def _may_have(node: NodeParts, requests: Sequence[GpuRequest], techniques: Sequence[str]) -> bool:
    """Return whether a node, if it were idle, could have all requests at once."""
    parts = [part for part in node.parts if part.technique in techniques]
    ways = [
        [way for part in parts if (way := serve(request, part)) is not None] for request in requests
    ]
    labelled = (whole_number(offer.labels.get(GPU_COUNT)) for offer in node.group.nodes.values())
    most = max((amount or 0 for amount in labelled), default=0) or sum(
        amount.gpus for amount in parts
    )
    return held_together(requests, ways, max((most, *(part.gpus for part in parts))))

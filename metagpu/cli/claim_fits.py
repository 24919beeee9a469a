"""Claims of a manifest that fit on the idle node: `metagpu explain --claim`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from metagpu.compat.kube_documents import KubeDocument, Object
from metagpu.core.config.errors import ConfigReason
from metagpu.core.devices.devices import gpu_of_device
from metagpu.core.errors import MetagpuError, describe_error
from metagpu.core.model.gpu import GpuId
from metagpu.sim.allocation.allocator import AllocationResult, HeldDevices, allocate
from metagpu.sim.allocation.obstacles import ClaimObstacle, ObstacleKind, find_obstacle
from metagpu.sim.allocation.pools import DevicePools, gather_pools
from metagpu.sim.cluster.claim_objects import device_classes
from metagpu.sim.cluster.claim_versions import as_v1
from metagpu.sim.cluster.document_forms import check_document, check_pod_claims

CheckedT = TypeVar("CheckedT")

_TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "Pod": ("spec",),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
}
"""Where the specification of a pod is, by the kind of its object; elsewhere in `spec.template`."""
_BESIDE: Final = {
    ObstacleKind.NO_DEVICE: "no device is left for",
    ObstacleKind.ERROR: "Kubernetes refuses",
    ObstacleKind.UNKNOWN: "nobody knows about",
}
_OF_CLAIMS: Final = {"resourceClaimName": "ResourceClaim"} | {
    "resourceClaimTemplateName": "ResourceClaimTemplate"
}


class _Used(msgspec.Struct, frozen=True):
    """Claims that are allocated together: those of a pod, or one that no pod names."""

    pod: str
    names: tuple[tuple[str, str], ...]


def claim_fits(
    documents: Sequence[KubeDocument],
    slices: Sequence[Object],
    gpus: Mapping[GpuId, int],
    driver: str,
) -> list[dict[str, Any]]:
    """Return what each claim would get on the idle node, or why it gets nothing.

    Args:
        documents: claims, templates, pods and DeviceClasses, in any order; others are skipped.
        slices: the specifications of the node's ResourceSlices.
        gpus: the indices of its GPUs.
        driver: the name of the DRA driver, for the chart's DeviceClasses.

    Raises:
        ConfigError: an object has not the form of its kind.
    """
    classes: dict[str, Object] = {key[2]: document for key, document in device_classes(driver)}
    specs: dict[tuple[str, str], Object] = {}
    for kube_document in documents:
        kind, name = kube_document.value["kind"], _name_of(kube_document.value)
        if kind not in ("DeviceClass", *_OF_CLAIMS.values(), "Pod"):
            continue
        spec = _checked(kube_document, lambda document: check_document(_with_name(as_v1(document))))
        if kind == "DeviceClass":
            classes[name] = {"spec": spec}
        elif kind != "Pod":
            specs[kind, name] = spec["spec"] if kind == "ResourceClaimTemplate" else spec
    used = list(_used_claims(documents, specs))
    nodes = {piece["nodeName"] for piece in slices}
    published = [
        {"metadata": {"name": f"{at:05x}"}, "spec": spec} for at, spec in enumerate(slices)
    ]
    pools = gather_pools(published, next(iter(nodes), ""))
    return [row for each in used for row in _rows(each, specs, pools, classes, gpus)]


def _checked(document: KubeDocument, check: Callable[[Object], CheckedT]) -> CheckedT:
    """Return what a check returns; its error names the place of the document."""
    try:
        return check(document.value)
    except MetagpuError as error:
        raise document.error(describe_error(error), ConfigReason.INVALID_VALUE) from error


def _name_of(document: Object) -> Any:  # noqa: ANN401 - perhaps no text
    """Return the name of an object, or the beginning of the name that it gets."""
    metadata = document.get("metadata") or {}
    return metadata.get("name") or metadata.get("generateName") or ""


def _with_name(document: Object) -> Object:
    """Return an object as one with a name where it has `generateName` alone."""
    metadata = document.get("metadata") or {}
    if metadata.get("name") or not metadata.get("generateName"):
        return document
    made = str(metadata["generateName"]).rstrip("-.")
    return {**document, "metadata": {**metadata, "name": made}}


def _used_claims(
    documents: Sequence[KubeDocument], specs: Mapping[tuple[str, str], Object]
) -> Iterator[_Used]:
    """Yield the claims of each pod, then those that no pod names.

    Raises:
        ConfigError: the claims of a pod have another form.
    """
    named: set[tuple[str, str]] = set()
    for document in documents:
        title = f"{document.value['kind']} {_name_of(document.value)}".strip()
        about = f"the pod of the {title}"
        names = tuple(
            (kind, claim[key])
            for claim in _checked(document, partial(_pod_claims, about))
            for key, kind in _OF_CLAIMS.items()
            if claim.get(key)
        )
        named.update(names)
        if names:
            yield _Used(title, names)
    for name in specs:
        if name not in named:
            yield _Used("", (name,))


def _pod_spec(document: Object) -> Object:
    """Return the specification of an object's pod, empty where it has none."""
    found: Any = document
    for key in _TEMPLATES.get(document["kind"], ("spec", "template", "spec")):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _pod_claims(about: str, document: Object) -> Sequence[Mapping[str, str]]:
    return check_pod_claims(about, _pod_spec(document))


def _rows(
    used: _Used,
    specs: Mapping[tuple[str, str], Object],
    pools: DevicePools,
    classes: Mapping[str, Object],
    gpus: Mapping[GpuId, int],
) -> Iterator[dict[str, Any]]:
    """Yield the row of each claim of a pod."""
    common = [{"pod": used.pod or None, "claim": " ".join(pair)} for pair in used.names]
    if missing := [pair for pair in used.names if pair not in specs]:
        absent = ClaimObstacle(0, "", f"the file has no {' '.join(missing[0])}")
        yield from (_refused(row, absent) for row in common)
        return
    claims = [{"metadata": {"name": name}, "spec": specs[kind, name]} for kind, name in used.names]
    obstacle = find_obstacle(pools, claims, classes)
    if obstacle is not None:
        for place, row in enumerate(common):
            found = obstacle
            if place != obstacle.claim:
                beside = f"{_BESIDE[obstacle.kind]} the pod's {common[obstacle.claim]['claim']}"
                found = replace(obstacle, request="", reason=beside)
            yield _refused(row, found)
        return
    results = allocate(pools, claims, classes, HeldDevices()) or ()
    for row, of_claim in zip(common, results, strict=True):
        devices = [_device(result, gpus) for result in of_claim]
        yield {**row, "answer": "yes", "fits": True, "devices": devices, "problem": None}


def _refused(row: Object, obstacle: ClaimObstacle) -> dict[str, Any]:
    fits = None if obstacle.kind is ObstacleKind.UNKNOWN else False
    problem = {"request": obstacle.request or None, "reason": obstacle.reason}
    answer = {"answer": obstacle.kind, "fits": fits}
    return {**row, **answer, "devices": [], "problem": problem}


def _device(result: AllocationResult, gpus: Mapping[GpuId, int]) -> dict[str, Any]:
    gpu = gpu_of_device(result.id.device)
    return {
        "request": result.request,
        "gpu": gpus.get(gpu),
        "class": result.device_class,
        "pool": result.id.pool,
        "device": result.id.device,
        "consumed": dict(result.consumed or {}),
    }

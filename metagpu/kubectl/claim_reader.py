"""The ResourceClaims of pods, read with the rights of a user."""

from collections.abc import Iterable
from functools import partial
from typing import Final

from metagpu.core.errors import ClusterError
from metagpu.kubectl.claims import ClaimRef, ReadClaims
from metagpu.kubectl.viewer import ClusterViewer, Object, in_parallel

_CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404


async def read_claims(viewer: ClusterViewer, refs: Iterable[ClaimRef]) -> ReadClaims:
    """Read claims and the DeviceClasses, or the refusal to read them.

    Raises:
        ClusterError: the API server does not answer.
    """
    wanted = list(dict.fromkeys(refs))
    if not wanted:
        return ReadClaims()
    try:
        classes, *specs = await in_parallel(
            partial(viewer.items, _CLASSES), *(partial(_read_spec, viewer, it) for it in wanted)
        )
    except ClusterError as error:
        if error.status != _FORBIDDEN:
            raise
        return ReadClaims(dict.fromkeys(wanted), refusal=error.message)
    return ReadClaims(dict(zip(wanted, specs, strict=True)), classes)


async def read_extended_resources(viewer: ClusterViewer) -> frozenset[str]:
    """Return the names in limits that DeviceClasses serve, as far as they can be read."""
    try:
        classes = await viewer.items(_CLASSES)
    except ClusterError as error:
        if error.status not in (_FORBIDDEN, _NOT_FOUND):
            raise
        return frozenset()
    specs = (it.get("spec") or {} for it in classes)
    return frozenset(it["extendedResourceName"] for it in specs if it.get("extendedResourceName"))


async def _read_spec(viewer: ClusterViewer, ref: ClaimRef) -> Object | None:
    """Return the specification of a claim, also of one that a template makes."""
    found = await viewer.get(ref.path)
    if found is None:
        return None
    spec: Object = found["spec"]
    inner: Object = spec["spec"] if ref.is_template else spec
    return inner

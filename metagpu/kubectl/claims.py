"""ResourceClaims of pods, read with the rights of a user: devices asked for."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from metagpu.core.config.units import Quantity
from metagpu.core.errors import ClusterError
from metagpu.core.reports.reading import FieldMissing
from metagpu.core.reports.schema.status import StatusReport
from metagpu.kubectl.pod_reasons import Conclusion, PodReason
from metagpu.kubectl.viewer import ClusterViewer, Object, in_parallel

DRIVER: Final = "gpu.metagpu.io"
"""The driver where no daemon names another."""
_MOST: Final = 32
"""Devices of one claim: `AllocationResultsMaxSize` of resource.k8s.io/v1."""
_TYPE: Final = re.compile(r"""\.type\s*==\s*['"]([\w-]+)['"]""")


class ClaimRef(msgspec.Struct, frozen=True):
    """A ResourceClaim of a pod, or the template of one.

    Attributes:
        collection: `resourceclaims` or `resourceclaimtemplates`.
        name: of the object; `used_as` is its name in the pod.
    """

    namespace: str
    collection: str
    name: str
    used_as: str

    @property
    def is_template(self) -> bool:
        """Return whether the claim is made for the pod, from a template."""
        return self.collection == "resourceclaimtemplates"

    @property
    def kind(self) -> str:
        """The kind of the object."""
        return "ResourceClaimTemplate" if self.is_template else "ResourceClaim"

    @property
    def path(self) -> str:
        """The path of the object at the API server."""
        return f"/apis/resource.k8s.io/v1/namespaces/{self.namespace}/{self.collection}/{self.name}"


class DeviceOption(msgspec.Struct, frozen=True):
    """Devices that would serve a request.

    Attributes:
        types: the types of devices that its class selects; empty for any.
        charged: the devices that a quota counts, which for all of a node are the most.
        amounts: what it asks for of each capacity.
    """

    device_class: str
    types: tuple[str, ...]
    count: int
    charged: int
    amounts: Mapping[str, int]


class ClaimRequest(msgspec.Struct, frozen=True):
    """A request of a claim, and its alternatives."""

    claim: str
    options: tuple[DeviceOption, ...]


class ReadClaims(msgspec.Struct, frozen=True):
    """Some claims as the API server has them.

    Attributes:
        specs: of each claim; `None` for one that does not exist.
        classes: all DeviceClasses.
        refusal: why nothing was read, empty where all was.
    """

    specs: Mapping[ClaimRef, Object | None] = msgspec.field(default_factory=dict)
    classes: Sequence[Object] = ()
    refusal: str = ""

    def problem(self, refs: Iterable[ClaimRef]) -> Conclusion | None:
        """Return why claims cannot be judged, and what to change; `None` if they can."""
        if self.refusal:
            fix = "ask for the role metagpu-viewer of the cluster, and to read ResourceClaims"
            text = f"its ResourceClaims are not judged: {self.refusal}"
            return PodReason.CLAIMS_UNREADABLE, text, fix
        for ref in refs:
            if self.specs.get(ref) is None:
                missing = f"there is no {ref.kind} {ref.name} in the namespace {ref.namespace}"
                fix = "create it, or correct the name in the pod"
                return PodReason.CLAIM_MISSING, missing, fix
        return None

    def our_classes(self, reports: Iterable[StatusReport]) -> Mapping[str, str]:
        """Return the selectors of each class whose devices are of a driver of the daemons."""
        drivers = {DRIVER, *filter(None, map(_driver_of, reports))}
        classes = {
            device_class["metadata"]["name"]: _expressions(device_class["spec"])
            for device_class in self.classes
        }
        return {
            name: selectors
            for name, selectors in classes.items()
            if any(f"{quote}{driver}{quote}" in selectors for driver in drivers for quote in "'\"")
        }

    def devices(
        self, refs: Iterable[ClaimRef], ours: Mapping[str, str]
    ) -> tuple[ClaimRequest, ...]:
        """Return the requests of claims for devices of our classes."""
        return tuple(
            ClaimRequest(ref.used_as, options)
            for ref in refs
            for request in _requests(self.specs.get(ref))
            if (options := tuple(_options(request, ours)))
        )


def _driver_of(report: StatusReport) -> str:
    """Return the name of a node's DRA driver, empty where none is reported."""
    try:
        return report.dra.driver if report.dra else ""
    except FieldMissing:
        return ""


def claim_refs(namespace: str, spec: Object) -> tuple[ClaimRef, ...]:
    """Return the claims that the specification of a pod names."""
    return tuple(
        ClaimRef(namespace, collection, str(name), str(claim.get("name")))
        for claim in spec.get("resourceClaims") or ()
        for collection, name in (
            ("resourceclaims", claim.get("resourceClaimName")),
            ("resourceclaimtemplates", claim.get("resourceClaimTemplateName")),
        )
        if name
    )


def _requests(spec: Object | None) -> Sequence[Object]:
    return ((spec or {}).get("devices") or {}).get("requests") or ()


def _options(request: Object, ours: Mapping[str, str]) -> Iterator[DeviceOption]:
    """Yield the alternatives of a request that are devices of metagpu."""
    for alternative in (request.get("exactly"), *(request.get("firstAvailable") or ())):
        if (
            alternative is None
            or alternative.get("adminAccess")
            or alternative.get("deviceClassName") not in ours
        ):
            continue  # who only looks at a GPU waits for none
        name = alternative["deviceClassName"]
        amounts = (alternative.get("capacity") or {}).get("requests") or {}
        count = alternative.get("count") or 1
        yield DeviceOption(
            name,
            tuple(_TYPE.findall(f"{ours[name]}\n{_expressions(alternative)}")),
            count,
            _MOST if alternative.get("allocationMode") == "All" else count,
            {
                each: read
                for each, amount in amounts.items()
                if (read := _amount(amount)) is not None
            },
        )


def _amount(quantity: object) -> int | None:
    """Return a quantity as a number, `None` for one in parts, as 500m."""
    with suppress(ValueError):
        return int(Quantity.parse(str(quantity).replace("k", "K")))
    return None


def _expressions(selecting: Object) -> str:
    """Return the CEL expressions of a class or a request, as they are written."""
    selectors = selecting.get("selectors") or ()
    return "\n".join(selector.get("cel", {}).get("expression", "") for selector in selectors)


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
            partial(viewer.items, _CLASSES), *(partial(_read_spec, viewer, ref) for ref in wanted)
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
    specs = (device_class.get("spec") or {} for device_class in classes)
    return frozenset(
        spec["extendedResourceName"] for spec in specs if spec.get("extendedResourceName")
    )


async def _read_spec(viewer: ClusterViewer, ref: ClaimRef) -> Object | None:
    """Return the specification of a claim, also of one that a template makes."""
    found = await viewer.get(ref.path)
    if found is None:
        return None
    spec: Object = found["spec"]
    inner: Object = spec["spec"] if ref.is_template else spec
    return inner

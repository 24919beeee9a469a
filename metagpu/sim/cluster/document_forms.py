"""The forms of the objects that people give to the simulated cluster.

What the simulated scheduler and kubelet read of an object is checked when it is created: nothing
can tell the user later. All else of an object is kept, and not looked at.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from metagpu.sim.apiserver.objects import KINDS
from metagpu.sim.machine.bounds import check_name
from metagpu.sim.machine.gpu import SimError


class _Form(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Known fields; others are allowed."""


_FormT = TypeVar("_FormT", bound=_Form)


class _ExpressionForm(_Form, frozen=True):
    expression: str


class _SelectorForm(_Form, frozen=True):
    cel: _ExpressionForm


class _CapacityForm(_Form, frozen=True):
    requests: Mapping[str, str | int] | None = None


class _TolerationForm(_Form, frozen=True):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _DevicesForm(_Form, frozen=True):
    """The devices of one request, or of one alternative."""

    device_class_name: str
    count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    allocation_mode: Literal["All", "ExactCount"] | None = None
    selectors: list[_SelectorForm] | None = None
    capacity: _CapacityForm | None = None
    tolerations: list[_TolerationForm] | None = None


class _AlternativeForm(_DevicesForm, frozen=True, kw_only=True):
    name: str


class _RequestForm(_Form, frozen=True):
    name: str
    exactly: _DevicesForm | None = None
    first_available: Annotated[list[_AlternativeForm], msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if (self.exactly is None) == (self.first_available is None):
            raise ValueError(
                "a request has either `exactly` or `firstAvailable`, as in resource.k8s.io/v1"
            )


class _ConfigForm(_Form, frozen=True):
    requests: list[str] | None = None


class _ConstraintForm(_ConfigForm, frozen=True):
    match_attribute: str | None = None
    distinct_attribute: str | None = None


class _ClaimDevicesForm(_Form, frozen=True):
    requests: list[_RequestForm] | None = None
    constraints: list[_ConstraintForm] | None = None
    config: list[_ConfigForm] | None = None


class _ClaimForm(_Form, frozen=True):
    devices: _ClaimDevicesForm | None = None


class _TemplateForm(_Form, frozen=True):
    spec: _ClaimForm


class _ClassForm(_Form, frozen=True):
    extended_resource_name: str | None = None
    selectors: list[_SelectorForm] | None = None
    config: list[dict[str, Any]] | None = None


class _ClaimUseForm(_Form, frozen=True):
    name: str
    request: str = ""


class _ResourcesForm(_Form, frozen=True):
    limits: Mapping[str, str | int | float] | None = None
    requests: Mapping[str, str | int | float] | None = None
    claims: list[_ClaimUseForm] | None = None

    def __post_init__(self) -> None:
        limits, requests = self.limits or {}, self.requests or {}
        for name, count in (*limits.items(), *requests.items()):
            if "/" in name and not str(count).isdecimal():
                raise ValueError(f"{count!r} is not a number of {name}")
        for name, count in requests.items():
            if "/" in name and int(count) != int(limits.get(name, count)):
                raise ValueError(f"the request for {name} is {count}, its limit {limits[name]}")


class _ContainerForm(_Form, frozen=True):
    name: str
    command: list[str] | None = None
    resources: _ResourcesForm | None = None


class _PodClaimForm(_Form, frozen=True):
    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None

    def __post_init__(self) -> None:
        if (self.resource_claim_name is None) == (self.resource_claim_template_name is None):
            raise ValueError(
                f"the claim {self.name} has either `resourceClaimName` or "
                "`resourceClaimTemplateName`; `source` ended with Kubernetes 1.30"
            )


class _PodClaimsForm(_Form, frozen=True):
    resource_claims: list[_PodClaimForm] | None = None


class _ExpressionsForm(_Form, frozen=True):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: list[str] | None = None


class _TermForm(_Form, frozen=True):
    match_expressions: list[_ExpressionsForm] | None = None
    match_fields: list[_ExpressionsForm] | None = None


class _RequiredForm(_Form, frozen=True):
    node_selector_terms: list[_TermForm]


class _NodeAffinityForm(_Form, frozen=True):
    required: _RequiredForm | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _AffinityForm(_Form, frozen=True):
    node_affinity: _NodeAffinityForm | None = None


class _PodForm(_PodClaimsForm, frozen=True, kw_only=True):
    containers: Annotated[list[_ContainerForm], msgspec.Meta(min_length=1)]
    init_containers: list[_ContainerForm] | None = None
    node_name: str | None = None
    node_selector: Mapping[str, str] | None = None
    affinity: _AffinityForm | None = None
    tolerations: list[_TolerationForm] | None = None

    def __post_init__(self) -> None:
        known = {claim.name for claim in self.resource_claims or ()}
        for container in (*(self.init_containers or ()), *self.containers):
            used = {
                resource.name
                for resource in (container.resources and container.resources.claims) or ()
            }
            if unknown := used - known:
                name = min(unknown)
                raise ValueError(f"container {container.name}: no {name} in `resourceClaims`")


class _OwnerForm(_Form, frozen=True):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class _MetadataForm(_Form, frozen=True):
    name: str = ""
    namespace: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    owner_references: list[_OwnerForm] | None = None


class _PodTemplateForm(_Form, frozen=True):
    spec: _PodForm
    metadata: _MetadataForm | None = None


_Number = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class _WorkloadForm(_Form, frozen=True):
    template: _PodTemplateForm
    selector: Mapping[str, Any] | None = None
    replicas: _Number | None = None
    parallelism: _Number | None = None
    completions: _Number | None = None
    backoff_limit: int | None = None
    suspend: bool | None = None
    completion_mode: Literal["NonIndexed", "Indexed"] | None = None
    pod_management_policy: Literal["OrderedReady", "Parallel"] | None = None

    def __post_init__(self) -> None:
        given = (self.template.metadata and self.template.metadata.labels) or {}
        chosen = (self.selector or {}).get("matchLabels") or {}
        if any(given.get(name) != value for name, value in chosen.items()):
            raise ValueError("the selector does not match the labels of the pod template")


class _DocumentForm(_Form, frozen=True, kw_only=True):
    kind: str
    api_version: str = ""
    metadata: _MetadataForm = _MetadataForm()


_FORMS: Final[Mapping[str, type[_Form]]] = {
    "DeviceClass": _ClassForm,
    "ResourceClaim": _ClaimForm,
    "ResourceClaimTemplate": _TemplateForm,
    "Pod": _PodForm,
    **dict.fromkeys(
        (
            *("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Job"),
            "ReplicationController",
        ),
        _WorkloadForm,
    ),
}
ACTED_ON: Final = frozenset((*_FORMS, "Namespace", "ConfigMap"))
"""The kinds that something here acts on; of the others, an object is kept."""
_OF_THE_CLUSTER: Final = frozenset(("Node", "Event", "ResourceSlice"))
"""The kinds that a kubelet and a driver write."""
_RESOURCE_VERSIONS: Final = ("resource.k8s.io/v1beta1", "resource.k8s.io/v1beta2")
"""Earlier versions that Kubernetes 1.36 still takes, with the same objects in other words."""


def check_document(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the known part of a document's specification, without nulls.

    Raises:
        SimError: its kind is another, it has no name, or its specification has another form.
    """
    found = _converted("a document", document, _DocumentForm)
    kind, name = found.kind, found.metadata.name
    if kind not in KINDS or kind in _OF_THE_CLUSTER:
        taken = ", ".join(other for other in KINDS if other not in _OF_THE_CLUSTER)
        raise SimError(f"a document is of the kind {kind!r}; taken are {taken}")
    api = KINDS[kind].api
    if found.api_version not in {"", api, *(_RESOURCE_VERSIONS if "resource" in api else ())}:
        raise SimError(f"no kind {kind} in the version {found.api_version}; write {api}")
    if not api.startswith("rbac"):
        check_name(f"the {kind}", name, dotted=kind != "Namespace")
    check_name("the namespace", found.metadata.namespace or "default")
    if kind not in _FORMS:
        return {}
    spec = stored_spec(document)
    return _known(f"the spec of the {kind} {name}", spec, _FORMS[kind])


def stored_spec(document: Mapping[str, Any]) -> object:
    """Return the specification of an object as the API server stores it.

    Requests of a pod are those of its limits where it has none; claims of v1beta1 become those of
    v1. A form that is another is left to `check_document`.
    """
    spec: Any = document.get("spec")
    kind = document["kind"]
    with suppress(AttributeError, KeyError, TypeError):
        if kind == "Pod":
            return _with_requests(spec)
        if document.get("apiVersion") == _RESOURCE_VERSIONS[0]:
            if kind == "ResourceClaim":
                return _claim_of_v1(spec)
            if kind == "ResourceClaimTemplate":
                return {**spec, "spec": _claim_of_v1(spec["spec"])}
    return spec


def _with_requests(spec: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON
    found = {**spec}
    for part in ("initContainers", "containers"):
        if spec.get(part):
            found[part] = [_requesting(value) for value in spec[part]]
    return found


def _requesting(container: Mapping[str, Any]) -> Mapping[str, Any]:
    resources = container.get("resources") or {}
    if not resources.get("limits"):
        return container
    requests = {**resources["limits"], **(resources.get("requests") or {})}
    return {**container, "resources": {**resources, "requests": requests}}


def _claim_of_v1(spec: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON
    requests = [
        {
            "name": request.get("name"),
            "exactly": {key: request[key] for key in request if key != "name"},
        }
        if "deviceClassName" in request
        else request
        for request in spec["devices"]["requests"]
    ]
    return {**spec, "devices": {**spec["devices"], "requests": requests}}


def unread(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a pod asks for and the simulator does not look at."""
    every = (*(spec.get("initContainers") or ()), *spec["containers"])
    amounts = [(value.get("resources") or {}).get("requests") or {} for value in every]
    yield from (
        name for amount in (*amounts, _pod_requests(spec)) for name in amount if "/" not in name
    )
    yield from (f"spec.{name}" for name in _UNREAD if spec.get(name))
    affinity = spec.get("affinity") or {}
    yield from (
        f"spec.affinity.{name}" for name in ("podAffinity", "podAntiAffinity") if name in affinity
    )
    if any("persistentVolumeClaim" in volume for volume in spec.get("volumes") or ()):
        yield "PersistentVolumeClaims"


_UNREAD: Final = (
    "schedulingGates", "topologySpreadConstraints", "runtimeClassName", "priorityClassName",
    "overhead", "activeDeadlineSeconds",
)  # fmt: skip
"""Fields of a pod that decide whether, where and how long it runs."""


def _pod_requests(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    resources = spec.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def check_pod_claims(about: str, spec: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    """Return the `resourceClaims` of a pod in any object, without nulls.

    Raises:
        SimError: they have another form.
    """
    found: list[Mapping[str, str]] = _known(about, spec, _PodClaimsForm).get("resourceClaims", [])
    return found


def _known(about: str, value: object, form: type[_Form]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = msgspec.to_builtins(_converted(about, value, form))
    return found


def _converted(about: str, value: object, form: type[_FormT]) -> _FormT:
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise SimError(f"{about}: {error}") from None

"""The forms of the objects that people give to the simulated cluster.

What the simulated scheduler and kubelet read of an object is checked when it is created: nothing
can tell the user later. All else of an object is kept, and not looked at.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from metagpu.sim.machine.bounds import check_name
from metagpu.sim.machine.gpu import SimError

COLLECTIONS: Final = {
    "DeviceClass": "deviceclasses",
    "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "Pod": "pods",
}
"""The collection of each kind that a file may have."""


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
    requests: Mapping[str, str | int | float] | None = None
    claims: list[_ClaimUseForm] | None = None

    def __post_init__(self) -> None:
        for name, count in (self.requests or {}).items():
            if "/" in name and not str(count).isdecimal():
                raise ValueError(f"{count!r} is not a number of {name}")


class _ContainerForm(_Form, frozen=True):
    name: str
    command: list[str] | None = None
    resources: _ResourcesForm | None = None


class _PodClaimForm(_Form, frozen=True):
    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class _PodClaimsForm(_Form, frozen=True):
    resource_claims: list[_PodClaimForm] | None = None


class _PodForm(_PodClaimsForm, frozen=True, kw_only=True):
    containers: Annotated[list[_ContainerForm], msgspec.Meta(min_length=1)]
    init_containers: list[_ContainerForm] | None = None


class _MetadataForm(_Form, frozen=True):
    name: str = ""
    namespace: str | None = None
    annotations: Mapping[str, str] | None = None


class _DocumentForm(_Form, frozen=True):
    kind: str
    metadata: _MetadataForm = _MetadataForm()


_FORMS: Final[Mapping[str, type[_Form]]] = {
    "DeviceClass": _ClassForm,
    "ResourceClaim": _ClaimForm,
    "ResourceClaimTemplate": _TemplateForm,
    "Pod": _PodForm,
}


def check_document(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the known part of a document's specification, without nulls.

    Raises:
        SimError: its kind is another, it has no name, or its specification has another form.
    """
    found = _converted("a document", document, _DocumentForm)
    kind, name = found.kind, found.metadata.name
    if kind not in _FORMS:
        raise SimError(f"a document is of the kind {kind!r}; taken are {', '.join(COLLECTIONS)}")
    check_name(f"the {kind}", name, dotted=kind == "DeviceClass")
    check_name("the namespace", found.metadata.namespace or "default")
    return _known(f"the spec of the {kind} {name}", document.get("spec"), _FORMS[kind])


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

"""The shape of a pod in a manifest, as far as it is read here."""

from collections.abc import Mapping
from typing import Any

import msgspec

_Amounts = dict[str, str | float | None]


class _ClaimEntry(msgspec.Struct):
    name: str = ""


class _Resources(msgspec.Struct):
    limits: _Amounts | None = None
    requests: _Amounts | None = None
    claims: list[_ClaimEntry] | None = None


class _Container(msgspec.Struct):
    name: str = ""
    resources: _Resources | None = None


class _Expression(msgspec.Struct):
    key: str
    operator: str
    values: list[str] | None = None


class _Term(msgspec.Struct, rename="camel"):
    match_expressions: list[_Expression] | None = None
    match_fields: list[_Expression] | None = None


class _Required(msgspec.Struct, rename="camel"):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(msgspec.Struct):
    required: _Required | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _Affinity(msgspec.Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _Toleration(msgspec.Struct):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    resource_claims: list[_ClaimEntry] | None = None
    node_selector: dict[str, str] | None = None
    node_name: str | None = None
    affinity: _Affinity | None = None
    tolerations: list[_Toleration] | None = None


class _PodMetadata(msgspec.Struct):
    annotations: dict[str, str | None] | None = None


class _Pod(msgspec.Struct):
    spec: _Spec
    metadata: _PodMetadata | None = None


def check_pod(pod: Mapping[str, Any]) -> None:
    """Check the shape of a pod.

    Raises:
        ValueError: a value has another type than Kubernetes has for it; the text says where.
    """
    msgspec.convert(pod, _Pod)

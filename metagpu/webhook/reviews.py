"""AdmissionReviews as values: what a translation reads, and the response.

The rest of a pod is not decoded: two pods that differ in nothing which matters are equal here.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

GROUP: Final = "admission.k8s.io"
VERSION: Final = f"{GROUP}/v1"
WARNING_LENGTH: Final = 256
"""Characters of one warning where all are too long: the API server's own limit then."""
MOST_WARNINGS: Final = 15
"""Warnings of one response."""
WARNINGS_LENGTH: Final = MOST_WARNINGS * WARNING_LENGTH
"""Characters of all warnings: with more than 4096 of all webhooks the API server cuts each."""
MOST_VALUES: Final = 50_000
"""Values of JSON in one pod, at most: each takes some hundred bytes of memory."""
MOST_CONTAINERS: Final = 256
MOST_TERMS: Final = 256
"""Objects in a pod's affinity, at most: each node may be compared with each of them."""

Optional = dict[str, Any] | UnsetType | None
OptionalText = str | UnsetType | None


class ReviewedContainer(msgspec.Struct, omit_defaults=True):
    """A container, as far as a translation reads it."""

    name: str = ""
    resources: Optional = UNSET
    restartPolicy: OptionalText = UNSET  # noqa: N815 - Kubernetes' key


class ReviewedMetadata(msgspec.Struct):
    """A pod's metadata, as far as a translation reads them.

    They are never empty, as those of a pod: a patch would add all of them.
    """

    annotations: dict[str, str] | None = None


class ReviewedSpec(msgspec.Struct, omit_defaults=True):
    """A pod's spec, as far as a translation reads it."""

    containers: list[ReviewedContainer] = []
    initContainers: list[ReviewedContainer] | UnsetType | None = UNSET  # noqa: N815 - as above
    affinity: Optional = UNSET
    nodeSelector: Optional = UNSET  # noqa: N815 - as above
    nodeName: OptionalText = UNSET  # noqa: N815 - as above
    schedulerName: OptionalText = UNSET  # noqa: N815 - as above


class ReviewedPod(msgspec.Struct):
    """A pod, as far as a translation reads it."""

    metadata: ReviewedMetadata
    spec: ReviewedSpec


class GroupVersionKind(msgspec.Struct, frozen=True):
    """The kind of the object under review."""

    group: str = ""
    version: str = ""
    kind: str = ""


class ReviewRequest(msgspec.Struct, frozen=True):
    """The request of an AdmissionReview; `object` is undecoded JSON."""

    uid: str
    kind: GroupVersionKind = GroupVersionKind()
    operation: str = ""
    sub_resource: str = msgspec.field(default="", name="subResource")
    namespace: str = ""
    dry_run: bool | None = msgspec.field(default=None, name="dryRun")
    object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def creates_pod(self) -> bool:
        """True if a pod is being created: nothing else has requests to translate."""
        return (
            self.operation == "CREATE"
            and not self.sub_resource
            and self.kind == GroupVersionKind("", "v1", "Pod")
        )


class TooLargeError(ValueError):
    """A pod that would take more memory or time than one pod may."""


class _Review(msgspec.Struct, frozen=True):
    api_version: str = msgspec.field(name="apiVersion")
    kind: str
    request: ReviewRequest


_decode_review: Final = msgspec.json.Decoder(_Review).decode
_decode_pod: Final = msgspec.json.Decoder(ReviewedPod).decode
_encode: Final = msgspec.json.Encoder().encode


def decode_request(body: bytes) -> ReviewRequest:
    """Return the request of an AdmissionReview.

    Raises:
        ValueError: the body is no AdmissionReview of the version that is registered.
    """
    try:
        review = _decode_review(body)
    except RecursionError as error:
        raise ValueError("the request is nested too deeply") from error
    if review.kind != "AdmissionReview" or review.api_version != VERSION:
        raise ValueError(
            f"{review.api_version} {review.kind} is not an AdmissionReview of {VERSION}"
        )
    return review.request


def pod_key(request: ReviewRequest) -> bytes:
    """Return the pod as JSON of what a translation reads: equal for equal requests.

    Raises:
        TooLargeError: the pod is none that is translated.
        ValueError: the object is no pod.
    """
    text = bytes(request.object)
    if sum(map(text.count, (b",", b"{", b"["))) > MOST_VALUES:
        raise TooLargeError(f"more than {MOST_VALUES} values")
    try:
        pod = _decode_pod(text)
        affinity = _encode(pod.spec.affinity or None)
    except RecursionError as error:
        raise ValueError("the pod is nested too deeply") from error
    if len(pod.spec.containers) + len(pod.spec.initContainers or ()) > MOST_CONTAINERS:
        raise TooLargeError(f"more than {MOST_CONTAINERS} containers")
    if affinity.count(b"{") > MOST_TERMS:
        raise TooLargeError(f"an affinity of more than {MOST_TERMS} terms and expressions")
    return _encode(pod)


def decode_key(key: bytes) -> Mapping[str, Any]:
    """Return the pod of a key as plain data."""
    pod: Mapping[str, Any] = msgspec.json.decode(key)
    return pod


def encode_patch(operations: Sequence[Mapping[str, Any]]) -> str:
    """Return a JSON Patch as a response has it; empty for no operation."""
    return b64encode(_encode(operations)).decode() if operations else ""


def allow(uid: str, patch: str = "", warnings: Sequence[str] = ()) -> bytes:
    """Return the review that lets an object pass, with a patch of `encode_patch`."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        response |= {"patchType": "JSONPatch", "patch": patch}
    return _encode(_review(response, warnings))


def refuse(uid: str, message: str, warnings: Sequence[str] = ()) -> bytes:
    """Return the review that refuses an object, with a message for its author."""
    status = {"code": int(HTTPStatus.FORBIDDEN), "reason": "Forbidden", "message": message}
    return _encode(_review({"uid": uid, "allowed": False, "status": status}, warnings))


def _review(response: dict[str, Any], warnings: Sequence[str]) -> dict[str, Any]:
    if warnings:
        lines = [" ".join(warning.split()) for warning in warnings[:MOST_WARNINGS]]
        too_long = sum(map(len, lines)) > WARNINGS_LENGTH
        response["warnings"] = [_cut(line) for line in lines] if too_long else lines
    return {"apiVersion": VERSION, "kind": "AdmissionReview", "response": response}


def _cut(line: str) -> str:
    return line if len(line) <= WARNING_LENGTH else f"{line[: WARNING_LENGTH - 1]}…"

"""Objects of older resource.k8s.io APIs as those of v1. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from metagpu.sim.machine.gpu import SimError

_GROUP: Final = "resource.k8s.io"
_SAME: Final = frozenset({"v1", "v1beta2"})
_FLAT: Final = "v1beta1"
_PATHS: Final = {
    "DeviceClass": (),
    "ResourceClaim": ("spec", "devices", "requests"),
    "ResourceClaimTemplate": ("spec", "spec", "devices", "requests"),
}
"""Where the requests of an object are, by its kind."""
_OF_REQUEST: Final = frozenset({"name", "exactly", "firstAvailable"})


def as_v1(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object as one of resource.k8s.io/v1; objects of other APIs stay.

    Raises:
        SimError: its version is older than v1beta1.
    """
    group, _, version = str(document.get("apiVersion") or "").partition("/")
    kind = document.get("kind")
    if group != _GROUP or kind not in _PATHS or version in _SAME:
        return document
    if version != _FLAT:
        raise SimError(
            f"no supported Kubernetes serves {group}/{version}: write apiVersion: {group}/v1, and "
            "requests as spec.devices.requests[].exactly.deviceClassName"
        )
    changed: Mapping[str, Any] = _nested(document, _PATHS[kind])
    return {**changed, "apiVersion": f"{group}/v1"}


def _nested(value: Any, path: tuple[str, ...]) -> Any:  # noqa: ANN401 - of any form
    """Return a value with the requests at a path changed; another form stays."""
    if path and isinstance(value, Mapping) and path[0] in value:
        return {**value, path[0]: _nested(value[path[0]], path[1:])}
    return [_request(each) for each in value] if isinstance(value, list) and not path else value


def _request(request: Any) -> Any:  # noqa: ANN401 - of any form
    """Return a request whose own fields of a device are under `exactly`."""
    if not isinstance(request, Mapping) or not (own := request.keys() - _OF_REQUEST):
        return request
    rest = {key: value for key, value in request.items() if key in _OF_REQUEST}
    return {**rest, "exactly": {key: request[key] for key in request if key in own}}

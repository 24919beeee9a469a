"""Names in `limits` that DeviceClasses have: the scheduler serves them by claims."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class ExtendedResource(msgspec.Struct, frozen=True):
    """The `extendedResourceName` of a DeviceClass.

    Attributes:
        created: the time of the class's creation, in the API server's form.
        selectors: its CEL expressions, as they are written.
    """

    name: str
    device_class: str
    created: str
    selectors: str


def extended_resource_of(device_class: Mapping[str, Any]) -> ExtendedResource | None:
    """Return what a DeviceClass serves in `limits`, `None` for nothing."""
    metadata, spec = device_class["metadata"], device_class.get("spec") or {}
    name = spec.get("extendedResourceName")
    if not name:
        return None
    expressions = (it.get("cel", {}).get("expression", "") for it in spec.get("selectors") or ())
    created = str(metadata.get("creationTimestamp") or "")
    return ExtendedResource(name, metadata["name"], created, "\n".join(expressions))


def classes_of_driver(found: Iterable[ExtendedResource], driver: str) -> Mapping[str, str]:
    """Return the class of each extended resource whose selectors name a driver.

    Of two classes with one resource the scheduler takes the younger.
    """
    return {
        it.name: it.device_class
        for it in sorted(found, key=lambda it: it.created)
        if any(quoted in it.selectors for quoted in (f"'{driver}'", f'"{driver}"'))
    }

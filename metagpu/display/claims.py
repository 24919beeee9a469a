"""Tables of `metagpu explain` for DRA: claims on an idle node, and ResourceSlices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metagpu.core.devices.devices import MONITOR_TYPE, gpu_of_device
from metagpu.display.status import Part, table
from metagpu.display.table import TextTable

Report = Mapping[str, Any]


def claim_fits_parts(claims: Sequence[Report]) -> Sequence[Part]:
    """Return a table of claims, and a line where there is none."""
    if not claims:
        return ["No ResourceClaim in these files."]
    found = table("CLAIM", "POD", "FITS", "DEVICES, OR WHY NOT", whole=("CLAIM", "POD", "FITS"))
    for claim in claims:
        found.add(
            claim["claim"],
            claim["pod"] or "-",
            claim["answer"],
            ", ".join(map(_allocated, claim["devices"]))
            if claim["fits"]
            else _problem(claim["problem"]),
            style="" if claim["fits"] else "yellow",
        )
    return [found]


def _allocated(device: Report) -> str:
    parts = ", ".join(f"{amount} {name}" for name, amount in device["consumed"].items())
    part = f" ({parts})" if parts else ""
    return f"{device['request']}: {device['class']}{part} of GPU {device['gpu']}"


def _problem(problem: Report) -> str:
    request = f"request {problem['request']}: " if problem["request"] else ""
    return f"{request}{problem['reason']}"


Spec = Mapping[str, Any]
"""The `spec` of a ResourceSlice."""


def slices_table(specs: Iterable[Spec]) -> TextTable:
    """Return a row for each GPU and kind of device."""
    rows: dict[tuple[str, ...], int] = {}
    for spec in specs:
        for device in spec.get("devices", ()):
            kind = (
                gpu_of_device(device["name"]),
                *_class_of(device),
                _claimed(device),
                _taints(device),
            )
            rows[kind] = rows.get(kind, 0) + 1

    found = table("GPU", "CLASS", "DEVICES", "A CLAIM TAKES", "TAINTS", whole=("GPU", "CLASS"))
    for (gpu, name, profile, claimed, taints), count in rows.items():
        found.add(gpu, f"{name} {profile}".strip(), str(count), claimed, taints or "-")
    return found


def _class_of(device: Mapping[str, Any]) -> tuple[str, str]:
    """Return the DeviceClass of the chart, and the MIG profile or an empty text."""
    attributes = device["attributes"]
    profile = attributes.get("profile", {}).get("string", "")
    return f"{attributes['type']['string']}.metagpu.io", profile


def _claimed(device: Mapping[str, Any]) -> str:
    if device["attributes"]["type"]["string"] == MONITOR_TYPE:
        return "nothing, by adminAccess"
    capacity = device.get("capacity", {})
    if not device.get("allowMultipleAllocations"):
        memory = capacity.get("memory", {}).get("value", "")
        return f"all of it, {memory}" if memory else "all of it"
    [(name, amount)] = capacity.items()
    return f"{name}: {amount['requestPolicy']['default']} to {amount['value']}"


def _taints(device: Mapping[str, Any]) -> str:
    taints: Sequence[Mapping[str, str]] = device.get("taints", ())
    return ", ".join(taint["key"].rpartition("/")[2] for taint in taints)

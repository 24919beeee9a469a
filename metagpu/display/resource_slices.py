"""The table of ResourceSlices: classes, and the capacity that claims take of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metagpu.core.devices.devices import MONITOR_TYPE
from metagpu.display.status import table
from metagpu.display.table import TextTable

Spec = Mapping[str, Any]
"""The `spec` of a ResourceSlice."""


def slices_table(specs: Iterable[Spec]) -> TextTable:
    """Return a row for each GPU and kind of device."""
    rows: dict[tuple[str, ...], int] = {}
    for spec in specs:
        gpu = spec["pool"]["name"].rpartition("/")[2]
        for device in spec.get("devices", ()):
            kind = (gpu, *_class_of(device), _claimed(device), _taints(device))
            rows[kind] = rows.get(kind, 0) + 1

    found = table("POOL", "CLASS", "DEVICES", "A CLAIM TAKES", "TAINTS", whole=("POOL", "CLASS"))
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
    [(name, it)] = capacity.items()
    return f"{name}: {it['requestPolicy']['default']} to {it['value']}"


def _taints(device: Mapping[str, Any]) -> str:
    taints: Sequence[Mapping[str, str]] = device.get("taints", ())
    return ", ".join(it["key"].rpartition("/")[2] for it in taints)

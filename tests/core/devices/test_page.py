"""docs/dra.md names what the node publishes: classes, devices, capacities, attributes, taints."""

import re
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from metagpu.core.availability.reasons import REASONS
from metagpu.core.devices.slices import slices_of
from metagpu.core.model.snapshot import Versions
from metagpu.core.state.facts import DriverRead, GpusFound
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import after, gpu, layout_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "dra.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table with a heading."""
    text = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.split("\n")[2:]]


def published() -> list[dict[str, Any]]:
    """Return the devices of a node with the configuration of the page."""
    names = {"architecture": "ampere", "brand": "Nvidia"}
    known = {**names, "compute_capability": (8, 0), "numa_node": 0}
    gpus = [replace(gpu(n, memory_mib=40960), **known) for n in range(5)]
    gpus.append(replace(mig_gpu(5), **known))
    text, *_ = re.findall(r"^```yaml\n(version.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    layout = layout_of(*gpus, text=text)
    versions = DriverRead(Versions(driver="580.65.06", cuda=(13, 0)))
    snapshot = after(GpusFound(tuple(gpus), at=0), versions, layout.offer_fact)
    roots = {other.id: "pci0000:00" for other in gpus}
    specs = slices_of(snapshot, "node", "gpu.metagpu.io", roots).values()
    return [device for of_gpu in specs for spec in of_gpu for device in spec.get("devices", ())]


def test_the_table_of_devices_is_what_is_published() -> None:
    """Class, name, type, capacity and exclusiveness of every device are those of the table."""
    documents = yaml.safe_load_all((ROOT / "deploy" / "dra.yaml").read_text(encoding="utf-8"))
    classes = {
        document["metadata"]["name"] for document in documents if document["kind"] == "DeviceClass"
    }
    rows = {CODE.findall(row[2])[0]: row for row in table("DeviceClass")}
    devices = published()

    assert {CODE.findall(row[0])[0] for row in rows.values()} == classes
    assert {other["attributes"]["type"]["string"] for other in devices} == rows.keys()
    capacities: dict[str, set[str]] = {kind: set() for kind in rows}
    for device in devices:
        kind = device["attributes"]["type"]["string"]
        shared = device.get("allowMultipleAllocations", False)
        (name,) = CODE.findall(rows[kind][1])
        pattern = name.replace("<uuid>", "[0-9a-f-]{36}").replace("<profile>-<place>", r"\w+-\d+")
        assert re.fullmatch(pattern, device["name"])
        assert shared is (rows[kind][4] == "no")
        capacities[kind] |= set(device["capacity"]) if shared else set()
    named = {kind: set(CODE.findall(row[3])) - {"memoryUnit"} for kind, row in rows.items()}
    assert capacities == named


def test_the_table_of_attributes_is_what_is_published() -> None:
    """Every published attribute is in the table with its type, and every row is published."""
    rows = {name: row[1] for row in table("Attribute") for name in CODE.findall(row[0])}
    types = {
        name: kind
        for document in published()
        for name, value in document["attributes"].items()
        for kind in value
    }

    assert types == rows


def test_the_table_of_fixed_capacities_is_what_is_published() -> None:
    """A device of one claim alone has the capacities of its rows."""
    rows = table("Capacity of one claim alone")
    named = {name for row in rows for name in CODE.findall(row[0])}
    own = [document for document in published() if not document.get("allowMultipleAllocations")]
    slices_between = {f"memorySlice{number}" for number in range(8)}

    assert {name for document in own for name in document["capacity"]} == named | slices_between


def test_the_table_of_taints_is_complete() -> None:
    """The keys of taints are those of the table."""
    rows = {CODE.findall(row[0])[0] for row in table("Taint (`NoSchedule`)")}

    assert rows == {row.taint for row in REASONS if row.taint}

"""ResourceSlices, DeviceClasses and claims for the tests of the simulated allocation."""

from collections.abc import Mapping, Sequence
from typing import Any

from metagpu.core.devices.slices import slices_of
from metagpu.core.model.gpu import Gpu
from metagpu.sim.allocation.allocator import AllocationResult, HeldDevices, allocate
from metagpu.sim.allocation.pools import gather_pools
from metagpu.sim.cluster.claim_objects import device_classes
from tests.rigs.build import offered

NODE = "node-1"
DRIVER = "gpu.metagpu.io"
CLASSES = {key[2]: content for key, content in device_classes()}
Document = Mapping[str, Any]


def published(text: str, *gpus: Gpu) -> list[Document]:
    """Return the ResourceSlices that a daemon publishes of healthy GPUs."""
    _, snapshot = offered(*gpus, text=text)
    specs = [
        dict(document) for those in slices_of(snapshot, NODE, DRIVER).values() for document in those
    ]
    return [{"metadata": {"name": f"{n:05x}"}, "spec": spec} for n, spec in enumerate(specs)]


def pool(
    *devices: Document, counters: Mapping[str, int] | None = None, name: str = "p"
) -> list[Document]:
    """Return the slices of one pool: these devices, and counters of one set."""
    sets = {
        "name": "set",
        "counters": {text: {"value": str(n)} for text, n in (counters or {}).items()},
    }
    parts: list[Document] = [{"sharedCounters": [sets]}] if counters else []
    parts.append({"devices": list(devices)})
    identity = {"name": name, "generation": 1, "resourceSliceCount": len(parts)}
    common = {"driver": DRIVER, "nodeName": NODE, "pool": identity}
    return [
        {"metadata": {"name": f"{name}-{n}"}, "spec": {**common, **part}}
        for n, part in enumerate(parts)
    ]


def device(name: str, kind: str = "gpu", **more: object) -> Document:
    """Return a device of a type."""
    return {"name": name, "attributes": {"type": {"string": kind}}, **more}


def takes(**counters: int) -> dict[str, Any]:
    """Return the field of a device that takes counters."""
    amounts = {name: {"value": str(n)} for name, n in counters.items()}
    return {"consumesCounters": [{"counterSet": "set", "counters": amounts}]}


def shared(value: object, **policy: object) -> dict[str, Any]:
    """Return the fields of a device whose `shares` several claims have."""
    capacity: dict[str, Any] = {"value": str(value)}
    if policy:
        capacity["requestPolicy"] = policy
    return {"allowMultipleAllocations": True, "capacity": {"shares": capacity}}


def request(name: str = "gpu", kind: str = "gpu", **more: Any) -> Document:  # noqa: ANN401 - any field
    """Return a request of devices of a type."""
    return {"name": name, "exactly": {"deviceClassName": f"{kind}.metagpu.io", **more}}


def amount(**asked: object) -> Document:
    """Return the field of a request that names amounts."""
    return {"requests": {name: str(value) for name, value in asked.items()}}


def claim(
    *requests: Document, name: str = "claim", constraints: Sequence[Document] = ()
) -> Document:
    """Return a claim of some requests."""
    devices = {"requests": list(requests), "constraints": list(constraints)}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": devices}}


def found(
    slices: Sequence[Document], *claims: Document, held: HeldDevices | None = None
) -> list[list[AllocationResult]] | None:
    """Allocate claims of one pod."""
    results = allocate(gather_pools(slices, NODE), claims, CLASSES, held or HeldDevices())
    return None if results is None else [list(allocation_results) for allocation_results in results]


def names(
    slices: Sequence[Document], *claims: Document, held: HeldDevices | None = None
) -> list[str] | None:
    """Allocate claims of one pod; return the names of the devices."""
    results = found(slices, *claims, held=held)
    return None if results is None else [result.id.device for part in results for result in part]

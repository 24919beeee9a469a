"""ResourceSlices: the wanted content of a node's pools, as plain data. Pure.

All GPUs are in one pool, each with a counter set and slices of its own: cluster-autoscaler takes
the fullest pool of a node for the node's utilization. Counters tell the scheduler the one rule of
sharing: a MIG device consumes the slots of its footprint, and a device of another backend consumes
all slots of the GPU. Devices for monitoring, which are never full, have a pool beside it.

ResourceClaims select by attributes, whose names are those of NVIDIA's DRA driver, and of Kubernetes
where it has one; one without a domain belongs to the driver. The API server writes quantities in a
form of its own, adds times to taints, and drops fields of features that are off without an error:
wanted slices and present ones are compared by what is left.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from metagpu.core.availability.conflict import conflicting_shares, unavailable_shares
from metagpu.core.availability.reasons import HELD, SUSPENDED, UNHEALTHY, availability_of
from metagpu.core.devices.devices import (
    MEMORY,
    MIG_TYPE,
    WHOLE_TYPE,
    Device,
    devices_of,
    monitor_device,
    monitor_pool_name,
    pool_name,
)
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.mig import profile_of, share_suffix, slot_of
from metagpu.core.model.quantities import quantity_value
from metagpu.core.model.shares import Share, ShareId, count_containers
from metagpu.core.model.snapshot import GpuState, Snapshot, Versions

_STANDARD: Final = "resource.kubernetes.io"
_TWO_WORDS: Final = {"ada": "Ada Lovelace"}
"""The architecture that NVIDIA's spelling has in two words."""
_MAX_TEXT: Final = 64
"""Characters of a text or version."""


def attributes_of(
    device: Device, gpu: Gpu, versions: Versions, pcie_root: str | None = None
) -> dict[str, Any]:
    """Return the attributes of a device; what is unknown is missing.

    Args:
        device: the device.
        gpu: its GPU.
        versions: those of the driver and of CUDA.
        pcie_root: the PCIe root complex of the GPU, as `pci0000:00`.
    """
    texts = {
        "type": device.type,
        "resource": device.resource if len(device.resource) <= _MAX_TEXT else "",
        **_identity(device),
        "productName": gpu.name,
        "brand": gpu.brand,
        "architecture": _architecture(gpu),
        f"{_STANDARD}/pciBusID": gpu.pci_bus_id,
        f"{_STANDARD}/pcieRoot": pcie_root,
    }
    semantic = {
        "cudaComputeCapability": _version(*(gpu.compute_capability or ())),
        "driverVersion": _version(*map(int, re.findall(r"\d+", versions.driver)[:3])),
        "cudaDriverVersion": _version(*(versions.cuda or ())),
    }
    return {
        **{name: {"string": text[:_MAX_TEXT]} for name, text in texts.items() if text},
        **{name: {"version": version} for name, version in semantic.items() if version},
        **({} if gpu.numa_node is None else {f"{_STANDARD}/numaNode": {"int": gpu.numa_node}}),
    }


def fixed_capacity(device: Device, gpu: Gpu) -> dict[str, Any]:
    """Return the capacities of a device that one ResourceClaim has alone.

    ResourceClaims would consume every capacity of a shared device, so it has one alone.
    """
    mig = device.type == MIG_TYPE
    memory = device.shares[0].memory if mig else gpu.memory
    amounts = {MEMORY: quantity(memory)} if memory else {}
    amounts.update(_parts(device, gpu) if mig else {})
    return {name: {"value": amount} for name, amount in amounts.items()}


def quantity(amount: int) -> str:
    """Return an amount as a Quantity of Kubernetes; whole MiB are written so."""
    return f"{amount // MIB}Mi" if amount and amount % MIB == 0 else str(amount)


def _parts(device: Device, gpu: Gpu) -> Mapping[str, str]:
    """Return the engines and memory slices of a MIG device, under NVIDIA's names."""
    name, _, start = slot_of(device.shares[0].id).rpartition("@")
    profile = next(mig_profile for mig_profile in gpu.mig_profiles if mig_profile.name == name)
    place = next(placement for placement in profile.placements if placement.start == int(start))
    engines = profile.engines
    amounts = {
        "multiprocessors": profile.multiprocessors,
        "copyEngines": engines.copy,
        "decoders": engines.decoder,
        "encoders": engines.encoder,
        "jpegEngines": engines.jpeg,
        "ofaEngines": engines.ofa,
        **{f"memorySlice{number}": 1 for number in place.slices},
    }
    return {name: str(amount) for name, amount in amounts.items()}


def _architecture(gpu: Gpu) -> str | None:
    """Return the architecture in the spelling of NVIDIA's DRA driver, as `Ampere`."""
    name = gpu.architecture
    return name and _TWO_WORDS.get(name, name.capitalize())


def _identity(device: Device) -> Mapping[str, str]:
    if device.type != MIG_TYPE:
        return {"uuid": device.gpu}
    return {"parentUUID": device.gpu, "profile": profile_of(device.shares[0].id)}


def _version(*numbers: int) -> str:
    """Return a semantic version, empty without numbers."""
    return ".".join(map(str, (*numbers, 0, 0)[:3])) if numbers else ""


SliceSpec = Mapping[str, Any]
"""The `spec` of a ResourceSlice, in generation 1 of its pool."""


class GpuSlices(msgspec.Struct, frozen=True):
    """The slices of one GPU, and its device for monitoring.

    Attributes:
        contents: what its slices have in the pool of the node: counters first, then devices.
        monitor: the device by which claims look at it.
    """

    contents: tuple[SliceSpec, ...]
    monitor: Mapping[str, Any]


_OWNER: Final = "owner"
"""The counter of a GPU whose devices are all of its own."""
_MAX_DEVICES: Final = 64
"""Of one slice, where devices have taints or consume counters."""


def slices_of(
    snapshot: Snapshot,
    node: str,
    driver: str,
    pcie_roots: Mapping[GpuId, str] = MappingProxyType({}),
    *,
    plain: bool = False,
) -> dict[str, tuple[SliceSpec, ...]]:
    """Return the wanted slices of a node by the names of their pools.

    Args:
        snapshot: everything known.
        node: the name of the Node.
        driver: the name of the DRA driver.
        pcie_roots: the PCIe root complexes of GPUs, as far as they are known.
        plain: whether the cluster knows neither counters nor shared devices. A GPU is then its
            whole device alone: others would be allocated beside it.
    """
    counted = has_counters(snapshot) and not plain
    found = (
        gpu_slices(snapshot, gpu, node, driver, pcie_roots.get(gpu), plain=plain, counted=counted)
        for gpu in snapshot.gpus
    )
    return pools_of([slices for slices in found if slices is not None], node, driver)


def has_counters(snapshot: Snapshot) -> bool:
    """Return whether GPUs have counter sets: all, if one of them has several devices.

    Whole GPUs alone work on any cluster without counters.
    """
    return any(len(devices_of(state)) > 1 for state in snapshot.gpus.values())


def pools_of(
    found: Sequence[GpuSlices], node: str, driver: str
) -> dict[str, tuple[SliceSpec, ...]]:
    """Return the slices of both pools of a node, with what all slices of a pool have."""
    contents = {
        pool_name(node): [part for slices in found for part in slices.contents],
        monitor_pool_name(node): _lists([slices.monitor for slices in found]),
    }
    return {
        name: tuple(
            {
                "driver": driver,
                "nodeName": node,
                "pool": {"name": name, "generation": 1, "resourceSliceCount": len(parts)},
                **part,
            }
            for part in parts
        )
        for name, parts in contents.items()
        if parts
    }


def gpu_slices(
    snapshot: Snapshot,
    gpu: GpuId,
    node: str,
    driver: str,
    pcie_root: str | None = None,
    *,
    plain: bool = False,
    counted: bool = True,
) -> GpuSlices | None:
    """Return what is published of one GPU; nothing where its pool has another API.

    Args:
        snapshot: everything known.
        gpu: the GPU.
        node: the name of the Node.
        driver: the name of the DRA driver.
        pcie_root: the PCIe root complex of the GPU, `None` if unknown.
        plain: as for `slices_of`.
        counted: whether it has a counter set.
    """
    state = snapshot.gpus[gpu]
    devices = devices_of(state)
    if plain:
        devices = tuple(device for device in devices if device.type == WHOLE_TYPE)
    if not devices:
        return None
    counters = _counters(devices) if counted else ()
    busy = _busy_shares(state, f"{driver}/{pool_name(node)}")
    rendered = []
    for device in devices:
        attributes = attributes_of(device, state.gpu, snapshot.versions, pcie_root)
        part: dict[str, Any] = {"name": device.name, "attributes": attributes}
        free = _free_shares(device, snapshot, state, busy)
        if capacity := _capacity(device, state, len(free)):
            part["capacity"] = capacity
        if device.capacity_name is not None:
            part["allowMultipleAllocations"] = True
        if counters:
            consumed = _slots(device) if device.type == MIG_TYPE else counters
            part["consumesCounters"] = [{"counterSet": gpu.lower(), "counters": _ones(consumed)}]
        if taints := _taints(device, state, held=not free):
            part["taints"] = taints
        rendered.append(part)
    looking = monitor_device(gpu)
    monitor = {
        "name": looking.name,
        "attributes": attributes_of(looking, state.gpu, snapshot.versions, pcie_root),
        "capacity": fixed_capacity(looking, state.gpu),
    }
    shared = [{"sharedCounters": [{"name": gpu.lower(), "counters": _ones(counters)}]}]
    return GpuSlices((*(shared if counters else ()), *_lists(rendered)), monitor)


def _lists(devices: Sequence[Mapping[str, Any]]) -> list[SliceSpec]:
    """Return devices in as many slices as they need."""
    starts = range(0, len(devices), _MAX_DEVICES)
    return [{"devices": devices[at : at + _MAX_DEVICES]} for at in starts]


def _counters(devices: Sequence[Device]) -> tuple[str, ...]:
    slots = {slot for device in devices if device.type == MIG_TYPE for slot in _slots(device)}
    return tuple(sorted(slots)) or (_OWNER,)


def _slots(device: Device) -> tuple[str, ...]:
    """Return the counters of a MIG device: its footprint, in DNS labels.

    Each of several shares of an instance has the slots with a suffix of its own, as `s0-t1`.
    """
    share = device.shares[0]
    slots = (slot.removesuffix(share_suffix(share.id)) for slot in share.footprint)
    return tuple(sorted(slot.replace("+", "-plus-").replace(".", "") for slot in slots))


def _ones(counters: Sequence[str]) -> dict[str, Any]:
    return {counter: {"value": "1"} for counter in counters}


def _busy_shares(state: GpuState, pool: str) -> frozenset[ShareId]:
    """Return the shares that the scheduler takes for free and that cannot be granted.

    The scheduler knows the ResourceClaims on devices that are published, in this pool. It knows
    neither those of an earlier pool or driver, nor leases of an earlier configuration, by the
    device plugin API or for other shares, nor cleanups.
    """
    offered = {share.id: share for share in state.shares}
    known = {
        share_id: lease
        for share_id, lease in state.leases.items()
        if lease.pool == pool and offered.get(share_id) == lease.share
    }
    counted = unavailable_shares(state.shares, known)
    others = {i: lease for i, lease in state.leases.items() if i not in known}
    init_containers = state.allocated.keys() - state.leases.keys()
    # Also what a claim excludes today: the scheduler sees its end before the next slice.
    unavailable = conflicting_shares(state)
    excluded = unavailable_shares(state.shares, others) & unavailable
    return (unavailable - counted) | others.keys() | init_containers | excluded


def _free_shares(
    device: Device, snapshot: Snapshot, state: GpuState, busy: frozenset[ShareId]
) -> list[Share]:
    """Return the shares of a device that claims have or may have."""
    free = [share for share in device.shares if share.id not in busy]
    if _is_full(device, snapshot, state):
        free = [share for share in free if share.id in state.leases]
    return free


def _capacity(device: Device, state: GpuState, free: int) -> dict[str, Any]:
    """Return the capacity of a device, and of a shared one how it is consumed.

    For no free share it is that of all: a taint keeps claims away, and zero is no capacity.
    """
    if device.capacity_name is None:
        return fixed_capacity(device, state.gpu)

    count, unit = free or len(device.shares), quantity(device.unit)
    # A range needs place for two steps.
    ranged = {"validRange": {"min": unit, "step": unit}} if count > 1 else {"validValues": [unit]}
    capacity = {
        "value": quantity(count * device.unit),
        "requestPolicy": {"default": unit, **ranged},
    }
    return {device.capacity_name: capacity}


def _is_full(device: Device, snapshot: Snapshot, state: GpuState) -> bool:
    """Return whether the GPU serves as many containers of a backend as it can."""
    offer = snapshot.offers.get(device.resource)
    most = offer.rule.max_containers.get(device.gpu) if offer is not None else None
    leases = (lease for lease in state.leases.values() if lease.share.backend == device.backend)
    return most is not None and count_containers(leases) >= most


def _taints(device: Device, state: GpuState, *, held: bool) -> list[Mapping[str, str]]:
    """Return the reasons to allocate nothing of a device for now."""
    fault = "mig-device" if state.verdict.healthy else str(state.verdict.fault or "")
    values = {UNHEALTHY: fault, SUSPENDED: device.backend}
    # The scheduler knows of most leases: `held` tells it of the others alone.
    found = {
        row.taint: values.get(row.taint, "")
        for row, shares in availability_of(state).found
        if row.taint not in ("", HELD) and all(share.id in shares for share in device.shares)
    }
    if held:
        found[HELD] = state.owner or ""
    return [
        {"key": key, **({"value": value} if value else {}), "effect": "NoSchedule"}
        for key, value in found.items()
    ]


_OF_THE_SERVER: Final = frozenset(("timeAdded", "generation"))
"""Fields that differ without a difference: the time of a taint, and the pool's generation."""


def comparable(spec: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a spec in which equal contents are equal values."""
    if isinstance(spec, Mapping):
        return {key: comparable(inner) for key, inner in spec.items() if key not in _OF_THE_SERVER}
    if isinstance(spec, list | tuple):
        return [comparable(entry) for entry in spec]
    if isinstance(spec, str) and "." not in spec:  # 12.8 and 12.80 are versions
        return spec if (amount := quantity_value(spec)) is None else amount
    return spec


def dropped_fields(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str]:
    """Return the paths of fields that were sent and are not in the answer."""
    return list(dict.fromkeys(_missing(sent, answer, "")))


def sent_fields(sent: Mapping[str, Any]) -> frozenset[str]:
    """Return the paths of all fields that `dropped_fields` could name."""
    return frozenset(_fields(sent, ""))


def _fields(sent: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - any JSON
    if isinstance(sent, Mapping):
        for key, value in sent.items():
            if value:
                yield (place := f"{path}.{key}" if path else key)
                yield from _fields(value, place)
    elif isinstance(sent, list | tuple):
        for entry in sent:
            yield from _fields(entry, f"{path}[]")


def _missing(sent: Any, answer: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - any JSON
    if isinstance(sent, Mapping) and isinstance(answer, Mapping):
        for key, value in sent.items():
            place = f"{path}.{key}" if path else key
            if value and not answer.get(key):
                yield place
            else:
                yield from _missing(value, answer.get(key), place)
    elif isinstance(sent, list | tuple) and isinstance(answer, list | tuple):
        for one, other in zip(sent, answer, strict=False):
            yield from _missing(one, other, f"{path}[]")

"""Attributes and fixed capacities of devices: ResourceClaims select by them. Pure.

The names are those of NVIDIA's DRA driver, and of Kubernetes where it has one. An attribute without
a domain belongs to the driver.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from metagpu.core.devices.devices import MEMORY, MIG_TYPE, Device
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.mig import profile_of, slot_of
from metagpu.core.model.snapshot import Versions

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
    profile = next(it for it in gpu.mig_profiles if it.name == name)
    place = next(it for it in profile.placements if it.start == int(start))
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

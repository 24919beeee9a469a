"""Attributes and fixed capacities of devices: ResourceClaims select by them. Pure.

The names are those of NVIDIA's DRA driver, and of Kubernetes where it has one. An attribute without
a domain belongs to the driver.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from metagpu.core.devices.devices import MEMORY, MIG_TYPE, Device
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.mig import profile_of
from metagpu.core.model.snapshot import Versions

_STANDARD: Final = "resource.kubernetes.io"
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
        **_identity(device),
        "productName": gpu.name,
        "architecture": gpu.architecture,
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
    """Return the capacity of a device that one ResourceClaim has alone: its memory.

    ResourceClaims would consume every capacity of a shared device, so it has one alone.
    """
    memory = device.shares[0].memory if device.type == MIG_TYPE else gpu.memory
    return {MEMORY: {"value": quantity(memory)}} if memory else {}


def quantity(amount: int) -> str:
    """Return an amount as a Quantity of Kubernetes; whole MiB are written so."""
    return f"{amount // MIB}Mi" if amount and amount % MIB == 0 else str(amount)


def _identity(device: Device) -> Mapping[str, str]:
    if device.type != MIG_TYPE:
        return {"uuid": device.gpu}
    return {"parentUUID": device.gpu, "profile": profile_of(device.shares[0].id)}


def _version(*numbers: int) -> str:
    """Return a semantic version, empty without numbers."""
    return ".".join(map(str, (*numbers, 0, 0)[:3])) if numbers else ""

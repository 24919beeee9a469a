"""Parts of metagpu's pools: entries of `backends`, and selectors of GPUs.

No other module of `compat` knows these options.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from metagpu.compat.contract import Data, Origin
from metagpu.core.config.errors import ConfigReason

Strategy = Literal["none", "single", "mixed"]
"""NVIDIA's three strategies for the names of MIG instances."""

_PLACEMENTS: Final = {"distributed": "spread", "packed": "binpack"}
"""The `placement` of backends that place parts of GPUs, by NVIDIA's allocation policy."""


def whole(resource: str) -> Data:
    """Offer GPUs in one piece."""
    return {"backend": "whole", "resource": resource}


def fraction(
    resource: str,
    *,
    shares: int | None = None,
    unit_mib: int | None = None,
    metagpu_env: bool = False,
) -> Data:
    """Offer parts of GPUs, by the number of parts or by the MiB of one part.

    `metagpu_env` sets all of MetaGPU's variables in containers.
    """
    size = {"sharesPerGpu": shares} if unit_mib is None else {"memoryUnit": f"{unit_mib}Mi"}
    names = {"metagpuEnv": True} if metagpu_env else {}
    return {"backend": "fraction", "resource": resource, **size, **names}


def timeslice(resource: str, replicas: int, *, refuse_several: bool, policy: str | None) -> Data:
    """Offer GPUs several times over."""
    return {
        "backend": "timeslice",
        "resource": resource,
        "replicas": replicas,
        **({"failRequestsGreaterThanOne": True} if refuse_several else {}),
        **({"allocationPolicy": policy} if policy else {}),
    }


def mps(resource: str, replicas: int, *, policy: str | None = None) -> Data:
    """Offer equal parts of GPUs under MPS."""
    return {"backend": "mps", "resource": resource, "replicas": replicas, **_placement(policy)}


def mig_layout(
    layout: Mapping[str, int],
    resource: str | Mapping[str, str] | None = None,
    *,
    replicas: Mapping[str, int] = MappingProxyType({}),
    refuse_several: bool = False,
) -> Data:
    """Offer fixed MIG instances, a number of each profile.

    Args:
        layout: number of instances, by profile.
        resource: the name of all instances, or by profile the names that are not NVIDIA's.
        replicas: how many times over the instances of a profile are offered.
        refuse_several: whether a container may hold one replica at most.
    """
    names = resource if resource is None or isinstance(resource, str) else dict(resource)
    return {
        "backend": "mig",
        **({"resource": names} if names else {}),
        **({"replicas": dict(replicas)} if replicas else {}),
        **({"failRequestsGreaterThanOne": True} if replicas and refuse_several else {}),
        "layout": dict(layout),
        "enableMig": True,
    }


def mig_off() -> Data:
    """Turn MIG mode off; the other backends of the pool share the GPUs."""
    return {"backend": "mig", "disableMig": True}


def mig_existing(resource: str | None) -> Data:
    """Offer the MIG instances that are there; one resource name for all, or their own."""
    return {"backend": "mig", "existing": True, **({"resource": resource} if resource else {})}


def mig_mps(
    layout: Mapping[str, int],
    resource: str | Mapping[str, str],
    replicas: Mapping[str, int],
    *,
    policy: str | None = None,
) -> Data:
    """Offer fixed MIG instances, some of them as equal parts under MPS."""
    return {
        **mig_layout(layout, resource),
        "mps": {"replicas": dict(replicas), **_placement(policy)},
    }


def mig_resource(profile: str) -> str:
    """Name the instances of a profile as NVIDIA's device plugin does."""
    return f"nvidia.com/mig-{profile.replace('+', '.')}"


def mig_on_demand(profiles: Sequence[str]) -> Data:
    """Offer MIG instances of these profiles, created when a pod requests one."""
    return {"backend": "mig", "profiles": list(profiles), "enableMig": True}


def _placement(policy: str | None) -> Data:
    return {"placement": _PLACEMENTS[policy]} if policy else {}


_GPU_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MIG_DEVICE: Final = re.compile(r"\d+:\d+|MIG-[0-9a-fA-F-]{36}|MIG-GPU-[0-9a-fA-F-]{36}/\d+/\d+")
_WRITE: Final = 'write "all", a number of GPUs, or a list of indices and uuids'


def by_index(numbers: Sequence[int]) -> Data:
    """Select GPUs by index."""
    return {"index": ",".join(str(number) for number in sorted(set(numbers)))}


def by_model(models: Sequence[str]) -> Data:
    """Select GPUs whose product name has a model as a whole word: not H20 in H200."""
    patterns = [f"*{re.sub(r'[][?*]', '?', model)}" for model in dict.fromkeys(models)]
    return {"product": [text for it in patterns for text in (it, f"{it}[!0-9A-Za-z]*")]}


def check_devices(value: str | int | Sequence[str | int], origin: Origin) -> None:
    """Check NVIDIA's `devices`: `all`, a number, or a list of devices.

    Raises:
        ConfigError: the value is none of these.
    """
    if isinstance(value, str):
        if value != "all":
            problem = f"{value!r} is unknown; {_WRITE}"
            raise origin.document.error(origin.path, problem, ConfigReason.UNKNOWN_VALUE)
        return
    if isinstance(value, int):
        if value < 1:
            problem = f"{value} GPUs are none; {_WRITE}"
            raise origin.document.error(origin.path, problem, ConfigReason.INVALID_VALUE)
        return
    if not value:
        problem = f"no device is named; {_WRITE}"
        raise origin.document.error(origin.path, problem, ConfigReason.MISSING)
    for place, reference in enumerate(value):
        text = str(reference)
        if not (text.isdecimal() or _GPU_UUID.fullmatch(text) or _MIG_DEVICE.fullmatch(text)):
            raise origin.document.error(
                f"{origin.path}[{place}]",
                f"{reference!r} is not a device; write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef",
                ConfigReason.INVALID_VALUE,
            )

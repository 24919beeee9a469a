"""How a pool names its backends: the one place where conversions know our options."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from metagpu.compat.contract import Data

Strategy = Literal["none", "single", "mixed"]
"""How MIG instances are named: NVIDIA's three ways."""

_PLACEMENTS: Final = {"distributed": "spread", "packed": "binpack"}
"""NVIDIA's policies, in the words of backends that place parts of GPUs."""


def whole(resource: str) -> Data:
    """Offer GPUs in one piece."""
    return {"backend": "whole", "resource": resource}


def fraction(resource: str, *, shares: int | None = None, unit_mib: int | None = None) -> Data:
    """Offer parts of GPUs, by their number or by the memory of one, in MiB."""
    size = {"sharesPerGpu": shares} if unit_mib is None else {"memoryUnit": f"{unit_mib}Mi"}
    return {"backend": "fraction", "resource": resource, **size}


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
    return {"backend": "mps", "resource": resource, "replicas": replicas, **_placed(policy)}


def mig_layout(
    layout: Mapping[str, int],
    resource: str | Mapping[str, str] | None = None,
    *,
    replicas: Mapping[str, int] = MappingProxyType({}),
    refuse_several: bool = False,
) -> Data:
    """Offer fixed MIG instances, so many of each profile.

    Args:
        layout: how many of which profile.
        resource: the name of all of them, or of those whose names are not NVIDIA's, by profile.
        replicas: how many times over the instances of a profile are offered.
        refuse_several: whether a container may have but one of those.
    """
    named = resource if resource is None or isinstance(resource, str) else dict(resource)
    return {
        "backend": "mig",
        **({"resource": named} if named else {}),
        **({"replicas": dict(replicas)} if replicas else {}),
        **({"failRequestsGreaterThanOne": True} if replicas and refuse_several else {}),
        "layout": dict(layout),
        "enableMig": True,
    }


def mig_mps(
    layout: Mapping[str, int],
    resource: str | Mapping[str, str],
    replicas: Mapping[str, int],
    *,
    policy: str | None = None,
) -> Data:
    """Offer fixed MIG instances as `mig_layout` does, and of some of them equal parts under MPS."""
    return {
        **mig_layout(layout, resource),
        "mps": {"replicas": dict(replicas), **_placed(policy)},
    }


def mig_resource(profile: str) -> str:
    """Name the instances of a profile as NVIDIA's device plugin does."""
    return f"nvidia.com/mig-{profile.replace('+', '.')}"


def mig_on_demand(profiles: Sequence[str]) -> Data:
    """Offer MIG instances of these profiles, which are made when asked for."""
    return {"backend": "mig", "profiles": list(profiles), "enableMig": True}


def _placed(policy: str | None) -> Data:
    return {"placement": _PLACEMENTS[policy]} if policy else {}

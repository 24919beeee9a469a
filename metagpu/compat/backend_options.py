"""Parts of metagpu's pools: entries of `backends`, and selectors of GPUs.

No other module of `compat` knows these options.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from metagpu.compat.contract import Data, Origin
from metagpu.core.config.errors import ConfigReason

Strategy = Literal["none", "single", "mixed"]
"""NVIDIA's three strategies for the names of MIG instances."""

MIG_PREFIX: Final = "nvidia.com/mig-"
_MIG_RESOURCE: Final = re.compile(
    rf"{MIG_PREFIX}([0-9]+g\.[0-9]+gb)((?:-me)?|\.me(?:\.all)?|\.gfx)"
)
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


def mps(resource: str, replicas: int, *, policy: str | None = None) -> Data:
    """Offer equal parts of GPUs under MPS."""
    return {"backend": "mps", "resource": resource, "replicas": replicas, **_placement(policy)}


class Sharing(msgspec.Struct, frozen=True):
    """NVIDIA's options of sharing, which hold for GPUs and instances alike.

    Attributes:
        by_mps: whether containers share through MPS, not by time-slices.
        refuse_several: whether a container may hold one replica at most.
        policy: NVIDIA's policy for the placement of replicas.
    """

    by_mps: bool = False
    refuse_several: bool = False
    policy: str | None = None

    def gpus(self, resource: str, replicas: int) -> Data:
        """Offer GPUs several times over, or equal parts of them under MPS."""
        if self.by_mps:
            return mps(resource, replicas, policy=self.policy)
        shared = {"backend": "timeslice", "resource": resource, "replicas": replicas}
        return {**shared, **self._time_slicing()}

    def instances(
        self,
        source: Data,
        resource: str | Mapping[str, str],
        replicas: int | Mapping[str, int],
    ) -> Data:
        """Offer the instances of `mig_layout` or `mig_existing`, some of them shared.

        Args:
            source: where the instances come from.
            resource: the name of all instances, or by profile the names that are not NVIDIA's.
            replicas: how many times over the instances are offered: all, or by profile.
        """
        named: Data = {"resource": resource} if resource else {}
        if replicas in (1, {}):
            return {"backend": "mig", **named, **source}
        if self.by_mps:
            shared: Data = {"mps": {"replicas": replicas, **_placement(self.policy)}}
        else:
            shared = {"replicas": replicas, **self._time_slicing()}
        return {"backend": "mig", **named, **shared, **source}

    def _time_slicing(self) -> Data:
        return {
            **({"failRequestsGreaterThanOne": True} if self.refuse_several else {}),
            **({"allocationPolicy": self.policy} if self.policy else {}),
        }


def mig_layout(layout: Mapping[str, int]) -> Data:
    """Name fixed MIG instances, a number of each profile."""
    return {"layout": dict(layout), "enableMig": True}


def mig_existing() -> Data:
    """Name the MIG instances that are there."""
    return {"existing": True}


def mig_off() -> Data:
    """Turn MIG mode off; the other backends of the pool share the GPUs."""
    return {"backend": "mig", "disableMig": True}


def mig_resource(profile: str) -> str:
    """Name the instances of a profile as NVIDIA's device plugin does."""
    return f"{MIG_PREFIX}{profile.replace('+', '.')}"


def mig_profile(resource: str) -> str | None:
    """Return the profile of NVIDIA's name for it, `None` for another name."""
    found = _MIG_RESOURCE.fullmatch(resource)
    return found and found[1] + found[2].replace(".", "+", 1)


def mig_on_demand(profiles: Sequence[str]) -> Data:
    """Offer MIG instances of these profiles, created when a pod requests one."""
    return {"backend": "mig", "profiles": list(profiles), "enableMig": True}


def _placement(policy: str | None) -> Data:
    return {"placement": _PLACEMENTS[policy]} if policy else {}


_INDEX: Final = re.compile("[0-9]+")
_GPU_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MIG_DEVICE: Final = re.compile(
    r"[0-9]+:[0-9]+|MIG-[0-9a-fA-F-]{36}|MIG-GPU-[0-9a-fA-F-]{36}/[0-9]+/[0-9]+"
)
_WRITE: Final = 'write "all", a number of GPUs, or a list of indices and uuids'


def by_index(numbers: Sequence[int]) -> Data:
    """Select GPUs by index."""
    return {"index": ",".join(str(number) for number in sorted(set(numbers)))}


def by_model(models: Sequence[str]) -> Data:
    """Select GPUs whose product name has a model in it."""
    return {"product": [f"*{re.sub(r'[][?*]', '?', model)}*" for model in dict.fromkeys(models)]}


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
    for place, reference in enumerate(value):
        text = str(reference)
        if not (
            (text.isascii() and text.isdecimal())
            or _GPU_UUID.fullmatch(text)
            or _MIG_DEVICE.fullmatch(text)
        ):
            raise origin.document.error(
                f"{origin.path}[{place}]",
                f"{reference!r} is not a device; write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef",
                ConfigReason.INVALID_VALUE,
            )

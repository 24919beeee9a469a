"""What a pool may say to MIG, and what of it contradicts itself."""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from metagpu.backends.mig.board import resource_of
from metagpu.backends.mig.division import Division, MpsTerms, turns, units
from metagpu.core.backend import Options
from metagpu.core.gpu import Gpu
from metagpu.core.model import ResourceName
from metagpu.core.units import Duration

_PROFILE: Final = re.compile(r"\d+g\.\d+gb(\+me|\+me\.all|\+gfx|-me)?")
_LONGEST: Final = 15.0
"""Seconds: the kubelet's account is awaited for 20 s from the beginning of a lease on."""
_KEEP_WARM: Final = 30.0
"""Seconds, where nothing is said."""
_MOST_REPLICAS: Final = 100
"""Of an instance: with two digits every id stays within the kubelet's 63 characters."""


class Create(StrEnum):
    """When a container waits for its instance."""

    ALLOCATE = "allocate"
    START = "start"


class MigOptions(Options, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a pool may say to MIG: either profiles or a layout.

    Attributes:
        profiles: the kinds of instances that pods may ask for, by NVIDIA's names.
        layout: the instances that each GPU has all the time: so many of each profile.
        resource: names for the instances of a layout, by profile, or one for all.
        replicas: how many containers may have an instance of a layout at once, by profile, or of
            all; they take turns on it.
        mps: of which instances of a layout containers compute at the same time, each within its
            part.
        fail_requests_greater_than_one: whether to refuse a container that asks for several
            replicas.
        enable_mig: whether to turn MIG mode on, on GPUs that nobody uses.
        create: when a container waits for the instance that is made for it: while its pod is
            admitted, or when it starts. Left out, when it starts if that can be.
        keep_warm: how long an instance made for a pod is kept for the next when it has gone.
        deadline: how long making an instance may take.
    """

    profiles: tuple[str, ...] | None = None
    layout: dict[str, int] | None = None
    resource: str | dict[str, str] | None = None
    replicas: int | dict[str, int] = 1
    mps: MpsTerms | None = None
    fail_requests_greater_than_one: bool = False
    enable_mig: bool = False
    create: Create | None = None
    keep_warm: Duration | None = None
    deadline: Duration = Duration(10)

    def __post_init__(self) -> None:
        if (self.profiles is None) == (self.layout is None):
            raise ValueError(
                "give either profiles, such as [1g.5gb], of which instances are made when pods "
                "ask, or a layout, such as {1g.5gb: 7}, of instances that are always there"
            )
        for name in self.names:
            if not _PROFILE.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no MIG profile such as 1g.5gb or 1g.5gb+me; "
                    "`nvidia-smi mig -lgip` lists a GPU's"
                )
        if self.layout is None:
            self._check_profiles()
        else:
            self._check_layout(self.layout)
            self._check_resources(self.layout)
            self._check_replicas(self.layout)
        if not 1 <= self.deadline <= _LONGEST:
            raise ValueError(f"deadline is {self.deadline:g}s; allowed: 1s to {_LONGEST:g}s")

    @property
    def names(self) -> tuple[str, ...]:
        """The profiles of which there are or may be instances."""
        return tuple(self.layout or ()) if self.profiles is None else self.profiles

    @property
    def warm(self) -> float:
        """How many seconds an instance made for a pod is kept when it has gone."""
        return _KEEP_WARM if self.keep_warm is None else self.keep_warm

    def resource_of(self, profile: str) -> ResourceName:
        """Name the resource of a profile, by default as NVIDIA's device plugin does."""
        if isinstance(self.resource, str):
            return ResourceName(self.resource)
        if self.resource is not None and profile in self.resource:
            return ResourceName(self.resource[profile])
        several = self.replicas_of(profile) > 1 or self.shares_by_mps(profile)
        shared = ".shared" if several else ""
        return ResourceName(f"{resource_of(profile)}{shared}")

    def replicas_of(self, profile: str) -> int:
        """Say how many containers may have an instance of a profile at once."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.get(profile, 1)

    def shares_by_mps(self, profile: str) -> bool:
        """Tell whether instances of a profile are shared through MPS."""
        return self.mps is not None and profile in self.names and self.mps.has(profile)

    def divisions(self, gpu: Gpu) -> Mapping[str, Division]:
        """Say how instances on a GPU are divided, by profile."""
        return {
            it.name: units(self.mps, it, gpu)
            if self.mps is not None and self.shares_by_mps(it.name)
            else turns(self.replicas_of(it.name), it.memory)
            for it in gpu.mig_profiles
            if it.name in self.names
        }

    def _check_profiles(self) -> None:
        if not self.names:
            raise ValueError("profiles is empty; give at least one, such as 1g.5gb")
        if len(set(self.names)) != len(self.names):
            raise ValueError("profiles names one twice")
        if self.resource is not None:
            raise ValueError(
                "resource is for a layout; instances made when pods ask are named by profile"
            )
        if self.replicas != 1 or self.fail_requests_greater_than_one:
            raise ValueError(
                "replicas and failRequestsGreaterThanOne are for a layout; an instance made when "
                "a pod asks is that pod's"
            )
        if self.mps is not None:
            raise ValueError("mps is for a layout; an instance made when a pod asks is that pod's")

    def _check_layout(self, layout: Mapping[str, int]) -> None:
        if not layout:
            raise ValueError("layout is empty; give at least one instance, as in 1g.5gb: 7")
        for name, count in layout.items():
            if count < 1:
                raise ValueError(f"layout has {count} of {name}; give at least 1, or leave it out")
        if self.keep_warm is not None:
            raise ValueError("keepWarm is for profiles; the instances of a layout are always kept")
        if self.create is not None:
            raise ValueError("create is for profiles; the instances of a layout are there before")

    def _check_resources(self, layout: Mapping[str, int]) -> None:
        if isinstance(self.resource, dict):
            _check_named("resource", self.resource, layout)
        first: dict[ResourceName, str] = {}
        for name in layout:
            resource = self.resource_of(name)
            if resource in first:
                raise ValueError(
                    f"resource {resource} is one name for instances of one size, and layout has "
                    f"{first[resource]}, {name}; leave resource out, or have one profile"
                )
            first[resource] = name

    def _check_replicas(self, layout: Mapping[str, int]) -> None:
        if isinstance(self.replicas, dict):
            _check_named("replicas", self.replicas, layout)
        for name in layout:
            if not 1 <= (count := self.replicas_of(name)) <= _MOST_REPLICAS:
                raise ValueError(f"replicas is {count}; allowed: 1 to {_MOST_REPLICAS}")
            if count > 1 and self.shares_by_mps(name):
                raise ValueError(
                    f"containers of a {name} either take turns (replicas) or compute at the same "
                    "time (mps); name other profiles in one of the two"
                )
        for key, names in (self.mps.named if self.mps else {}).items():
            _check_named(key, names, layout)


def _check_named(key: str, names: Iterable[str], layout: Mapping[str, int]) -> None:
    for name in names:
        if name not in layout:
            raise ValueError(
                f"{key} names {name}, which layout has not; it has {', '.join(layout)}"
            )

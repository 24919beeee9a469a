"""The options of the backend `mig`, and the shares that a GPU can have under them."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec.structs import replace

from metagpu.backends.common.packing import AllocationPolicy
from metagpu.backends.mig.placement import UnplaceableLayout, layout_name, place_layout
from metagpu.backends.mig.profiles import PlacedProfile, geometry_of, profile_resource, share_id
from metagpu.backends.mig.provisioner import LEAVING
from metagpu.backends.mig.sharing import (
    InstanceSharing,
    MigMpsOptions,
    share_by_mps,
    share_by_time_slicing,
    with_suffix,
)
from metagpu.core.config.units import Duration
from metagpu.core.contracts.backend import Options
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceName, Share

_PROFILE: Final = re.compile(r"\d+g\.\d+gb(\+me|\+me\.all|\+gfx|-me)?")
_SIZE: Final = re.compile(r"\d+g")
_MAX_DEADLINE: Final = 15.0
"""Seconds: a new lease waits 20 s for the kubelet's report."""
_KEEP_WARM: Final = 30.0
"""Seconds, by default."""
_MAX_REPLICAS: Final = 1000
"""Of an instance: with three digits every id stays within the kubelet's 63 characters."""
_ANY: Final = "MIG instance"
"""Stands for the profiles of existing instances that no option names."""


class CreateAt(StrEnum):
    """The moment at which a container waits for its instance."""

    ALLOCATE = "allocate"
    START = "start"


class MigOptions(Options, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The options of MIG in a pool: profiles, a layout, or no MIG mode.

    Attributes:
        profiles: the profiles that pods may ask for, by NVIDIA's names, or by their size alone, as
            in `1g` (see `on`).
        layout: the instances that each GPU always has: the number of each profile. An empty one is
            MIG mode without an instance.
        disable_mig: whether the GPUs leave MIG mode; idle instances are removed before. The GPUs
            are then free for the other backends of the pool.
        existing: whether the instances that a GPU has when the configuration is applied are
            offered, of any creator, and left as they are; or their slots, as `1g.5gb@4`.
        resource: names of the instances, by profile, or one name where there is one profile.
        replicas: how many containers may hold an instance of a layout at once, by profile, or for
            all; they share it by time-slicing.
        mps: the instances of a layout on which containers compute at the same time, each within
            its part.
        fail_requests_greater_than_one: whether a container that asks for several replicas is
            refused.
        allocation_policy: the instance whose replica comes first.
        enable_mig: whether metagpu enables MIG mode, on unused GPUs.
        create: when a container waits for its instance: while its pod is admitted, or when it
            starts. By default when it starts, if the device list strategy allows that.
        keep_warm: how long an idle instance is kept for the next pod.
        deadline: how long the creation of an instance may take.
    """

    profiles: tuple[str, ...] | None = None
    layout: dict[str, int] | None = None
    disable_mig: bool = False
    existing: bool | tuple[str, ...] = False
    resource: str | dict[str, str] | None = None
    replicas: int | dict[str, int] = 1
    mps: MigMpsOptions | None = None
    fail_requests_greater_than_one: bool = False
    allocation_policy: AllocationPolicy = AllocationPolicy.DISTRIBUTED
    enable_mig: bool = False
    create: CreateAt | None = None
    keep_warm: Duration | None = None
    deadline: Duration = Duration(10)

    def __post_init__(self) -> None:
        given = (self.profiles is not None, self.layout is not None, self.disable_mig)
        if sum(given) + (self.existing is not False) != 1:
            raise ValueError(
                "give either profiles, such as [1g.5gb], of which instances are created when pods "
                "ask, or a layout, such as {1g.5gb: 7}, of instances that always exist, or "
                "existing: true, for instances that somebody else creates, or disableMig: true, "
                "for GPUs that leave MIG mode"
            )
        if self.disable_mig and self.enable_mig:
            raise ValueError("enableMig and disableMig contradict each other; give one of them")
        named = dict.fromkeys(
            profile for names in self._profiles_by_key.values() for profile in names
        )
        # NVML names the profiles of existing instances.
        for name in (*(self.profile_names if self.existing is False else ()), *named):
            if not _PROFILE.fullmatch(name) and name not in self.sizes:
                raise ValueError(
                    f"{name!r} is not a MIG profile such as 1g.5gb or 1g.5gb+me; "
                    "`nvidia-smi mig -lgip` lists a GPU's"
                )
        if (layout := self.fixed_layout) is None:
            self._check_profiles()
        else:
            self._check_layout(layout)
            self._check_replicas(self.profile_names if self.existing is False else (_ANY, *named))
        if self.existing is False:
            for key, names in self._profiles_by_key.items():
                _check_known(key, names, self.profile_names)
        self._check_resources()
        if not 1 <= self.deadline <= _MAX_DEADLINE:
            raise ValueError(f"deadline is {self.deadline:g}s; allowed: 1s to {_MAX_DEADLINE:g}s")

    @property
    def profile_names(self) -> tuple[str, ...]:
        """The profiles of the options: of `profiles` or of `layout`."""
        return tuple(self.fixed_layout or ()) if self.profiles is None else self.profiles

    @property
    def sizes(self) -> Sequence[str]:
        """The profiles that are named by their size alone."""
        return [name for name in self.profiles or () if _SIZE.fullmatch(name)]

    def on(self, gpu: Gpu) -> "MigOptions":
        """Return the options for one GPU: a size is its smallest profile without a suffix."""
        plain: dict[str, str] = {}
        for profile in sorted(gpu.mig_profiles, key=lambda each: each.memory) if self.sizes else ():
            if "+" not in profile.name and "-" not in profile.name:
                plain.setdefault(profile.name.partition(".")[0], profile.name)
        if not plain:
            return self
        profiles = tuple(dict.fromkeys(plain.get(name, name) for name in self.profile_names))
        resource = self.resource
        if isinstance(resource, dict):
            resource = {plain.get(name, name): its for name, its in resource.items()}
        return replace(self, profiles=profiles, resource=resource)

    @property
    def fixed_layout(self) -> dict[str, int] | None:
        """The instances that a GPU always has, `None` where they are created on demand."""
        if self.existing is not False:
            return dict(Counter(slot.rpartition("@")[0] for slot in self.slots))
        return {} if self.disable_mig else self.layout

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of existing instances, as far as they are known."""
        return () if isinstance(self.existing, bool) else self.existing

    @property
    def warm_seconds(self) -> float:
        """The seconds for which an idle instance is kept."""
        return _KEEP_WARM if self.keep_warm is None else self.keep_warm

    @property
    def _profiles_by_key(self) -> Mapping[str, Iterable[str]]:
        """The profiles that options name, by the key that names them."""
        given = {"resource": self.resource, "replicas": self.replicas}
        own = {key: names for key, names in given.items() if isinstance(names, dict)}
        return {**own, **(self.mps.profiles_by_key if self.mps else {})}

    def resource_of(self, profile: str) -> ResourceName:
        """Return the resource name of a profile, by default that of NVIDIA's plugin."""
        if isinstance(self.resource, str):
            return ResourceName(self.resource)
        if self.resource is not None and profile in self.resource:
            return ResourceName(self.resource[profile])
        several = self.replicas_of(profile) > 1 or self.uses_mps(profile)
        shared = ".shared" if several else ""
        return ResourceName(f"{profile_resource(profile)}{shared}")

    def replicas_of(self, profile: str) -> int:
        """Return how many containers may hold an instance of a profile at once."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.get(profile, 1)

    def uses_mps(self, profile: str) -> bool:
        """Return whether instances of a profile are shared through MPS."""
        return self.mps is not None and profile in self.profile_names and self.mps.includes(profile)

    def sharing_by_profile(self, gpu: Gpu) -> Mapping[str, InstanceSharing]:
        """Return the sharing of instances on a GPU, by profile."""
        return {
            profile.name: share_by_mps(self.mps, profile, gpu)
            if self.mps is not None and self.uses_mps(profile.name)
            else share_by_time_slicing(self.replicas_of(profile.name), profile.memory)
            for profile in gpu.mig_profiles
            if profile.name in self.profile_names
        }

    def _check_profiles(self) -> None:
        if not self.profile_names:
            raise ValueError("profiles is empty; give at least one, such as 1g.5gb")
        if len(set(self.profile_names)) != len(self.profile_names):
            raise ValueError("profiles contains a profile twice; leave one of them out")
        if self.replicas != 1 or self.fail_requests_greater_than_one:
            raise ValueError(
                "replicas and failRequestsGreaterThanOne are for a layout; an instance created on "
                "demand belongs to one pod"
            )
        if self.mps is not None:
            raise ValueError(
                "mps is for a layout; an instance created on demand belongs to one pod"
            )

    def _check_layout(self, layout: Mapping[str, int]) -> None:
        for name, count in layout.items():
            if count < 1:
                raise ValueError(f"layout has {count} of {name}; give at least 1, or leave it out")
        if self.keep_warm is not None:
            raise ValueError("keepWarm is for profiles; the instances of a layout are always kept")
        if self.create is not None:
            raise ValueError("create is for profiles; the instances of a layout exist before")

    def _check_resources(self) -> None:
        names = self.profile_names
        first: dict[ResourceName, str] = {}
        for name in names:
            resource = self.resource_of(name)
            if resource in first:
                raise ValueError(
                    f"resource {resource} is one name for instances of one size, and is given to "
                    f"{first[resource]} and {name}; give each profile a name of its own, such as "
                    f"resource: {{{first[resource]}: {resource}}}"
                )
            first[resource] = name

    def _check_replicas(self, profiles: Iterable[str]) -> None:
        for name in profiles:
            if not 1 <= (count := self.replicas_of(name)) <= _MAX_REPLICAS:
                raise ValueError(f"replicas is {count}; allowed: 1 to {_MAX_REPLICAS}")
            if count > 1 and self.mps is not None and self.mps.includes(name):
                raise ValueError(
                    f"containers of a {name} either take turns (replicas) or compute at the same "
                    "time (mps); name other profiles in one of the two"
                )


def _check_known(key: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"{key} names {name}, which this backend does not offer; it has {', '.join(known)}"
            )


def placed_profiles(options: MigOptions, gpu: Gpu) -> tuple[PlacedProfile, ...] | UnplaceableLayout:
    """Return the possible instances of a GPU, or those of the layout."""
    if options.fixed_layout is None:
        return geometry_of(gpu.mig_profiles, frozenset(options.profile_names)).placed_profiles
    if options.existing is not False:
        every = geometry_of(gpu.mig_profiles).placed_profiles
        return tuple(placed for placed in every if str(placed) in options.slots)
    return place_layout(gpu, options.fixed_layout)


def possible_shares(options: MigOptions, gpu: Gpu, backend: str) -> Sequence[Share]:
    """Return one share per placement of the allowed profiles, or those of the layout.

    The shares are the same whether MIG mode is on or off. A layout that does not fit has none.
    """
    if isinstance(placed := placed_profiles(options, gpu), UnplaceableLayout):
        return ()

    sharing_by_profile = options.sharing_by_profile(gpu)
    counted = Counter[ResourceName]()
    shares = []
    for placed_profile in placed:
        profile = placed_profile.profile.name
        resource, sharing = options.resource_of(profile), sharing_by_profile[profile]
        for suffix in sharing.suffixes:
            shares.append(
                Share(
                    id=share_id(gpu.id, f"{placed_profile}{suffix}"),
                    gpu=gpu.id,
                    resource=resource,
                    backend=backend,
                    number=counted[resource],
                    footprint=with_suffix(placed_profile.footprint, suffix),
                    memory=sharing.memory,
                    replica=sharing.replicas,
                )
            )
            counted[resource] += 1
    return shares


def misfit_reason(options: MigOptions, gpu: Gpu) -> str:
    """Return why a GPU can have none of the instances; its MIG mode plays no part."""
    if options.existing is not False or not options.profile_names:
        return ""
    if not gpu.mig_profiles:
        # A GPU that supports MIG has profiles, which NVML may fail to list.
        return "it does not support MIG" if gpu.mig_enabled is None else ""
    placed = placed_profiles(options, gpu)
    if isinstance(placed, UnplaceableLayout):
        return layout_problem(options, placed)
    return "" if placed else _profiles_problem(options, gpu)


def no_shares_reason(options: MigOptions, gpu: Gpu) -> str:
    """Return why a GPU has no instances, for one without any."""
    if options.disable_mig:
        return LEAVING if gpu.mig_enabled else "its pool has MIG mode off"
    if not gpu.mig_profiles:
        return "it does not support MIG, or NVML does not list its profiles"
    if isinstance(placed := placed_profiles(options, gpu), UnplaceableLayout):
        return layout_problem(options, placed)
    if not options.profile_names:
        return "it has no MIG instances"
    return _profiles_problem(options, gpu)


def _profiles_problem(options: MigOptions, gpu: Gpu) -> str:
    has = [profile.name for profile in gpu.mig_profiles]
    missing = ", ".join(name for name in options.profile_names if name not in has)
    return f"it has none of the MIG profiles {missing}; it has {', '.join(has)}"


def layout_problem(options: MigOptions, unplaceable: UnplaceableLayout) -> str:
    """Return why the fixed layout does not fit a GPU."""
    name = layout_name(options.fixed_layout or {})
    return f"the layout {name} does not fit: {unplaceable.reason}"

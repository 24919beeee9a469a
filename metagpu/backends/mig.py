"""MIG instances: made when a pod asks, a share for each placement, or as a fixed layout."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import ClassVar, Final

import anyio

from metagpu.backends.mig_board import board_of, profile_of, resource_of, share_id
from metagpu.backends.mig_fixed import planned, title
from metagpu.backends.mig_keeping import Keeping
from metagpu.backends.mig_ledger import Terms
from metagpu.backends.mig_mode import MigMode
from metagpu.backends.mig_placement import Seat, choose
from metagpu.backends.mig_planner import Misfit
from metagpu.backends.mig_profiles import Spot
from metagpu.core.backend import Backend, Guard, Options
from metagpu.core.errors import Overlap
from metagpu.core.injection import CDI_STRATEGIES, Injection
from metagpu.core.model import (
    Gpu,
    GpuState,
    Grant,
    ResourceName,
    Share,
    Snapshot,
    Stock,
    by_gpu,
    conflicts,
)
from metagpu.core.served import ServedGpu
from metagpu.core.units import Duration

_PROFILE: Final = re.compile(r"\d+g\.\d+gb(\+me|\+me\.all|\+gfx|-me)?")
_LONGEST: Final = 15.0
"""Seconds: the kubelet's account is awaited for 20 s from the beginning of a lease on."""
_GUARD: Final = 3.0
"""Seconds that Allocate waits longer than an instance may take: it tells why it was not made."""


_KEEP_WARM: Final = 30.0
"""Seconds, where nothing is said."""


class MigOptions(Options, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a pool may say to MIG: either profiles or a layout.

    Attributes:
        profiles: the kinds of instances that pods may ask for, by NVIDIA's names.
        layout: the instances that each GPU has all the time: so many of each profile.
        resource: one name for all instances of a layout, instead of one for each profile.
        enable_mig: whether to turn MIG mode on, on GPUs that nobody uses.
        keep_warm: how long an instance made for a pod is kept for the next when it has gone.
        deadline: how long making an instance may take.
    """

    profiles: tuple[str, ...] | None = None
    layout: dict[str, int] | None = None
    resource: str | None = None
    enable_mig: bool = False
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
        if not 1 <= self.deadline <= _LONGEST:
            raise ValueError(f"deadline is {self.deadline:g}s; allowed: 1s to {_LONGEST:g}s")

    @property
    def names(self) -> tuple[str, ...]:
        """The profiles of which there are or may be instances."""
        return tuple(self.layout or ()) if self.profiles is None else self.profiles

    def _check_profiles(self) -> None:
        if not self.names:
            raise ValueError("profiles is empty; give at least one, such as 1g.5gb")
        if len(set(self.names)) != len(self.names):
            raise ValueError("profiles names one twice")
        if self.resource is not None:
            raise ValueError(
                "resource is for a layout; instances made when pods ask are named by profile"
            )

    def _check_layout(self, layout: Mapping[str, int]) -> None:
        if not layout:
            raise ValueError("layout is empty; give at least one instance, as in 1g.5gb: 7")
        for name, count in layout.items():
            if count < 1:
                raise ValueError(f"layout has {count} of {name}; give at least 1, or leave it out")
        if self.resource is not None and len(layout) > 1:
            raise ValueError(
                f"resource {self.resource} is one name for instances of one size, and layout has "
                f"{', '.join(layout)}; leave resource out, or have one profile"
            )
        if self.keep_warm is not None:
            raise ValueError("keepWarm is for profiles; the instances of a layout are always kept")


class MigBackend(Backend):
    """Cuts a GPU in MIG mode. Ids are `GPU-<uuid>::2g.10gb@4`: profile and slice."""

    name: ClassVar[str] = "mig"
    options_type: ClassVar[type[Options]] = MigOptions
    readies: ClassVar[bool] = True
    cleans: ClassVar[bool] = True
    guard: ClassVar[Guard] = Guard.MIG

    def __init__(self, options: MigOptions, injection: Injection) -> None:
        self._options = options
        self._injection = injection

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "MigBackend":
        """Make it from a pool's options.

        Raises:
            ValueError: if containers are given GPUs by CDI: there is no specification of an
                instance that was just made.
        """
        if not isinstance(options, MigOptions):
            raise TypeError(f"mig cannot read {type(options).__name__}")
        if injection.strategies & CDI_STRATEGIES:
            raise ValueError(
                "MIG instances that are made here cannot be named by CDI yet; "
                "use deviceListStrategy envvar or volume-mounts"
            )
        return cls(options, injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """A resource for each profile, or the one that the pool names."""
        return tuple(dict.fromkeys(map(self._resource, self._options.names)))

    @property
    def patience(self) -> float:
        """How long instances may take to be made."""
        return self._options.deadline + _GUARD

    def why_none(self, gpu: Gpu) -> str:
        """Say why a GPU has no instances."""
        if not gpu.mig_profiles:
            return "it has no MIG, or NVML does not tell its profiles"
        if isinstance(spots := self._spots(gpu), Misfit):
            return self._refusal(spots)
        has = ", ".join(profile.name for profile in gpu.mig_profiles)
        return f"it has none of the MIG profiles {', '.join(self._options.names)}; it has {has}"

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Offer every placement of every profile that is allowed, or each instance of the layout.

        Whether MIG mode is on or not. A layout that does not fit has no shares.
        """
        if isinstance(spots := self._spots(gpu), Misfit):
            return ()

        memory = {profile.name: profile.memory for profile in gpu.mig_profiles}
        counted = Counter[ResourceName]()
        shares = []
        for spot in spots:
            resource = self._resource(spot.profile.name)
            shares.append(
                Share(
                    id=share_id(gpu.id, str(spot)),
                    gpu=gpu.id,
                    resource=resource,
                    backend=self.name,
                    number=counted[resource],
                    footprint=spot.footprint,
                    memory=memory[spot.profile.name],
                )
            )
            counted[resource] += 1
        return shares

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose the placements that leave the most valuable future; GPUs that are shut come last.

        Which shares are free is asked of the snapshot: the kubelet may not have heard yet.
        """
        must = by_gpu(required)
        seats = [
            _seat(snapshot.gpus[gpu], those, must.get(gpu, ()))
            for gpu, those in by_gpu([*required, *available]).items()
        ]
        sound = [
            seat for seat in seats if seat.required or snapshot.gpus[seat.gpu.id].open_to(self.name)
        ]
        chosen = choose(size, sound) or choose(size, seats) or []

        return list(dict.fromkeys([*chosen, *required, *available]))[:size]

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse instances that cannot be together, as two that want one media engine.

        Raises:
            Overlap: naming them.
        """
        for one, other in combinations(shares, 2):
            if one is not other and conflicts(one, other):
                names = f"{one.id.partition('::')[2]}, {other.id.partition('::')[2]}"
                raise Overlap(one.resource, str(snapshot.gpus[one.gpu].gpu), names)

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give the MIG devices that were made for the shares."""
        return self._injection.grant_made(shares, snapshot)

    async def serve(self, served: ServedGpu) -> None:
        """Make what is held, and remove what is not; or have a layout there, come what may."""
        options, spots = self._options, self._spots(served.gpu)
        if isinstance(spots, Misfit):
            served.suspend(self._refusal(spots))  # what there is stays as it is
            await anyio.sleep_forever()
            return

        warm = _KEEP_WARM if options.keep_warm is None else options.keep_warm
        fixed = None if options.layout is None else frozenset(map(str, spots))
        terms = Terms(frozenset(options.names), warm, options.deadline, fixed)
        await Keeping(served, terms, MigMode(served, enable=options.enable_mig)).run()

    def _spots(self, gpu: Gpu) -> tuple[Spot, ...] | Misfit:
        """Give the instances that may be, or those that the layout has."""
        options = self._options
        if options.layout is None:
            return board_of(gpu.mig_profiles, frozenset(options.names)).spots
        return planned(gpu, options.layout)

    def _resource(self, profile: str) -> ResourceName:
        named = self._options.resource
        return resource_of(profile) if named is None else ResourceName(named)

    def _refusal(self, misfit: Misfit) -> str:
        return f"the layout {title(self._options.layout or {})} does not fit: {misfit.reason}"


def _seat(state: GpuState, those: Sequence[Share], required: Sequence[Share]) -> Seat:
    """Show one GPU to the planner."""
    mine = [share for share in state.shares if share.backend == MigBackend.name]
    stock = state.stocks.get(MigBackend.name, Stock())
    left = {i for i, made in stock.made.items() if i not in state.leases}
    warm = {i for i in left if stock.made[i].idle}

    occupied = {slot for lease in state.leases.values() for slot in lease.share.footprint}
    occupied.update(stock.blocked)
    occupied.update(slot for it in mine if it.id in left - warm for slot in it.footprint)
    return Seat(
        state.gpu,
        board_of(state.gpu.mig_profiles, frozenset(profile_of(share.id) for share in mine)),
        frozenset(occupied),
        [it for it in those if it not in required and it.footprint.isdisjoint(occupied)],
        frozenset(required),
        frozenset(it for it in mine if it.id in warm),
    )

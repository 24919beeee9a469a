"""MIG instances made when a pod asks: a resource for each profile, a share for each placement."""

import re
from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar, Final

from metagpu.backends.mig_board import board_of, profile_of, resource_of, share_id
from metagpu.backends.mig_keeping import Keeping
from metagpu.backends.mig_ledger import Terms
from metagpu.backends.mig_mode import MigMode
from metagpu.backends.mig_placement import Seat, choose
from metagpu.core.backend import Backend, Options
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


class MigOptions(Options, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a pool may say to MIG.

    Attributes:
        profiles: the kinds of instances that pods may ask for, by NVIDIA's names.
        enable_mig: whether to turn MIG mode on, on GPUs that nobody uses.
        keep_warm: how long an instance that nobody holds any more is kept for the next.
        deadline: how long making an instance may take.
    """

    profiles: tuple[str, ...]
    enable_mig: bool = False
    keep_warm: Duration = Duration(30)
    deadline: Duration = Duration(10)

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("profiles is empty; give at least one, such as 1g.5gb")
        for name in self.profiles:
            if not _PROFILE.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no MIG profile such as 1g.5gb or 1g.5gb+me; "
                    "`nvidia-smi mig -lgip` lists a GPU's"
                )
        if len(set(self.profiles)) != len(self.profiles):
            raise ValueError("profiles names one twice")
        if not 1 <= self.deadline <= _LONGEST:
            raise ValueError(f"deadline is {self.deadline:g}s; allowed: 1s to {_LONGEST:g}s")


class MigBackend(Backend):
    """Cuts a GPU in MIG mode as pods ask. Ids are `GPU-<uuid>::2g.10gb@4`: profile and slice."""

    name: ClassVar[str] = "mig"
    options_type: ClassVar[type[Options]] = MigOptions
    readies: ClassVar[bool] = True
    cleans: ClassVar[bool] = True

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
                "instances made on demand cannot be named by CDI yet; "
                "use deviceListStrategy envvar or volume-mounts"
            )
        return cls(options, injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """A resource for each profile."""
        return tuple(map(resource_of, self._options.profiles))

    @property
    def patience(self) -> float:
        """How long instances may take to be made."""
        return self._options.deadline + _GUARD

    def why_none(self, gpu: Gpu) -> str:
        """Say why a GPU has no instances."""
        if not gpu.mig_profiles:
            return "it has no MIG, or NVML does not tell its profiles"
        has = ", ".join(profile.name for profile in gpu.mig_profiles)
        return f"it has none of the MIG profiles {', '.join(self._options.profiles)}; it has {has}"

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Offer every placement of every profile that is allowed, whether MIG mode is on or not."""
        board = board_of(gpu.mig_profiles, frozenset(self._options.profiles))
        memory = {profile.name: profile.memory for profile in gpu.mig_profiles}

        return [
            Share(
                id=share_id(gpu.id, str(spot)),
                gpu=gpu.id,
                resource=resource_of(profile.name),
                backend=self.name,
                number=number,
                footprint=spot.footprint,
                memory=memory[profile.name],
            )
            for profile in board.profiles
            for number, spot in enumerate(profile.spots)
        ]

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
        """Make what is held, and remove what is not."""
        options = self._options
        terms = Terms(frozenset(options.profiles), options.keep_warm, options.deadline)
        await Keeping(served, terms, MigMode(served, enable=options.enable_mig)).run()


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

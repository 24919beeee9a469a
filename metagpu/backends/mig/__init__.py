"""MIG instances: made when a pod asks, a share for each placement, or as a fixed layout."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import ClassVar, Final

import structlog

from metagpu.backends.mig import clients, figures
from metagpu.backends.mig.board import board_of, share_id
from metagpu.backends.mig.division import MpsTerms, through_mps, with_ending
from metagpu.backends.mig.fixed import fairest, planned, title
from metagpu.backends.mig.keeping import Keeping
from metagpu.backends.mig.ledger import Terms
from metagpu.backends.mig.mode import MigMode, foreseen
from metagpu.backends.mig.options import Create, MigOptions
from metagpu.backends.mig.placement import Seat, choose
from metagpu.backends.mig.planner import Misfit
from metagpu.backends.mig.profiles import Spot
from metagpu.backends.mig.rooms import rooms
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.core.backend import Backend, Guard, Options
from metagpu.core.errors import Overlap, TooManyReplicas
from metagpu.core.figures import Figure, FigureKind
from metagpu.core.gpu import Gpu
from metagpu.core.grant import Grant
from metagpu.core.injection import CDI_STRATEGIES, Injection
from metagpu.core.mig import profile_of
from metagpu.core.model import ResourceName, Share, Stock, by_gpu
from metagpu.core.room import Room
from metagpu.core.served import ServedGpu
from metagpu.core.sharing import conflicts
from metagpu.core.snapshot import GpuState, Snapshot

log = structlog.get_logger()

_GUARD: Final = 3.0
"""Seconds that Allocate waits longer than an instance may take: it tells why it was not made."""


class MigBackend(Backend):
    """Cuts a GPU in MIG mode. Ids are `GPU-<uuid>::2g.10gb@4`: profile and slice.

    Those of an instance that several containers may have end in the replica, `...@4-t1`, or in the
    unit under MPS, `...@4-p1`.
    """

    name: ClassVar[str] = "mig"
    options_type: ClassVar[type[Options]] = MigOptions
    readies: ClassVar[bool] = True
    cleans: ClassVar[bool] = True
    guard: ClassVar[Guard] = Guard.MIG
    tells: ClassVar[tuple[FigureKind, ...]] = figures.KINDS
    timing: ClassVar[Timing] = Timing(period=30.0)
    """Of control daemons of MPS: their ends are heard at once, and there may be seven to a GPU."""

    def __init__(self, options: MigOptions, injection: Injection) -> None:
        self._options = options
        self._injection = injection

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "MigBackend":
        """Make it from a pool's options.

        Raises:
            ValueError: if containers are told names that cannot be had for instances made here.
        """
        if not isinstance(options, MigOptions):
            raise TypeError(f"mig cannot read {type(options).__name__}")
        if injection.strategies & CDI_STRATEGIES and not injection.names_here:
            raise ValueError(
                "MIG instances that are made here are in no CDI specification of others; leave "
                "cdiKind out, or use deviceListStrategy envvar or volume-mounts"
            )
        if options.create is Create.START and not injection.names_alone:
            raise ValueError(
                "create: start tells a container the name of an instance before it is made, which "
                "only CDI can; set deviceListStrategy to cdi-cri or cdi-annotations alone, or "
                "leave create out"
            )
        return cls(options, injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """A resource for each profile, or the one that the pool names."""
        return tuple(dict.fromkeys(map(self._options.resource_of, self._options.names)))

    @property
    def patience(self) -> float:
        """How long instances may take to be made."""
        return self._options.deadline + _GUARD

    @property
    def defers(self) -> bool:
        """Whether containers wait for their instance at their start."""
        options = self._options
        if options.layout is not None or options.create is Create.ALLOCATE:
            return False
        return self._injection.names_alone

    def why_none(self, gpu: Gpu) -> str:
        """Say why a GPU has no instances."""
        if not gpu.mig_profiles:
            return "it has no MIG, or NVML does not tell its profiles"
        if isinstance(spots := self._spots(gpu), Misfit):
            return self._refusal(spots)
        has = ", ".join(profile.name for profile in gpu.mig_profiles)
        return f"it has none of the MIG profiles {', '.join(self._options.names)}; it has {has}"

    def foreseen(self, gpu: Gpu) -> str:
        """Say that MIG mode is off, where that will last."""
        return foreseen(gpu, enable=self._options.enable_mig)

    def rooms(self, states: Sequence[GpuState]) -> Sequence[Room]:
        """Say what is left of GPUs whose instances are made on demand, and what would help."""
        if self._options.layout is not None:
            return ()
        those = [state for state in states if state.gpu.mig_profiles]
        return rooms(those, frozenset(self._options.names), self.name)

    def figures(self, states: Sequence[GpuState]) -> Iterable[Figure]:
        """Tell which instances there are, and what there is room for where they are made."""
        names = self._options.names
        for state in states:
            if state.gpu.mig_profiles:
                yield from figures.made(state, names, self.name)
                if self._options.layout is None:
                    yield from figures.left(state, frozenset(names), self.name)

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Offer every placement of every profile that is allowed, or each instance of the layout.

        Whether MIG mode is on or not. A layout that does not fit has no shares.
        """
        if isinstance(spots := self._spots(gpu), Misfit):
            return ()

        options = self._options
        divisions = options.divisions(gpu)
        counted = Counter[ResourceName]()
        shares = []
        for spot in spots:
            profile = spot.profile.name
            resource, division = options.resource_of(profile), divisions[profile]
            for ending in division.endings:
                shares.append(
                    Share(
                        id=share_id(gpu.id, f"{spot}{ending}"),
                        gpu=gpu.id,
                        resource=resource,
                        backend=self.name,
                        number=counted[resource],
                        footprint=with_ending(spot.footprint, ending),
                        memory=division.memory,
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

        Of a layout, instances that the fewest containers have, or units of one that is shared
        through MPS. Which shares are free is asked of the snapshot: the kubelet may not have heard
        yet.
        """
        if self._options.layout is not None:
            if any(through_mps(share.id) for share in (*required, *available)):
                return clients.choose(size, available, required, snapshot, self._mps)
            return fairest(size, available, required, snapshot)

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

        And several replicas for one container, where the pool says so; units of several instances
        under MPS, and one container more than an instance serves.

        Raises:
            Overlap: naming them.
            TooManyReplicas: in the words of NVIDIA's device plugin.
            OneDeviceOnly: saying what is free where.
            TooManyClients: saying how many there are.
        """
        if any(through_mps(share.id) for share in shares):
            clients.check(shares, snapshot, self._mps)
        if self._options.fail_requests_greater_than_one and len(shares) > 1:
            for share in shares:
                if self._options.replicas_of(profile_of(share.id)) > 1:
                    raise TooManyReplicas(share.resource, len(shares))
        for one, other in combinations(shares, 2):
            if one is not other and conflicts(one, other):
                names = f"{one.id.partition('::')[2]}, {other.id.partition('::')[2]}"
                raise Overlap(one.resource, str(snapshot.gpus[one.gpu].gpu), names)

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give the MIG devices that were made for the shares, or will be when containers start.

        Or a part of one under MPS.
        """
        if self.defers:
            return self._injection.grant_places(shares, snapshot)
        grant = self._injection.grant_made(shares, snapshot)
        if not any(through_mps(share.id) for share in shares):
            return grant
        return clients.as_client(grant, shares, snapshot, self._injection.run_dir)

    async def serve(self, served: ServedGpu) -> None:
        """Make what is held, and remove what is not; or have a layout there, come what may."""
        options, spots = self._options, self._spots(served.gpu)
        if isinstance(spots, Misfit):
            await _stay_away(served, self._refusal(spots))
            return

        self._say_what_is_less(served.gpu)
        fixed = None if options.layout is None else frozenset(map(str, spots))
        endings = {name: it.endings for name, it in options.divisions(served.gpu).items()}
        shared = frozenset(filter(options.shares_by_mps, options.names))
        names = frozenset(options.names)
        terms = Terms(names, options.warm, options.deadline, fixed, endings, shared)
        mode = MigMode(served, enable=options.enable_mig)
        await Keeping(served, terms, mode, self._injection.run_dir, self.timing).run()

    def _say_what_is_less(self, gpu: Gpu) -> None:
        """Tell of replicas under MPS that an instance cannot serve."""
        for profile in gpu.mig_profiles:
            shared = self._options.shares_by_mps(profile.name)
            if shared and self._mps.too_many(profile, gpu):
                log.warning(
                    "an instance serves fewer clients than the pool has replicas; so many are "
                    "offered",
                    gpu=str(gpu),
                    profile=profile.name,
                    offered=self._mps.clients(profile, gpu),
                )

    @property
    def _mps(self) -> MpsTerms:
        """What holds of units: another pool may have cut them, under the same name."""
        return self._options.mps or MpsTerms()

    def _spots(self, gpu: Gpu) -> tuple[Spot, ...] | Misfit:
        """Give the instances that may be, or those that the layout has."""
        options = self._options
        if options.layout is None:
            return board_of(gpu.mig_profiles, frozenset(options.names)).spots
        return planned(gpu, options.layout)

    def _refusal(self, misfit: Misfit) -> str:
        return f"the layout {title(self._options.layout or {})} does not fit: {misfit.reason}"


async def _stay_away(served: ServedGpu, why: str) -> None:
    """Leave a GPU as it is, and do not keep others from it; until cancelled."""
    served.suspend(why)
    while True:
        await served.until(lambda _: served.since_last_lease is not None)
        if (since := served.since_last_lease) is not None:
            served.returned(since)


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

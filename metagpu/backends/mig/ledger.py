"""What is known of one GPU's instances, whose they are, and what follows: no NVML, no waiting.

Instances are known by their slot, such as `2g.10gb@4`, and are themselves by their uuid.

Whose an instance is (docs/decisions/0018): ours are those that were made here, that a pod holds
under a share of ours, or that were found at the start, could have been made here, and were left
alone for `GRACE`. All others are foreign: they are not touched, and their slots are not offered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from metagpu.backends.mig.board import board_of, share_id, slot_in
from metagpu.backends.mig.division import WHOLE
from metagpu.backends.mig.profiles import Profile, Spot
from metagpu.core.mig import MigInstance, slot_of
from metagpu.core.model import Failure, Lease, ShareId, Stock
from metagpu.core.snapshot import GpuState

LOOK: Final = 30.0
"""Seconds between two looks at a GPU where nothing happens."""
POLL: Final = 2.0
"""Seconds between two looks while a program runs on an instance that nobody holds."""
GRACE: Final = 30.0
"""Seconds that an instance found at the start must be left alone to be taken for ours: longer than
the kubelet takes to tell of a pod that was admitted while nobody was here."""


class Terms(msgspec.Struct, frozen=True):
    """What the configuration says; times in seconds.

    Attributes:
        allowed: the profiles of which instances may be made.
        fixed: the instances that shall be there all the time, `None` if they are made on demand.
        endings: what ids of an instance's shares end in, by profile; one container has it if
            nothing is said.
        shared: the profiles of which instances are shared through MPS.
    """

    allowed: frozenset[str]
    keep_warm: float
    deadline: float
    fixed: frozenset[str] | None = None
    endings: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    shared: frozenset[str] = frozenset()


class Stuck(NamedTuple):
    """What could not be removed, or made: why, when to try again, and how long that pause is."""

    why: str
    again: float
    pause: float


@dataclass(slots=True)
class Ledger:
    """The instances of one GPU. Times are those of the event loop.

    Attributes:
        present: what NVML listed last, by slot.
        ours: the identities of those that may be removed.
        found: those found at the start, and since when they are left alone.
        idle: ours that nobody holds or uses, and since when.
        left: those that were held when all was told last, and were not looked at since.
        users: programs on what nobody holds, for messages.
        busy: what is being made or removed; `making` what is being made.
        stuck: what could not be removed.
        late: what NVML was asked to make and did not answer in time.
        failed: leases whose shares could not be made.
        lost: shares that pods hold and whose instances are gone.
        control: why the MPS control daemon of a device takes no clients, empty where it does.
    """

    terms: Terms
    backend: str
    state: GpuState
    present: dict[str, MigInstance] = field(default_factory=dict)
    ours: set[str] = field(default_factory=set)
    found: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    users: dict[str, str] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    making: set[str] = field(default_factory=set)
    stuck: dict[str, Stuck] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    failed: dict[ShareId, Failure] = field(default_factory=dict)
    lost: frozenset[ShareId] = frozenset()
    control: dict[str, str] = field(default_factory=dict)
    looked: bool = False

    def take_in(self, listed: Sequence[MigInstance], now: float) -> None:
        """Take in what NVML lists, and whose it is; nothing is out that NVML was asked to do."""
        leases = self.state.leases
        told = {slot_of(share) for share, lease in leases.items() if lease.holder is not None}
        before = set[str]()
        if not self.looked:  # what was told in this daemon, under another configuration
            stock = self.state.stocks.get(self.backend, Stock())
            before = {made.device for made in stock.made.values()}
            self.late |= stock.making
        self.present = {slot_in(self.state.gpu.mig_profiles, it): it for it in listed}

        for slot, instance in self.present.items():
            if slot in told or slot in self.late or identity(instance) in before:
                self.ours.add(identity(instance))
            elif self._could_be_ours(slot, instance):
                self.found[slot] = now

        self.ours &= {identity(instance) for instance in listed}
        for known in (self.found, self.idle, self.users, self.stuck):
            for slot in known.keys() - self.present.keys():
                known.pop(slot)
        for slot in told & self.found.keys():
            del self.found[slot]
        devices = {it.uuid for instance in listed for it in instance.computes}
        self.control = {uuid: why for uuid, why in self.control.items() if uuid in devices}
        self.late.clear()
        self.looked = True
        self.lost = frozenset(
            share
            for share, lease in leases.items()
            if lease.share.backend == self.backend
            and lease.holder is not None
            and slot_of(share) not in self.present
        )

    @property
    def loose(self) -> list[str]:
        """Those that nobody holds, and that are ours or may be."""
        return [slot for slot in self.present if slot in self.found or self.is_loose(slot)]

    def see(self, pids: Mapping[int | None, Sequence[int]], now: float) -> None:
        """Take in who runs on which GPU instance, by its number; asked for if any is `loose`."""
        self.users = {
            slot: ", ".join(f"process {pid}" for pid in sorted(set(here)))
            for slot in self.loose
            if (here := pids.get(self.present[slot].number))
        }
        elsewhere = self.state.elsewhere
        for slot, since in list(self.found.items()):
            if elsewhere is not None and identity(self.present[slot]) in elsewhere:
                del self.found[slot]  # another plugin's: not ours for good
            elif slot in self.users or elsewhere is None:
                self.found[slot] = now
            elif now - since >= GRACE:
                del self.found[slot]
                self.ours.add(identity(self.present[slot]))

        self.left &= self.held
        self.idle = {
            slot: self.idle.get(slot, now)
            for slot in self.present
            if self.is_loose(slot) and slot not in self.users
        }

    def is_ours(self, slot: str) -> bool:
        """Tell whether there is an instance of ours."""
        instance = self.present.get(slot)
        return instance is not None and identity(instance) in self.ours

    def is_loose(self, slot: str) -> bool:
        """Tell whether there is an instance of ours that nobody holds."""
        return self.is_ours(slot) and slot not in self.held

    def is_broken(self, slot: str) -> bool:
        """Tell whether there is an instance that is out of service."""
        instance = self.present.get(slot)
        return instance is not None and identity(instance) in self.state.faults

    @property
    def held(self) -> set[str]:
        """The instances that leases are about."""
        return set(map(slot_of, self.state.leases))

    def shares(self, slot: str) -> list[ShareId]:
        """Give the ids of the shares that an instance stands for."""
        endings = self.terms.endings.get(slot.rpartition("@")[0], WHOLE)
        return [share_id(self.state.gpu.id, f"{slot}{ending}") for ending in endings]

    def through_mps(self, slot: str) -> bool:
        """Tell whether the shares of an instance are for clients of MPS."""
        return slot.rpartition("@")[0] in self.terms.shared

    def waiting(self) -> Iterator[Lease]:
        """Find the leases of containers that wait for an instance, while admitted or at a start.

        Any other that a pod is told of is about an instance that was, and no other can replace.
        """
        for share, lease in self.state.leases.items():
            failure, slot = self.failed.get(share), slot_of(share)
            if (
                lease.share.backend == self.backend
                and (lease.holder is None or lease.awaited)
                and slot not in self.busy
                and not self.is_ours(slot)
                and (failure is None or failure.since != lease.since)
            ):
                yield lease

    def unwanted(self, now: float) -> list[str]:
        """Find what has been idle for long enough, or was never finished."""
        return [slot for slot in self.idle if slot not in self.busy and now >= self._removal(slot)]

    def pause(self, now: float) -> float:
        """Say after how many seconds there may be something to do, if nothing happens."""
        times = [now + LOOK, *(now + POLL for _ in (*self.users, *self.found))]
        times += [self._removal(slot) for slot in self.idle if slot not in self.busy]
        return max(0.0, min(times) - now)

    def absent(self, now: float) -> list[str]:  # noqa: ARG002 - a layout's are tried again later
        """Find the instances of a layout that are to be made now; none without a layout."""
        return []

    def why_none(self) -> str:
        """Say why nothing at all can be given, empty if something can or may soon be."""
        return ""

    def missing(self) -> Mapping[str, str]:
        """Say which slots a layout's instances lack that are not there, and why; else none."""
        return {}

    def note_unmade(self, slot: str, why: str, now: float) -> None:
        """Note that an instance of a layout could not be made."""

    def note_stuck(self, slot: str, why: str, now: float) -> bool:
        """Note that an instance could not be removed; tell whether that is news."""
        before = self.stuck.get(slot)
        self.stuck[slot] = later(before, why, now)
        return before is None

    def note_failed(self, lease: Lease, why: str) -> None:
        """Note that a lease's share could not be made."""
        self.failed[lease.share.id] = Failure(why, lease.since)

    def settle(self) -> None:
        """Forget what failed for leases that have ended; note who has what, for when they end."""
        leases = self.state.leases
        self.left |= self.held & self.present.keys()
        self.failed = {
            share: failure
            for share, failure in self.failed.items()
            if share in leases and leases[share].since == failure.since
        }

    def in_the_way(self, wanted: str) -> dict[str, MigInstance]:
        """Find the instances that take what another one, or the same, would."""
        footprint = self.footprint(wanted)
        return {
            slot: instance
            for slot, instance in self.present.items()
            if not self.footprint(slot).isdisjoint(footprint)
        }

    def _removal(self, slot: str) -> float:
        """Say when an idle instance is to be removed."""
        if slot in self.stuck:
            return self.stuck[slot].again
        useful = self.present[slot].computes and not self.is_broken(slot)
        return self.idle[slot] + (self.terms.keep_warm if useful else 0.0)

    def _could_be_ours(self, slot: str, instance: MigInstance) -> bool:
        """Tell whether this may be what an earlier daemon made, which the first look shows.

        That has a profile that is allowed, in one piece or unfinished. What another plugin's pod
        holds is not.
        """
        allowed = slot.rpartition("@")[0] in self.terms.allowed
        return not self.looked and allowed and len(instance.computes) <= 1

    def taken(self, slot: str) -> frozenset[str]:
        """Give the slots that shares have which an instance is in the way of."""
        return self.footprint(slot)

    def footprint(self, slot: str) -> frozenset[str]:
        """Give the slots of an instance that is there, or that there could be."""
        for spot in board_of(self.state.gpu.mig_profiles).spots:
            if str(spot) == slot:
                return spot.footprint
        place = self.present[slot].placement
        return Spot(Profile(slot, 0, (place,), 2), place).footprint


def later(before: Stuck | None, why: str, now: float) -> Stuck:
    """Say when to try again what went wrong, once more or for the first time."""
    pause = min(2 * before.pause, LOOK) if before else POLL
    return Stuck(why, now + pause, pause)


def identity(instance: MigInstance) -> str:
    """Tell an instance from all others, also from those that were at its place before."""
    uuids = [compute.uuid for compute in instance.computes if compute.uuid]
    return uuids[0] if uuids else f"GPU instance {instance.number}"

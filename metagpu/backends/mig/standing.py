"""One GPU's instances beside a fixed layout: what is missing, what goes, what is in the way. Pure.

A layout is not begun while something holds a place that it needs: then nothing is made or removed,
and what there is of it goes on being given.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from metagpu.backends.mig.division import with_ending
from metagpu.backends.mig.ledger import Ledger, Stuck, identity, later
from metagpu.backends.mig.telling import why_blocked
from metagpu.core.mig import MigInstance, slot_of


@dataclass
class Standing(Ledger):
    """A ledger of a GPU that shall have certain instances (`Terms.fixed`).

    Attributes:
        unmade: what could not be made.
    """

    unmade: dict[str, Stuck] = field(default_factory=dict)

    @property
    def fixed(self) -> list[str]:
        """The instances of the layout."""
        return sorted(self.terms.fixed or ())

    def take_in(self, listed: Sequence[MigInstance], now: float) -> None:
        """Take in what NVML lists, as on any GPU."""
        super().take_in(listed, now)
        self.unmade = {slot: it for slot, it in self.unmade.items() if slot not in self.present}

    def see(self, pids: Mapping[int | None, Sequence[int]], now: float) -> None:
        """Take in who runs where; an instance in its place is ours as soon as it is known idle.

        No pod can have it under another id, and the kubelet gives no id twice.
        """
        elsewhere = self.state.elsewhere
        for slot in self.found.keys() & set(self.fixed):
            instance = self.present[slot]
            held = elsewhere is None or identity(instance) in elsewhere
            if not held and not pids.get(instance.number):
                del self.found[slot]
                self.ours.add(identity(instance))
        super().see(pids, now)

    def absent(self, now: float) -> list[str]:
        """Find what is to be made now: its place is free, and it did not fail a moment ago."""
        if self.hindrances():
            return []
        return [
            slot
            for slot in self._gaps()
            if not self.in_the_way(slot) and (slot not in self.unmade or now >= self._again(slot))
        ]

    def pause(self, now: float) -> float:
        """Say after how many seconds there may be something to do, if nothing happens."""
        failed = [] if self.hindrances() else self.unmade.keys() & set(self._gaps())
        times = [self._again(it) - now for it in failed if not self.in_the_way(it)]
        return max(0.0, min([super().pause(now), *times]))

    def note_unmade(self, slot: str, why: str, now: float) -> None:
        """Note that an instance could not be made."""
        self.unmade[slot] = later(self.unmade.get(slot), why, now)

    def hindrances(self) -> list[str]:
        """Say who or what holds places that missing instances need, and may do so for long."""
        found = [
            why
            for gap in self._gaps()
            for slot in self.in_the_way(gap)
            if (why := self._kept(slot))
        ]
        return list(dict.fromkeys(found))

    def why_none(self) -> str:
        """Say why there is no instance of the layout, empty if there is one or will soon be."""
        if any(self.is_ours(slot) or slot in self.busy for slot in self.fixed):
            return ""
        reasons = dict.fromkeys(filter(None, map(self._why_absent, self._gaps())))
        return f"the layout waits: {'; '.join(reasons)}" if reasons else ""

    def missing(self) -> Mapping[str, str]:
        """Say which slots instances of the layout lack that are not there, and why."""
        found: dict[str, str] = {}
        for slot in self.fixed:
            if slot in self.busy:
                found |= dict.fromkeys(self.taken(slot), f"instance {slot} is being made")
        for slot in self._gaps():
            why = self._why_absent(slot) or "it is about to be made"
            text = f"instance {slot} of the layout is not there: {why}"
            found |= dict.fromkeys(self.taken(slot), text)
        return found

    def taken(self, slot: str) -> frozenset[str]:
        """Give the slots, of whatever ending, that an instance is in the way of."""
        footprint = self.footprint(slot)
        endings = {ending for its in self.terms.endings.values() for ending in its}
        return footprint.union(*(with_ending(footprint, ending) for ending in endings))

    def _gaps(self) -> Iterator[str]:
        """Find what is missing. What a pod held and lost is not: it could not use another one."""
        lost = set(map(slot_of, self.lost))
        for slot in self.fixed:
            if slot not in self.present and slot not in self.busy and slot not in lost:
                yield slot

    def _kept(self, slot: str) -> str:
        """Say why an instance stays where it is, empty if it can go."""
        for share, lease in self.state.leases.items():
            if slot_of(share) == slot:
                return f"{lease.holder or 'a pod that is being admitted'} holds instance {slot}"
        return "" if slot in self.stuck or slot in self.busy else why_blocked(self, slot)

    def _why_absent(self, gap: str) -> str:
        there = self.in_the_way(gap)
        reasons = [why for slot in there if (why := self._kept(slot) or why_blocked(self, slot))]
        if not reasons and gap in self.unmade:
            return self.unmade[gap].why
        return ", ".join(reasons)

    def _again(self, slot: str) -> float:
        return self.unmade[slot].again

    def _removal(self, slot: str) -> float:
        """Say when an idle instance is to be removed: at once, if the layout can then be had."""
        wanted = slot in self.fixed and self.present[slot].computes and not self.is_broken(slot)
        if wanted or self.hindrances():
            return inf
        return self.stuck[slot].again if slot in self.stuck else self.idle[slot]

    def _could_be_ours(self, slot: str, instance: MigInstance) -> bool:
        """Tell whether it may be: the layout is all that shall be there, whoever made the rest.

        What appears later is only if it is of the layout, in its place.
        """
        new = slot in self.fixed and not self.is_ours(slot) and slot not in self.found
        return (new if self.looked else True) and len(instance.computes) <= 1

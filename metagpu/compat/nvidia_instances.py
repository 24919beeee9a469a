"""MIG instances of a layout by the names of NVIDIA's device plugin, and which are shared."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from metagpu.compat import cuts
from metagpu.compat.contract import Data, Draft, Origin
from metagpu.compat.mig_parted import Wanted
from metagpu.compat.nvidia_file import Replicated


@dataclass
class Entry:
    """One resource that is shared: its full name, and the one under which it is then offered."""

    replicated: Replicated
    name: str
    resource: str
    origin: Origin


@dataclass
class Instances:
    """The instances of the chosen layout.

    Attributes:
        one_name: the name of all of them, `None` where each profile has its own.
        shared: of names that are shared, under which name and how many times over.
        refuse_several: whether a container may have but one of what is shared.
        by_mps: whether containers share through MPS, and do not take turns.
        policy: NVIDIA's word for where they go.
    """

    wanted: Sequence[Wanted]
    one_name: str | None
    shared: dict[str, tuple[str, int]] = field(default_factory=dict)
    refuse_several: bool = False
    by_mps: bool = False
    policy: str | None = None

    @property
    def names(self) -> set[str]:
        """The names they go by where they are not shared."""
        return {self._name(profile) for each in self.wanted for profile in each.instances}

    def share(self, entries: Sequence[Entry], draft: Draft, *, refuse_several: bool) -> None:
        """Find which are shared, by the first entry of a name."""
        self.refuse_several = refuse_several
        names = self.names

        for entry in (each for each in entries if each.name in names):
            if entry.name in self.shared:
                draft.note(entry.origin, "has no effect: the entry before it takes all of them")
                continue
            self.shared[entry.name] = entry.resource, entry.replicated.replicas
            if entry.replicated.devices != "all":
                origin = Origin(entry.origin.document, f"{entry.origin.path}.devices")
                draft.note(origin, "has no effect on MIG instances: all of them are shared")

    def cut(self, layout: dict[str, int]) -> Data:
        """Offer those of some GPUs, so many of each profile."""
        names = {profile: self._name(profile) for profile in layout}
        shared = {
            profile: self.shared[name] for profile, name in names.items() if name in self.shared
        }
        if shared and self.by_mps:
            return cuts.mig_mps(layout, self.one_name, shared, policy=self.policy)
        return cuts.mig_layout(
            layout, self.one_name, shared=shared, refuse_several=self.refuse_several
        )

    def _name(self, profile: str) -> str:
        return cuts.mig_resource(profile) if self.one_name is None else self.one_name

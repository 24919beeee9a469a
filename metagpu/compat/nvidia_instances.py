"""MIG instances of a layout by the names of NVIDIA's device plugin, and which are shared."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from metagpu.compat import cuts, selection
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
        renames: patterns of profiles and the names that they have then; the first that matches.
        shared: of names that are shared, under which name and how many times over.
        refuse_several: whether a container may have but one of what is shared.
        by_mps: whether containers share through MPS, and do not take turns.
        policy: NVIDIA's word for where they go.
    """

    wanted: Sequence[Wanted]
    one_name: str | None
    renames: Sequence[tuple[str, str]] = ()
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

    def check_renames(self, at: Origin, draft: Draft) -> None:
        """Tell of names that no profile of the layout has.

        Raises:
            ConfigError: if profiles of different sizes would have one name.
        """
        profiles = self._profiles
        for number, (_, name) in enumerate(self.renames):
            origin = Origin(at.document, f"{at.path}[{number}]")
            alike = [it for it in profiles if self._rename(it) == number]
            if len(alike) > 1:
                problem = (
                    f"{name} would be instances of several sizes: {', '.join(alike)}; give each "
                    "profile a name of its own"
                )
                raise origin.document.error(origin.path, problem)
            if not alike:
                text = (
                    "has no effect: no instance of this layout is of such a profile, or an entry "
                    f"before it names it; there are: {', '.join(profiles)}"
                )
                draft.note(origin, text)

    def cut(self, layout: dict[str, int]) -> Data:
        """Offer those of some GPUs, so many of each profile."""
        own = {profile: self._name(profile) for profile in layout}
        shared = {it: self.shared[name] for it, name in own.items() if name in self.shared}
        names = {it: shared[it][0] if it in shared else name for it, name in own.items()}
        replicas = {profile: count for profile, (_, count) in shared.items()}
        resource = (
            names[next(iter(layout))]
            if self.one_name is not None
            else {it: n for it, n in names.items() if it in shared or n != cuts.mig_resource(it)}
        )
        if replicas and self.by_mps:
            return cuts.mig_mps(layout, resource, replicas, policy=self.policy)
        return cuts.mig_layout(
            layout, resource, replicas=replicas, refuse_several=self.refuse_several
        )

    @property
    def _profiles(self) -> list[str]:
        return list(dict.fromkeys(profile for it in self.wanted for profile in it.instances))

    def _name(self, profile: str) -> str:
        if self.one_name is not None:
            return self.one_name
        number = self._rename(profile)
        return cuts.mig_resource(profile) if number is None else self.renames[number][1]

    def _rename(self, profile: str) -> int | None:
        """Find the first entry whose pattern a profile matches."""
        for number, (pattern, _) in enumerate(self.renames):
            if selection.matches(pattern, profile):
                return number
        return None


def pool_name(layout: dict[str, int]) -> str:
    """Name a pool as mig-parted's layouts are named: 2x2g.10gb-3x1g.5gb."""
    return "-".join(f"{count}x{profile}" for profile, count in sorted(layout.items())[::-1])

"""MIG instances of a layout, named by the MIG strategies of NVIDIA's plugin."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from metagpu.compat import backend_options
from metagpu.compat.contract import ConfigDraft, Data, Origin
from metagpu.compat.mig_parted import LayoutEntry
from metagpu.compat.nvidia_file import ReplicatedResource


@dataclass
class SharedEntry:
    """One shared resource: its full name, and the `resource` name that is offered."""

    replicated: ReplicatedResource
    name: str
    resource: str
    origin: Origin


@dataclass
class LayoutInstances:
    """The instances of the chosen layout.

    Attributes:
        one_name: the resource name of all instances, `None` where each profile has its own.
        shared: resource and number of replicas of the shared instances, by unshared name.
        refuse_several: whether a container may hold one replica at most.
        by_mps: whether containers share through MPS, not by time slices.
        allocation_policy: NVIDIA's policy for the placement of replicas.
    """

    layout: Sequence[LayoutEntry]
    one_name: str | None
    shared: dict[str, tuple[str, int]] = field(default_factory=dict)
    refuse_several: bool = False
    by_mps: bool = False
    allocation_policy: str | None = None

    @property
    def names(self) -> set[str]:
        """The resource names of the instances, as far as they are not shared."""
        return {self._name(profile) for each in self.layout for profile in each.instances}

    def share(
        self, entries: Sequence[SharedEntry], draft: ConfigDraft, *, refuse_several: bool
    ) -> None:
        """Record the shared instances; the first entry of a name wins."""
        self.refuse_several = refuse_several
        names = self.names

        for entry in (each for each in entries if each.name in names):
            if entry.name in self.shared:
                draft.add_note(entry.origin, "has no effect: the entry before it takes all of them")
                continue
            self.shared[entry.name] = entry.resource, entry.replicated.replicas

    def backend_for(self, layout: dict[str, int]) -> Data:
        """Offer the instances of some GPUs: a number of each profile."""
        own = {profile: self._name(profile) for profile in layout}
        shared = {it: self.shared[name] for it, name in own.items() if name in self.shared}
        names = {it: shared[it][0] if it in shared else name for it, name in own.items()}
        replicas = {profile: count for profile, (_, count) in shared.items()}
        resource = (
            names[next(iter(layout))]
            if self.one_name is not None and layout
            else {
                it: n
                for it, n in names.items()
                if it in shared or n != backend_options.mig_resource(it)
            }
        )
        if replicas and self.by_mps:
            return backend_options.mig_mps(
                layout, resource, replicas, policy=self.allocation_policy
            )
        return backend_options.mig_layout(
            layout, resource, replicas=replicas, refuse_several=self.refuse_several
        )

    def _name(self, profile: str) -> str:
        return self.one_name or backend_options.mig_resource(profile)


def pool_name(layout: dict[str, int]) -> str:
    """Return a pool's name in the style of mig-parted's layouts: 2x2g.10gb-3x1g.5gb."""
    return "-".join(f"{count}x{profile}" for profile, count in sorted(layout.items())[::-1])


def offer_single(
    wanted: Sequence[LayoutEntry], instances: LayoutInstances, draft: ConfigDraft
) -> None:
    """Offer all instances of a layout; all GPUs need instances of the same profile.

    A GPU with another layout is not offered, and its pool has the reason. NVIDIA's plugin would not
    start at all, and no GPU of the node would be offered.
    """
    for entry in wanted:
        if wrong := _mismatch(entry, wanted):
            reason = (
                "the strategy single wants instances of one profile on all GPUs, and "
                f"{wrong}; choose mixed, or another layout"
            )
            off = [] if entry.mig_enabled else [backend_options.mig_off()]
            rules = {"reason": reason}
            draft.add_pool("not-single", entry.gpus, off, entry.origin, rules=rules)
            draft.add_note(entry.origin, f"its GPUs are not offered: {reason}")
            continue
        backend = instances.backend_for(entry.instances)
        draft.add_pool(pool_name(entry.instances), entry.mig_gpus, [backend], entry.origin)

    if not any(entry.gpus is None for entry in wanted):
        text = "GPUs that this layout does not name are not offered under single"
        draft.add_note(wanted[-1].origin, text)


def _mismatch(entry: LayoutEntry, wanted: Sequence[LayoutEntry]) -> str:
    """Return why an entry's GPUs do not fit the strategy, empty where they fit."""
    alone = {tuple(each.instances) for each in wanted if len(each.instances) == 1}
    if not entry.instances:
        return "these have no MIG instances"
    if len(entry.instances) > 1:
        return f"these have {', '.join(sorted(entry.instances))}"
    if len(alone) > 1:  # no profile is more right than another
        profiles = sorted(profile for (profile,) in alone)
        return f"the GPUs of this layout have {', '.join(profiles)}"
    return ""

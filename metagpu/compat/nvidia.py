"""Conversion of NVIDIA's device plugin's file, and of mig-parted's file beside it.

What the plugin reads and then drops has no effect here either: `resources`, `rename`, `devices`
(docs/decisions/0021).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from metagpu.compat import backend_options, mig_parted, nvidia_file, variables
from metagpu.compat.contract import (
    ConfigDraft,
    ConversionContext,
    ConvertedConfig,
    Data,
    Origin,
)
from metagpu.compat.keys import fold_case, ignored_keys
from metagpu.compat.mig_parted import LayoutEntry
from metagpu.compat.nvidia_file import NvidiaReplication, ReplicatedResource
from metagpu.compat.variables import NvidiaSettings, variable_origin
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigReason


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


_PREFIX: Final = "nvidia.com/"
_GPU: Final = "nvidia.com/gpu"
_MIG: Final = "nvidia.com/mig-"
_DROPPED: Final = "has no effect, as in NVIDIA's plugin, which drops it"


def convert(documents: Sequence[Document], context: ConversionContext) -> ConvertedConfig:
    """Offer what NVIDIA's device plugin would, on GPUs with mig-parted's layout.

    Raises:
        ConfigError: a file is wrong, or the MIG strategy and the layout contradict each other.
    """
    layouts = [each for each in documents if mig_parted.is_mig_parted(each.data)]
    plugins = [each for each in documents if each not in layouts]
    for several in (layouts, plugins):
        if len(several) > 1:
            problem = f"{several[0].file} is of the same format; give one of them"
            raise several[1].error("", problem, ConfigReason.GIVEN_TWICE)

    draft = ConfigDraft()
    for document in plugins:
        fold_case(document, nvidia_file.NvidiaFile, nvidia_file.IGNORED_KEYS)
    for document in layouts:
        draft.notes += ignored_keys(document, mig_parted.MigPartedFile, {})
    environment = context.environment
    for document in plugins:
        draft.notes += ignored_keys(document, nvidia_file.NvidiaFile, nvidia_file.IGNORED_KEYS)
    draft.notes += variables.nvidia_variable_notes(environment)

    wanted = [entry for each in layouts for entry in mig_parted.chosen_layout(each, context)]
    _NvidiaConversion(draft, wanted, *_read(plugins, layouts, context)).run()
    return draft.finish()


def _read(
    plugins: list[Document], layouts: list[Document], context: ConversionContext
) -> tuple[Origin, nvidia_file.NvidiaFile, NvidiaSettings, Mapping[str, str]]:
    file = nvidia_file.read(plugins[0]) if plugins else nvidia_file.NvidiaFile()
    settings = variables.merge_settings(file.flags, context.environment)
    return Origin([*plugins, *layouts][0], ""), file, settings, context.environment


@dataclass
class _NvidiaConversion:
    """One conversion: the files as read, and the draft of the result."""

    draft: ConfigDraft
    layout: list[LayoutEntry]
    root: Origin
    file: nvidia_file.NvidiaFile
    settings: NvidiaSettings
    environment: Mapping[str, str]
    entries: list[SharedEntry] = field(default_factory=list)
    by_mps: bool = False
    instances: LayoutInstances = field(init=False)

    def __post_init__(self) -> None:
        single = self.settings.mig_strategy == "single"
        has_instances = any(each.instances for each in self.layout)
        self.instances = LayoutInstances(self.layout, _GPU if single and has_instances else None)

    def run(self) -> None:
        """Fill the draft."""
        variables.set_flags(self.draft, self.settings, self._flag)
        self._set_sharing()
        self._note_dropped()
        if self.instances.one_name is not None:
            offer_single(self.layout, self.instances, self.draft)
            return

        self._note_strategy()
        for entry in self.layout:
            if entry.mig_enabled:
                backend = self.instances.backend_for(entry.instances)
                name = pool_name(entry.instances) or "no-instances"
                self.draft.add_pool(name, entry.mig_gpus, [backend], entry.origin)
            else:
                self._add_gpus(entry.gpus, [backend_options.mig_off()])
        if not any(entry.gpus is None and not entry.mig_enabled for entry in self.layout):
            # GPUs that the layout does not name, or that do not support MIG.
            rest = "not-in-layout" if self.layout else None
            self._add_gpus(None, self._existing_instances(), rest)

    def _existing_instances(self) -> list[Data]:
        """Return the backend of existing instances, where no layout is given."""
        strategy = self.settings.mig_strategy
        if self.layout or strategy not in ("mixed", "single"):
            return []
        return [backend_options.mig_existing(_GPU if strategy == "single" else None)]

    # --- the file as a whole ----------------------------------------------------------------------

    def _note_strategy(self) -> None:
        """Add notes where MIG's strategy has no effect in metagpu."""
        strategy = self.settings.mig_strategy or ("mixed" if self.layout else "none")
        origin = self._flag("flags.migStrategy", "MIG_STRATEGY")

        if strategy == "none" and any(entry.instances for entry in self.layout):
            self.draft.add_note(
                origin,
                "has no effect here; it would have offered a GPU in MIG mode as a whole GPU, which "
                "CUDA cannot use. Instances are offered by profile, as with mixed",
            )

    def _note_dropped(self) -> None:
        """Add notes about names and devices that NVIDIA's plugin drops."""
        if self.file.resources is not None and self.file.resources.is_given:
            text = f"{_DROPPED}; in metagpu's own format, each pool has names of its own: resource"
            self.draft.add_note(self._at("resources"), text)
        for entry in self.entries:
            given = entry.replicated
            if given.rename and _full(given.rename) != entry.resource:
                at = Origin(entry.origin.document, f"{entry.origin.path}.rename")
                text = f"{_DROPPED}; in metagpu's own format it is resource: {_full(given.rename)}"
                self.draft.add_note(at, text)
            devices = Origin(entry.origin.document, f"{entry.origin.path}.devices")
            backend_options.check_devices(given.devices, devices)
            if given.devices != "all":
                text = (
                    f"{_DROPPED}; in metagpu's own format, the GPUs of a pool are chosen by gpus, "
                    "such as {index: 0-1}"
                )
                self.draft.add_note(devices, text)

    def _set_sharing(self) -> None:
        """Read the shared resources; MPS wins over time slicing, as in NVIDIA's plugin."""
        sharing = self.file.sharing or nvidia_file.NvidiaSharing()
        ways = [("mps", sharing.mps), ("timeSlicing", sharing.time_slicing)]
        given = [(self._at(f"sharing.{name}"), it) for name, it in ways if it is not None]

        for origin, _ in given[1:]:
            self.draft.add_note(origin, "has no effect: where sharing.mps is given, that wins")
        for origin, replication in given[:1]:
            self.by_mps = replication is sharing.mps
            self.entries = list(self._entries(origin, replication))
            if self.by_mps and replication.fail_requests_greater_than_one:
                self.draft.add_note(
                    self._at(f"{origin.path}.failRequestsGreaterThanOne"),
                    "has no effect here; under MPS a container may hold several parts of one GPU",
                )

        self.instances.by_mps, self.instances.allocation_policy = (
            self.by_mps,
            self.settings.allocation_policy,
        )
        self.instances.share(self.entries, self.draft, refuse_several=self._refuses_several())
        for entry in self.entries:
            if entry.name == _GPU or entry.name in self.instances.names:
                continue
            if entry.name.startswith(_MIG):
                text = "has no effect here; it would have shared MIG instances"
            else:
                text = f"has no effect: no GPU has this name; there are: {_GPU}"
            self.draft.add_note(entry.origin, text)

    def _entries(self, origin: Origin, replication: NvidiaReplication) -> Iterator[SharedEntry]:
        if not replication.resources:
            path = f"{origin.path}.resources"
            problem = "there is no resource; give at least one"
            raise origin.document.error(path, problem, ConfigReason.MISSING)

        for number, each in enumerate(replication.resources):
            here = Origin(origin.document, f"{origin.path}.resources[{number}]")
            name = _full(each.name)
            resource = f"{name}.shared" if replication.rename_by_default else name
            yield SharedEntry(each, name, resource, here)

    # --- GPUs -------------------------------------------------------------------------------------

    def _add_gpus(
        self, within: Data | None, first: Sequence[Data] = (), pool: str | None = None
    ) -> None:
        """Offer GPUs without MIG instances, shared or whole; `first` are other backends."""
        shared = [entry for entry in self.entries if entry.name == _GPU]
        for entry in shared[1:]:
            self.draft.add_note(entry.origin, "has no effect: the entry before it takes all GPUs")
        for entry in shared[:1]:
            backend = self._shared_backend(entry.resource, entry.replicated.replicas)
            name = pool or entry.resource.rpartition("/")[2]
            count = Origin(entry.origin.document, f"{entry.origin.path}.replicas")
            parts = {f"backends[{len(first)}].replicas": count}
            self.draft.add_pool(name, within, [*first, backend], entry.origin, parts=parts)
        if not shared:
            backend = backend_options.whole(_GPU)
            self.draft.add_pool(pool or "gpu", within, [*first, backend], self.root)

    def _shared_backend(self, resource: str, replicas: int) -> Data:
        if self.by_mps:
            return backend_options.mps(resource, replicas, policy=self.settings.allocation_policy)
        return backend_options.timeslice(
            resource,
            replicas,
            refuse_several=self._refuses_several(),
            policy=self.settings.allocation_policy,
        )

    def _refuses_several(self) -> bool:
        """Return whether a container may hold one replica at most; never under MPS."""
        if self.by_mps:
            return False
        slicing = self.file.sharing and self.file.sharing.time_slicing
        return bool(slicing and slicing.fail_requests_greater_than_one)

    def _at(self, path: str) -> Origin:
        return Origin(self.root.document, path)

    def _flag(self, path: str, variable: str) -> Origin:
        """Return the origin of a flag: its variable, which wins, else its key in the file."""
        if self.environment.get(variable):
            return variable_origin(variable)
        return self._at(path)


def _full(name: str) -> str:
    return name if "/" in name else f"{_PREFIX}{name}"

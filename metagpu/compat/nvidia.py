"""Conversion of NVIDIA's device plugin's file, and of mig-parted's file beside it.

What the plugin reads and then drops has no effect here either: `resources`, `rename`, `devices`
(docs/decisions/0021).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec.structs import astuple

from metagpu.compat import backend_options, mig_parted, nvidia_file, variables
from metagpu.compat.backend_options import Strategy
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


class SharedEntry(msgspec.Struct, frozen=True):
    """One shared resource: its full name, and the `resource` name that is offered."""

    replicated: ReplicatedResource
    name: str
    resource: str
    origin: Origin


def pool_name(layout: dict[str, int]) -> str:
    """Return a pool's name in the style of mig-parted's layouts: 2x2g.10gb-3x1g.5gb."""
    return "-".join(f"{count}x{profile}" for profile, count in sorted(layout.items())[::-1])


def _refuse(entry: LayoutEntry, draft: ConfigDraft) -> None:
    """Keep the GPUs of an entry that is not taken off offer, with the reason."""
    draft.add_pool("not-taken", entry.mig_gpus, [], entry.origin, rules={"reason": entry.refusal})
    draft.add_note(entry.origin, f"its GPUs are not offered: {entry.refusal}")


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
        exact = (nvidia_file.NvidiaReplication, nvidia_file.PatternName)
        fold_case(document, nvidia_file.NvidiaFile, nvidia_file.IGNORED_KEYS, exact)
    for document in layouts:
        draft.notes += ignored_keys(document, mig_parted.MigPartedFile, {})
    environment = context.environment
    for document in plugins:
        draft.notes += ignored_keys(document, nvidia_file.NvidiaFile, nvidia_file.IGNORED_KEYS)
    draft.notes += variables.nvidia_variable_notes(environment)

    wanted = [entry for each in layouts for entry in mig_parted.chosen_layout(each, context)]
    conversion = _NvidiaConversion(draft, wanted, *_read(plugins, layouts, context))
    conversion.has_layouts = bool(layouts)
    if not plugins and layouts[0].file == mig_parted.MADE:
        conversion.rest = variables.default_pool(draft, environment)
    elif not plugins and context.mig_config is None:
        names = ", ".join(mig_parted.layout_names(layouts[0]))
        text = (
            "no layout is chosen, and the GPUs stay as they are; --mig-config, or the label "
            f"nvidia.com/mig.config, chooses one of {names}"
        )
        draft.add_note(Origin(layouts[0], "mig-configs"), text)
    conversion.run()
    return draft.finish()


def _read(
    plugins: list[Document], layouts: list[Document], context: ConversionContext
) -> tuple[Origin, nvidia_file.NvidiaFile, NvidiaSettings, Mapping[str, str]]:
    file = nvidia_file.read(plugins[0]) if plugins else nvidia_file.NvidiaFile()
    settings = variables.merge_settings(file.flags, context.environment)
    return Origin([*plugins, *layouts][0], ""), file, settings, context.environment


@dataclass
class _NvidiaConversion:
    """One conversion: the files as read, and the draft of the result.

    Attributes:
        has_layouts: whether there are layouts, be one chosen or not.
        rest: how GPUs without instances are offered, where no file of the plugin says so.
    """

    draft: ConfigDraft
    layout: list[LayoutEntry]
    root: Origin
    file: nvidia_file.NvidiaFile
    settings: NvidiaSettings
    environment: Mapping[str, str]
    has_layouts: bool = False
    rest: variables.DefaultPool | None = None
    entries: dict[str, SharedEntry] = field(default_factory=dict)
    sharing: backend_options.Sharing = field(default_factory=backend_options.Sharing)

    @property
    def strategy(self) -> Strategy:
        """The strategy for the names of MIG instances."""
        return self.settings.mig_strategy or ("mixed" if self.has_layouts else "none")

    @property
    def has_instances(self) -> bool:
        """True if the layout has instances."""
        return any(entry.instances for entry in self.layout)

    @property
    def _offers_existing(self) -> bool:
        """True if instances may be offered that no layout names."""
        all_named = any(entry.gpus is None for entry in self.layout)
        return not all_named and (self.has_layouts or self.strategy != "none")

    def run(self) -> None:
        """Fill the draft."""
        variables.set_flags(self.draft, self.settings, self._flag)
        self._set_sharing()
        self._note_dropped()
        if self.strategy == "single" and self.has_instances:
            self._offer_single()
            return

        self._note_strategy()
        for entry in self.layout:
            if entry.refusal:
                _refuse(entry, self.draft)
            elif entry.mig_enabled:
                backend = self._layout_backend(entry)
                name = pool_name(entry.instances) or "no-instances"
                self.draft.add_pool(name, entry.mig_gpus, [backend], entry.origin)
            else:
                self._add_gpus(entry.gpus, [backend_options.mig_off()])
        if not any(entry.gpus is None and not entry.mig_enabled for entry in self.layout):
            # GPUs that the layout does not name, or that do not support MIG.
            rest = "not-in-layout" if self.layout else None
            self._add_gpus(None, self._existing_instances(), rest)

    def _offer_single(self) -> None:
        """Offer all instances of a layout; all GPUs need instances of the same profile.

        A GPU with another layout is not offered, and its pool has the reason. NVIDIA's plugin would
        not start at all, and no GPU of the node would be offered.
        """
        for entry in self.layout:
            if entry.refusal:
                _refuse(entry, self.draft)
                continue
            if wrong := _mismatch(entry, self.layout):
                reason = (
                    "the strategy single wants instances of one profile on all GPUs, and "
                    f"{wrong}; choose mixed, or another layout"
                )
                off = [] if entry.mig_enabled else [backend_options.mig_off()]
                rules = {"reason": reason}
                self.draft.add_pool("not-single", entry.gpus, off, entry.origin, rules=rules)
                self.draft.add_note(entry.origin, f"its GPUs are not offered: {reason}")
                continue
            name, backend = pool_name(entry.instances), self._layout_backend(entry)
            self.draft.add_pool(name, entry.mig_gpus, [backend], entry.origin)

        if not any(entry.gpus is None for entry in self.layout):
            text = "GPUs that this layout does not name are not offered under single"
            self.draft.add_note(self.layout[-1].origin, text)

    def _layout_backend(self, entry: LayoutEntry) -> Data:
        return self._instances(backend_options.mig_layout(entry.instances), entry.instances)

    def _existing_instances(self) -> list[Data]:
        """Return the backend of the instances on GPUs that no layout names."""
        if not self._offers_existing:
            return []
        named = filter(None, map(backend_options.mig_profile, self.entries))
        return [self._instances(backend_options.mig_existing(), named)]

    def _instances(self, source: Data, profiles: Iterable[str]) -> Data:
        """Offer instances by the strategy's names, shared where an entry says so."""
        if self.strategy == "single":
            name, count = _GPU, 1
            if (entry := self.entries.get(_GPU)) is not None:
                name, count = entry.resource, entry.replicated.replicas
            return self.sharing.instances(source, name, count)
        shared = {
            profile: entry
            for profile in profiles
            if (entry := self.entries.get(backend_options.mig_resource(profile))) is not None
        }
        names = {profile: entry.resource for profile, entry in shared.items()}
        counts = {profile: entry.replicated.replicas for profile, entry in shared.items()}
        return self.sharing.instances(source, names, counts)

    # --- the file as a whole ----------------------------------------------------------------------

    def _note_strategy(self) -> None:
        """Add notes where MIG's strategy has no effect in metagpu."""
        origin = self._flag("flags.migStrategy", "MIG_STRATEGY")

        if self.strategy == "none" and self.has_instances:
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
        for entry in self.entries.values():
            given = entry.replicated
            if given.rename and _full(given.rename) != entry.resource:
                at = Origin(entry.origin.document, f"{entry.origin.path}.rename")
                text = f"{_DROPPED}; in metagpu's own format it is resource: {_full(given.rename)}"
                self.draft.add_note(at, text)
            devices = Origin(entry.origin.document, f"{entry.origin.path}.devices")
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
        given = [
            (self._at(f"sharing.{name}"), nvidia_replication)
            for name, nvidia_replication in ways
            if nvidia_replication is not None
        ]

        for origin, _ in given[1:]:
            self.draft.add_note(origin, "has no effect: where sharing.mps is given, that wins")
        for origin, replication in given[:1]:
            by_mps, refuse = replication is sharing.mps, replication.fail_requests_greater_than_one
            self.sharing = backend_options.Sharing(
                by_mps, bool(refuse) and not by_mps, self.settings.allocation_policy
            )
            self._set_entries(list(self._entries(origin, replication)))
            if by_mps and refuse:
                self.draft.add_note(
                    self._at(f"{origin.path}.failRequestsGreaterThanOne"),
                    "has no effect here; under MPS a container may hold several parts of one GPU",
                )

    def _set_entries(self, entries: Sequence[SharedEntry]) -> None:
        """Record the shared resources: of two entries, the larger number counts."""
        for entry in sorted(entries, key=lambda each: -each.replicated.replicas):
            if self.entries.setdefault(entry.name, entry) is not entry:
                most = self.entries[entry.name].replicated.replicas
                text = f"has no effect: another entry of this name has {most} replicas"
                self.draft.add_note(entry.origin, text)
            elif not self._is_offered(entry.name):
                text = f"has no effect: no GPU has this name; there are: {_GPU}"
                if entry.name.startswith(backend_options.MIG_PREFIX):
                    text = f"has no effect: no instance has this name (migStrategy {self.strategy})"
                self.draft.add_note(entry.origin, text)

    def _is_offered(self, name: str) -> bool:
        """Return whether GPUs or instances may have a name while they are not shared."""
        if name == _GPU or self.strategy == "single":
            return name == _GPU
        profiles = {profile for entry in self.layout for profile in entry.instances}
        if name in map(backend_options.mig_resource, profiles):
            return True
        return self._offers_existing and backend_options.mig_profile(name) is not None

    def _entries(self, origin: Origin, replication: NvidiaReplication) -> Iterator[SharedEntry]:
        if not replication.resources:
            path = f"{origin.path}.resources"
            problem = "there is no resource; give at least one"
            raise origin.document.error(path, problem, ConfigReason.MISSING)

        for number, each in enumerate(replication.resources):
            here = Origin(origin.document, f"{origin.path}.resources[{number}]")
            backend_options.check_devices(
                each.devices, Origin(origin.document, f"{here.path}.devices")
            )
            name = _full(each.name)
            resource = f"{name}.shared" if replication.rename_by_default else name
            yield SharedEntry(each, name, resource, here)

    # --- GPUs -------------------------------------------------------------------------------------

    def _add_gpus(
        self, within: Data | None, first: Sequence[Data] = (), pool: str | None = None
    ) -> None:
        """Offer GPUs without MIG instances, shared or whole; `first` are other backends."""
        if (entry := self.entries.get(_GPU)) is not None:
            backend = self.sharing.gpus(entry.resource, entry.replicated.replicas)
            name = pool or entry.resource.rpartition("/")[2]
            count = Origin(entry.origin.document, f"{entry.origin.path}.replicas")
            parts = {f"backends[{place}].replicas": count for place in range(len(first) + 1)}
            self.draft.add_pool(name, within, [*first, backend], entry.origin, parts=parts)
        else:
            name, backends, rules, origin = "gpu", [backend_options.whole(_GPU)], {}, self.root
            if self.rest is not None:
                name, backends, rules, origin = astuple(self.rest)
            self.draft.add_pool(pool or name, within, [*first, *backends], origin, rules=rules)

    def _at(self, path: str) -> Origin:
        return Origin(self.root.document, path)

    def _flag(self, path: str, variable: str) -> Origin:
        """Return the origin of a flag: its variable, which wins, else its key in the file."""
        if self.environment.get(variable):
            return variable_origin(variable)
        return self._at(path)


def _full(name: str) -> str:
    return name if "/" in name else f"{_PREFIX}{name}"

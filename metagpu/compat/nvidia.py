"""NVIDIA's device plugin's configuration, and with it the layout that mig-parted's file names.

What the plugin parses and then strips works here: `resources`, `rename`, `devices`, and so
different replicas for different GPUs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from metagpu.compat import cuts, mig_parted, nvidia_file, nvidia_single, selection
from metagpu.compat.contract import Circumstances, Converted, Data, Draft, Origin
from metagpu.compat.keys import noted
from metagpu.compat.mig_parted import Wanted
from metagpu.compat.nvidia_file import Named, Replication, Settings
from metagpu.compat.nvidia_instances import Entry, Instances, pool_name
from metagpu.core.document import Document

_PREFIX: Final = "nvidia.com/"
_GPU: Final = "nvidia.com/gpu"
_MIG: Final = "nvidia.com/mig-"


def convert(documents: Sequence[Document], circumstances: Circumstances) -> Converted:
    """Offer what NVIDIA's device plugin would, on GPUs laid out as mig-parted's file says.

    Raises:
        ConfigError: if a file is wrong, or MIG's strategy and layout contradict each other.
    """
    layouts = [each for each in documents if mig_parted.recognises(each.data)]
    plugins = [each for each in documents if each not in layouts]
    for several in (layouts, plugins):
        if len(several) > 1:
            problem = f"{several[0].file} is of the same format; give one of them"
            raise several[1].error("", problem)

    draft = Draft()
    for document in layouts:
        draft.notes += noted(document, mig_parted.File, {})
    environment = circumstances.environment
    draft.notes += nvidia_file.notes(plugins[0] if plugins else None, environment)

    wanted = [entry for each in layouts for entry in mig_parted.wanted(each, circumstances)]
    _Conversion(draft, wanted, *_read(plugins, layouts, circumstances)).run()
    return draft.converted()


def _read(
    plugins: list[Document], layouts: list[Document], circumstances: Circumstances
) -> tuple[Origin, nvidia_file.File, Settings, Mapping[str, str]]:
    file = nvidia_file.read(plugins[0]) if plugins else nvidia_file.File()
    settings = nvidia_file.settings(file.flags, circumstances.environment)
    return Origin([*plugins, *layouts][0], ""), file, settings, circumstances.environment


@dataclass
class _Conversion:
    """One conversion: what was read, and the draft that it becomes."""

    draft: Draft
    wanted: list[Wanted]
    root: Origin
    file: nvidia_file.File
    settings: Settings
    environment: Mapping[str, str]
    entries: list[Entry] = field(default_factory=list)
    by_mps: bool = False
    instances: Instances = field(init=False)

    def __post_init__(self) -> None:
        one_name = self._one_name()
        renames = [(named.pattern, _full(named.name)) for named in self._mig_names()]
        self.instances = Instances(self.wanted, one_name, () if one_name else renames)

    def run(self) -> None:
        """Fill the draft."""
        self._set()
        self._share()
        if self.instances.one_name is not None:
            nvidia_single.offer(self.wanted, self.instances, self.draft)
            return

        self._note_strategy()
        for entry in self.wanted:
            if entry.instances:
                cut = self.instances.cut(entry.instances)
                self.draft.pool(pool_name(entry.instances), entry.gpus, [cut], entry.origin)
            else:
                self._gpus(entry.gpus)
                off = Origin(entry.origin.document, f"{entry.origin.path}.mig-enabled")
                self.draft.note(
                    off,
                    "would have turned MIG mode off; metagpu leaves it on, and such a GPU alone",
                )
        if all(entry.gpus is not None for entry in self.wanted):
            self._gpus(None)

    # --- the file as a whole ----------------------------------------------------------------------

    def _set(self) -> None:
        said = self.settings

        if said.pass_device_specs is not None:
            origin = self._flag("flags.plugin.passDeviceSpecs", "PASS_DEVICE_SPECS")
            self.draft.set("passDeviceSpecs", said.pass_device_specs, origin)
        if said.device_lists:
            origin = self._flag("flags.plugin.deviceListStrategy", "DEVICE_LIST_STRATEGY")
            self.draft.set("deviceListStrategy", list(said.device_lists), origin)
        if said.xids:
            self.draft.set("health", {"xids": dict(said.xids)}, self.root)

    def _note_strategy(self) -> None:
        """Tell where MIG's strategy asks for what is not done here."""
        strategy = self.settings.strategy or ("mixed" if self.wanted else "none")
        origin = self._flag("flags.migStrategy", "MIG_STRATEGY")

        if strategy != "none" and not self.wanted:
            self.draft.note(
                origin,
                "has no effect here; it would have offered the MIG instances that there are. Give "
                "mig-parted's file beside this one, or a pool with backend mig",
            )
        if strategy == "none" and any(entry.instances for entry in self.wanted):
            self.draft.note(
                origin,
                "has no effect here; it would have offered a GPU in MIG mode as a whole one, which "
                "CUDA cannot use. Instances are offered by profile, as with mixed",
            )

    def _share(self) -> None:
        """Find what is shared; with both ways MPS wins, as in NVIDIA's plugin."""
        sharing = self.file.sharing or nvidia_file.Sharing()
        ways = [("mps", sharing.mps), ("timeSlicing", sharing.time_slicing)]
        given = [(self._at(f"sharing.{name}"), way) for name, way in ways if way is not None]

        for origin, _ in given[1:]:
            self.draft.note(origin, "has no effect: where sharing.mps is given, that wins")
        for origin, way in given[:1]:
            self.by_mps = way is sharing.mps
            self.entries = list(self._entries(origin, way))
            if self.by_mps and way.fail_requests_greater_than_one:
                self.draft.note(
                    self._at(f"{origin.path}.failRequestsGreaterThanOne"),
                    "has no effect here; under MPS a container may hold several parts of one GPU",
                )

        self.instances.by_mps, self.instances.policy = self.by_mps, self.settings.policy
        self.instances.share(self.entries, self.draft, refuse_several=self._refuses_several())
        known = {name for _, name, _ in self._classes()}
        cut = self.instances.names
        for entry in self.entries:
            if entry.name in known | cut:
                continue
            mig = {_full(named.name) for named in self._mig_names()} | cut
            if entry.name.startswith(_MIG) or entry.name in mig:
                text = "has no effect here; it would have given each MIG instance to several"
            else:
                text = f"has no effect: no GPU goes by that name; there are: {', '.join(known)}"
            self.draft.note(entry.origin, text)

        self._name_instances()

    def _name_instances(self) -> None:
        """Check the names of instances; under single the first is that of all."""
        cut_up = any(each.instances for each in self.wanted)
        if cut_up and self.instances.one_name is None:
            self.instances.check_renames(self._at("resources.mig"), self.draft)
            return
        for number in range(int(cut_up), len(self._mig_names())):
            origin = self._at(f"resources.mig[{number}]")
            self.draft.note(origin, "has no effect here; it would have renamed MIG instances")

    def _entries(self, origin: Origin, way: Replication) -> Iterator[Entry]:
        if not way.resources:
            path = f"{origin.path}.resources"
            raise origin.document.error(path, "there is no resource; give at least one")

        for number, each in enumerate(way.resources):
            here = Origin(origin.document, f"{origin.path}.resources[{number}]")
            name = _full(each.name)
            resource = f"{name}.shared" if way.rename_by_default else name
            yield Entry(each, name, _full(each.rename) if each.rename else resource, here)

    # --- GPUs -------------------------------------------------------------------------------------

    def _classes(self) -> list[tuple[Data | None, str, Origin]]:
        """Give the names that GPUs go by, the first that matches wins, and which GPUs those are."""
        resources = self.file.resources
        named = resources.gpus if resources and resources.gpus else (Named("*", _GPU),)

        return [
            (
                selection.pattern(each.pattern),
                _full(each.name),
                self._at(f"resources.gpus[{number}]"),
            )
            for number, each in enumerate(named)
        ]

    def _gpus(self, within: Data | None) -> None:
        """Offer GPUs that are not cut into instances: shared ones, and the rest of each name."""
        for gpus, name, origin in self._classes():
            selected = selection.both(within, gpus)
            rest = True
            for entry in (each for each in self.entries if each.name == name):
                rest = self._shared(entry, selected, open_to=rest)
            if rest and selected != {}:
                cut = self._unshared(name)
                self.draft.pool(_last(name), selected, [cut], origin)

    def _shared(self, entry: Entry, within: Data | None, *, open_to: bool) -> bool:
        """Offer what one entry shares; tell whether it leaves GPUs of its name to others."""
        origin = Origin(entry.origin.document, f"{entry.origin.path}.devices")

        if not open_to:
            self.draft.note(entry.origin, "has no effect: the entry before it takes all GPUs")
            return False
        if found := selection.mig_ones(entry.replicated.devices):
            self.draft.note(origin, f"has no effect on MIG devices: {', '.join(found)}")

        cut = self._cut(entry.resource, entry.replicated.replicas)
        left = True
        for gpus in selection.devices(entry.replicated.devices, origin):
            selected = selection.both(within, gpus)
            if selected != {}:
                self.draft.pool(_last(entry.resource), selected, [cut], entry.origin)
            left = left and selected != within
        return left

    def _cut(self, resource: str, replicas: int) -> Data:
        if self.by_mps:
            return cuts.mps(resource, replicas, policy=self.settings.policy)
        return cuts.timeslice(
            resource, replicas, refuse_several=self._refuses_several(), policy=self.settings.policy
        )

    def _refuses_several(self) -> bool:
        """Tell whether a container may have one replica; under MPS it may hold several parts."""
        if self.by_mps:
            return False
        slicing = self.file.sharing and self.file.sharing.time_slicing
        return bool(slicing and slicing.fail_requests_greater_than_one)

    def _unshared(self, name: str) -> Data:
        """Offer GPUs as they are; where sharing has taken the name, as GPUs of one replica."""
        if name in {entry.resource for entry in self.entries}:
            return self._cut(name, 1)
        return cuts.whole(name)

    # --- MIG --------------------------------------------------------------------------------------

    def _one_name(self) -> str | None:
        """Give the name of all instances under the strategy single, if there are any."""
        if self.settings.strategy != "single" or not any(each.instances for each in self.wanted):
            return None
        names = self._mig_names()
        return _full(names[0].name) if names else _GPU

    def _mig_names(self) -> tuple[Named, ...]:
        return self.file.resources.mig if self.file.resources else ()

    def _at(self, path: str) -> Origin:
        return Origin(self.root.document, path)

    def _flag(self, path: str, variable: str) -> Origin:
        """Say where a flag was given: by a variable, which wins, or in the file."""
        if self.environment.get(variable):
            return Origin(Document("", "environment"), variable)
        return self._at(path)


def _full(name: str) -> str:
    return name if "/" in name else f"{_PREFIX}{name}"


def _last(resource: str) -> str:
    return resource.rpartition("/")[2]

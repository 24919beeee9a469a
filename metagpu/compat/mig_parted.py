"""mig-parted's `mig-configs`: named layouts of MIG instances, one for a node.

Keys are those of github.com/NVIDIA/mig-parted 0.15, which NVIDIA's MIG manager reads. Without a
file, the MIG manager makes the layouts from what NVML says of the GPUs; `make_layouts` does so too.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.compat import backend_options
from metagpu.compat.contract import ConversionContext, Data, Origin
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigReason, allowed_values
from metagpu.core.config.paths import key_path
from metagpu.core.model.mig import MigModel, MigProfile

_CONFIGS: Final = "mig-configs"
MADE: Final = "<layouts of these GPUs>"
"""The file's name in messages, where the layouts are made from the GPUs."""
_COMPUTE_INSTANCES: Final = re.compile(r"(\d+)c\.((\d+)g\..+)")
"""The name of compute instances that divide a GPU instance: `1c.2g.10gb`."""


class _MigPartedEntry(msgspec.Struct, rename="kebab"):
    """One entry of a layout in the file: some GPUs and their instances."""

    mig_enabled: bool
    devices: str | tuple[int, ...]
    device_filter: str | int | tuple[str | int, ...] | None = None
    mig_devices: dict[str, int] | None = None


_ENTRY_KEYS: Final = tuple(field.encode_name for field in msgspec.structs.fields(_MigPartedEntry))


class MigPartedFile(msgspec.Struct, rename="kebab"):
    """The honoured keys of the file: all keys."""

    mig_configs: dict[str, list[_MigPartedEntry]]
    version: str = "v1"


class _MigPartedLayouts(msgspec.Struct, rename="kebab"):
    """The file before its layouts are read, each by its own path."""

    mig_configs: dict[str, list[Any]]
    version: str = "v1"


class LayoutEntry(msgspec.Struct, frozen=True):
    """One entry of the chosen layout.

    Attributes:
        gpus: selector of the GPUs, `None` for all.
        mig_enabled: whether MIG mode shall be on.
        instances: number of instances by profile; it may be empty in MIG mode, too.
        origin: the entry's place in the file.
        refusal: why the entry is not taken; empty for one that is.
    """

    gpus: Data | None
    mig_enabled: bool
    instances: dict[str, int]
    origin: Origin
    refusal: str = ""

    @property
    def mig_gpus(self) -> Data:
        """The selector of those GPUs that support MIG; mig-parted skips the others."""
        return {**(self.gpus or {}), "mig": True}


def is_mig_parted(data: dict[Any, Any]) -> bool:
    """Return whether the data is that of a file of mig-parted."""
    return _CONFIGS in data


def layout_names(document: Document) -> list[str]:
    """Return the names of a file's layouts.

    Raises:
        ConfigError: the file breaks mig-parted's rules.
    """
    file = document.decode(_MigPartedLayouts)

    if file.version not in ("", "v1"):
        problem = f"{file.version!r} is unknown; allowed: v1"
        raise document.error("version", problem, ConfigReason.UNKNOWN_VALUE)
    if not file.mig_configs:
        problem = "there is no layout; give at least one"
        raise document.error(_CONFIGS, problem, ConfigReason.MISSING)
    return list(file.mig_configs)


def chosen_layout(document: Document, context: ConversionContext) -> list[LayoutEntry]:
    """Return the entries of the chosen layout, the entry that wins first.

    In mig-parted the last entry wins. Without a choice there is none: the GPUs stay as they are.

    Raises:
        ConfigError: the file is wrong, or has no layout of the chosen name.
    """
    known, chosen = layout_names(document), context.mig_config
    if chosen is None:
        return []
    if chosen not in known:
        problem = f"there is no layout {chosen!r} (--mig-config); there are: {', '.join(known)}"
        raise document.error(_CONFIGS, problem, ConfigReason.UNKNOWN_CHOICE)
    return read_layout(document, chosen)


def read_layout(document: Document, name: str) -> list[LayoutEntry]:
    """Return the entries of one layout, the entry that wins first.

    Raises:
        ConfigError: an entry is wrong.
    """
    path = key_path(_CONFIGS, name)
    for number, given in enumerate(document.at(path)):
        for key in given if isinstance(given, dict) else ():
            if key not in _ENTRY_KEYS:
                known = allowed_values(str(key), _ENTRY_KEYS)
                problem = f"unknown key, which mig-parted refuses; {known}"
                raise document.error(
                    key_path(f"{path}[{number}]", key), problem, ConfigReason.UNKNOWN_KEY
                )
    entries = document.decode(list[_MigPartedEntry], path)

    return [
        _layout_entry(entry, Origin(document, f"{path}[{number}]"))
        for number, entry in reversed(list(enumerate(entries)))
    ]


def _layout_entry(entry: _MigPartedEntry, origin: Origin) -> LayoutEntry:
    path = f"{origin.path}.mig-devices"
    devices = entry.mig_devices or {}
    given = {profile: count for profile, count in devices.items() if count}

    for profile, count in given.items():
        if count < 0:
            problem = f"{count} instances cannot be; write how many of it a GPU has"
            raise origin.document.error(
                key_path(path, profile), problem, ConfigReason.INVALID_VALUE
            )
    if entry.mig_enabled and entry.mig_devices is None:
        problem = (
            "no instance is named; say how many of which profile, as in 1g.5gb: 7, or {} for MIG "
            "mode without instances"
        )
        raise origin.document.error(path, problem, ConfigReason.MISSING)
    if devices and not given:
        problem = "all counts are 0; say how many of which profile, or write {} for none"
        raise origin.document.error(path, problem, ConfigReason.INVALID_VALUE)
    if not entry.mig_enabled and given:
        problem = "a GPU has no instances when mig-enabled is false; remove one of the two"
        raise origin.document.error(path, problem, ConfigReason.CONFLICT)

    whole, parts = _without_compute_instances(given)
    refusal = parts and (
        f"{parts} divides a GPU instance between compute instances, which metagpu does not create; "
        "write the profile of the GPU instance, such as 2g.10gb"
    )
    return LayoutEntry(_gpus(entry, origin), entry.mig_enabled, whole, origin, refusal)


def _without_compute_instances(given: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """Return instances by profile, and a profile that is a part of a GPU instance."""
    whole, part = Counter[str](), ""
    for profile, count in given.items():
        found = _COMPUTE_INSTANCES.fullmatch(profile)
        if found and found[1] != found[3]:
            part = part or profile
        whole[found[2] if found else profile] += count
    return ({}, part) if part else (dict(whole), "")


def _gpus(entry: _MigPartedEntry, origin: Origin) -> Data | None:
    if isinstance(entry.devices, str):
        if entry.devices != "all":
            problem = f"{entry.devices!r} is unknown; write all, or a list of indices"
            raise origin.document.error(
                f"{origin.path}.devices", problem, ConfigReason.UNKNOWN_VALUE
            )
        by_index: Data = {}
    else:
        if not entry.devices or min(entry.devices) < 0:
            problem = "no GPU is named; write all, or a list of indices from 0 on"
            raise origin.document.error(
                f"{origin.path}.devices", problem, ConfigReason.INVALID_VALUE
            )
        by_index = backend_options.by_index(entry.devices)

    return {**by_index, **_pci_devices(entry.device_filter)} or None


def _pci_devices(filters: str | int | Sequence[str | int] | None) -> Data:
    if filters is None or filters in ("", ()):
        return {}
    listed = [filters] if isinstance(filters, (str, int)) else filters
    return {"pciDevice": [each if isinstance(each, str) else f"0x{each:08X}" for each in listed]}


_A30: Final = 0x20B710DE
_A30_PROFILES: Final = {"1g.6gb": 4, "1g.6gb+me": 1, "2g.12gb": 2, "2g.12gb+me": 1, "4g.24gb": 1}
"""The MIG manager does not ask NVML, which has wrong numbers for the A30."""
_BALANCED: Final = {7: {1: 2, 2: 1, 3: 1}, 4: {1: 2, 2: 1}}
"""The instances of `all-balanced` by compute slices, for a GPU of so many slices."""


def make_layouts(models: Sequence[MigModel]) -> Document:
    """Return the layouts that the MIG manager makes from GPUs without a file.

    They are all-disabled, all-enabled, one of each profile, and all-balanced where the profiles
    allow that. An entry names its GPUs where the node has several models.
    """
    layouts = {"all-disabled": [_entry({}, enabled=False)]}
    if models:
        layouts["all-enabled"] = [_entry({})]
    several = len(models) > 1
    if balanced := [(counts, model) for model in models if (counts := _balanced(model))]:
        layouts["all-balanced"] = [
            _entry(counts, [model] if several else ()) for counts, model in balanced
        ]
    counted = {model.device: _counts(model) for model in models}
    for name in sorted({name for counts in counted.values() for name in counts}):
        by_count: dict[int, list[MigModel]] = {}
        for model in models:
            if count := counted[model.device].get(name):
                by_count.setdefault(count, []).append(model)
        layouts[f"all-{name.replace('+', '.')}"] = [
            _entry({name: count}, by_count[count] if several else ()) for count in sorted(by_count)
        ]
    text = msgspec.json.encode({"version": "v1", _CONFIGS: layouts}).decode()
    return Document(text, MADE, 0)


def _entry(
    instances: Mapping[str, int], models: Sequence[MigModel] = (), *, enabled: bool = True
) -> Data:
    named = {"device-filter": [f"0x{model.device:08X}" for model in models]} if models else {}
    devices = {"mig-devices": instances} if enabled else {}
    return {**named, "devices": "all", "mig-enabled": enabled, **devices}


def _counts(model: MigModel) -> Mapping[str, int]:
    if model.device == _A30:
        return _A30_PROFILES
    return {profile.name: profile.max_instances for profile in model.profiles}


def _balanced(model: MigModel) -> Mapping[str, int]:
    """Return the instances of `all-balanced`, none where a model has no such profiles.

    Of several profiles of one size, that counts of which most fit on a GPU.
    """
    by_slices: dict[int, MigProfile] = {}
    for profile in model.profiles:
        if {"+", "-"} & {*profile.name}:
            continue
        held = by_slices.setdefault(profile.slices, profile)
        if profile.max_instances > held.max_instances:
            by_slices[profile.slices] = profile
    wanted = _BALANCED.get(max(by_slices, default=0), {})
    if not wanted.keys() <= by_slices.keys():
        return {}
    return {by_slices[slices].name: count for slices, count in wanted.items()}

"""mig-parted's `mig-configs`: named layouts of MIG instances, one for a node.

Keys are those of github.com/NVIDIA/mig-parted, which NVIDIA's MIG manager reads.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from metagpu.compat import backend_options
from metagpu.compat.contract import ConversionContext, Data, Origin
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigReason, allowed_values
from metagpu.core.config.paths import key_path

_CONFIGS: Final = "mig-configs"


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
    """

    gpus: Data | None
    mig_enabled: bool
    instances: dict[str, int]
    origin: Origin

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

    In mig-parted the last entry wins. The only layout of a file needs no choice.

    Raises:
        ConfigError: the file is wrong, has no layout of the chosen name, or needs a choice.
    """
    known = layout_names(document)
    chosen = context.mig_config
    if chosen is None and len(known) == 1:
        chosen = known[0]
    if chosen is None:
        problem = f"none of its layouts is chosen; give --mig-config: {', '.join(known)}"
        raise document.error(_CONFIGS, problem, ConfigReason.NO_CHOICE)
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

    return LayoutEntry(_gpus(entry, origin), entry.mig_enabled, given, origin)


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

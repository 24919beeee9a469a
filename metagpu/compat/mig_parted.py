"""mig-parted's `mig-configs`: named layouts of MIG instances, one of which a node has.

Keys are those of github.com/NVIDIA/mig-parted, which is what NVIDIA's MIG manager reads.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from metagpu.compat import selection
from metagpu.compat.contract import Circumstances, Data, Origin
from metagpu.core.document import Document
from metagpu.core.paths import below

_CONFIGS: Final = "mig-configs"


class _Entry(msgspec.Struct, rename="kebab"):
    """Some GPUs and the instances that they shall have."""

    mig_enabled: bool
    devices: str | tuple[int, ...] = "all"
    device_filter: str | int | tuple[str | int, ...] | None = None
    mig_devices: dict[str, int] = {}


class File(msgspec.Struct, rename="kebab"):
    """What of the file is honoured: all of it."""

    mig_configs: dict[str, list[_Entry]]
    version: str = "v1"


class _Named(msgspec.Struct, rename="kebab"):
    """The file before its layouts are read, each by its own path."""

    mig_configs: dict[str, list[Any]]
    version: str = "v1"


class Wanted(msgspec.Struct, frozen=True):
    """One entry of the chosen layout: some GPUs, `None` for all, and what they shall have.

    `instances` is empty where MIG mode shall be off.
    """

    gpus: Data | None
    instances: dict[str, int]
    origin: Origin


def recognises(data: dict[Any, Any]) -> bool:
    """Tell whether this is mig-parted's file."""
    return _CONFIGS in data


def names(document: Document) -> list[str]:
    """Name the layouts that a file has.

    Raises:
        ConfigError: if it is not as mig-parted wants it.
    """
    file = document.decode(_Named)

    if file.version not in ("", "v1"):
        raise document.error("version", f"{file.version!r} is not known here; allowed: v1")
    if not file.mig_configs:
        raise document.error(_CONFIGS, "there is no layout; give at least one")
    return list(file.mig_configs)


def wanted(document: Document, circumstances: Circumstances) -> list[Wanted]:
    """Give the chosen layout, entries that win first: mig-parted lets the last one win.

    Without a choice a file of one layout has chosen itself.

    Raises:
        ConfigError: if the file is wrong, or the choice is none of its layouts.
    """
    known = names(document)
    chosen = circumstances.mig_config
    if chosen is None and len(known) == 1:
        chosen = known[0]
    if chosen is None:
        raise document.error(
            _CONFIGS, f"none of its layouts is chosen; give --mig-config: {', '.join(known)}"
        )
    if chosen not in known:
        raise document.error(
            _CONFIGS, f"there is no layout {chosen!r} (--mig-config); there are: {', '.join(known)}"
        )
    return layout(document, chosen)


def layout(document: Document, name: str) -> list[Wanted]:
    """Give one layout, entries that win first.

    Raises:
        ConfigError: if an entry is wrong.
    """
    path = below(_CONFIGS, name)
    entries = document.decode(list[_Entry], path)

    return [
        _wanted(entry, Origin(document, f"{path}[{number}]"))
        for number, entry in reversed(list(enumerate(entries)))
    ]


def _wanted(entry: _Entry, origin: Origin) -> Wanted:
    path = f"{origin.path}.mig-devices"
    given = {profile: count for profile, count in entry.mig_devices.items() if count}

    for profile, count in given.items():
        if count < 0:
            problem = f"{count} instances cannot be; write how many of it a GPU has"
            raise origin.document.error(below(path, profile), problem)
    if entry.mig_enabled and not given:
        problem = "no instance is named; say how many of which profile, as in 1g.5gb: 7"
        raise origin.document.error(path, problem)
    if not entry.mig_enabled and given:
        problem = "a GPU has no instances when mig-enabled is false; remove one of the two"
        raise origin.document.error(path, problem)

    return Wanted(_gpus(entry, origin), given, origin)


def _gpus(entry: _Entry, origin: Origin) -> Data | None:
    if isinstance(entry.devices, str):
        if entry.devices != "all":
            problem = f"{entry.devices!r} is not known here; write all, or a list of indices"
            raise origin.document.error(f"{origin.path}.devices", problem)
        by_index = None
    else:
        if not entry.devices or min(entry.devices) < 0:
            problem = "no GPU is named; write all, or a list of indices from 0 on"
            raise origin.document.error(f"{origin.path}.devices", problem)
        by_index = selection.indices(entry.devices)

    return selection.both(by_index, _kinds(entry.device_filter))


def _kinds(filters: str | int | Sequence[str | int] | None) -> Data | None:
    if filters is None or filters in ("", ()):
        return None
    listed = [filters] if isinstance(filters, (str, int)) else filters
    return {"pciDevice": [each if isinstance(each, str) else f"0x{each:08X}" for each in listed]}

"""What the kubelet calls a container, by the links that it keeps for collectors of logs.

For each container it starts, it puts `<pod>_<namespace>_<container>-<id>.log` into
`/var/log/containers`, cut at 255 characters: a link to
`/var/log/pods/<namespace>_<pod>_<uid>/<container>/<n>.log`.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from metagpu.core.host import Container
from metagpu.core.model import Holder

DEFAULT_FOLDER: Final = Path("/var/log/containers")

_SUFFIX: Final = ".log"
_LONGEST: Final = 255 - len(_SUFFIX)
_NAMES: Final = 3


def read_holders(folder: Path, containers: Collection[Container]) -> Mapping[Container, Holder]:
    """Name those containers that have a link; blocks.

    Raises:
        OSError: if there is no such folder.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    stems = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
    by_id = {stem.rpartition("-")[2]: stem for stem in stems}
    cut = [stem for stem in stems if len(stem) == _LONGEST]
    found: dict[Container, Holder] = {}

    for container in containers:
        for stem in filter(None, [by_id.get(container.id), *cut]):
            if (holder := _holder(folder, stem, container)) is not None:
                found[container] = holder
                break
    return found


def read_containers(folder: Path, holders: Collection[Holder]) -> Mapping[Container, Holder]:
    """Find the containers of these names, running or not; blocks.

    One whose link is cut is not found: its name tells no id.

    Raises:
        OSError: if there is no such folder.
    """
    stems = {f"{it.pod}_{it.namespace}_{it.container}" for it in holders}
    with os.scandir(folder) as entries:
        names = [entry.name.removesuffix(_SUFFIX) for entry in entries]
    found: dict[Container, Holder] = {}

    for name in names:
        stem, _, id_ = name.rpartition("-")
        if stem not in stems:
            continue
        try:
            uid = (folder / f"{name}{_SUFFIX}").readlink().parent.parent.name.rpartition("_")[2]
        except OSError:
            continue  # removed meanwhile, or no link
        container = Container(id_, uid)
        if (holder := _holder(folder, name, container)) is not None and holder in holders:
            found[container] = holder
    return found


def _holder(folder: Path, stem: str, container: Container) -> Holder | None:
    """Read the names from where a link leads, if name and target both speak of this container."""
    try:
        target = (folder / f"{stem}{_SUFFIX}").readlink()
    except OSError:
        return None  # removed meanwhile, or no link

    names = target.parent.parent.name.split("_")
    if len(names) != _NAMES:
        return None
    namespace, pod, uid = names
    name = target.parent.name

    whole = f"{pod}_{namespace}_{name}-{container.id}"
    if uid != container.pod_uid or whole[:_LONGEST] != stem:
        return None
    return Holder(namespace, pod, name)

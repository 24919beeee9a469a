"""Containers' names, by the links that the kubelet keeps for log collectors.

For each container that it starts, the kubelet puts `<pod>_<namespace>_<container>-<id>.log` into
`/var/log/containers`, cut at 255 characters: a link to
`/var/log/pods/<namespace>_<pod>_<uid>/<container>/<n>.log`. Two containers of a pod whose links are
cut before their ids have one link, to the log of the first. The folder of the pod's logs names the
pod in full.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from metagpu.core.contracts.host import Container
from metagpu.core.model.shares import Holder

DEFAULT_FOLDER: Final = Path("/var/log/containers")
PODS: Final = "pods"
"""The folder of the pods' logs, beside the one of the links."""

_SUFFIX: Final = ".log"
_LONGEST: Final = 255 - len(_SUFFIX)
_NAMES: Final = 3
_CERTAIN: Final = 12
"""Digits of an id that a cut link needs to be this container's: the runtime chooses them."""


def read_holders(folder: Path, containers: Collection[Container]) -> Mapping[Container, Holder]:
    """Return the names of containers; the pod alone where no link is certain; blocks.

    Raises:
        OSError: the folder is missing.
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
    return _pods_of(folder.with_name(PODS), set(containers) - found.keys()) | found


def read_containers(folder: Path, holders: Collection[Holder]) -> Mapping[Container, Holder]:
    """Return the containers of these names, running or not; blocks.

    A container whose link is cut is left out: the link has no whole id.

    Raises:
        OSError: the folder is missing.
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


def _pods_of(folder: Path, containers: Collection[Container]) -> dict[Container, Holder]:
    """Return the pods of containers of unknown name, by the folders of the pods' logs."""
    if not containers:
        return {}
    try:
        with os.scandir(folder) as entries:
            split = [entry.name.split("_") for entry in entries]
    except OSError:
        return {}

    pods = {names[2]: Holder(names[0], names[1], "") for names in split if len(names) == _NAMES}
    return {one: pods[one.pod_uid] for one in containers if one.pod_uid in pods}


def _holder(folder: Path, stem: str, container: Container) -> Holder | None:
    """Return the names in a link's target, if both belong to this container."""
    try:
        target = (folder / f"{stem}{_SUFFIX}").readlink()
    except OSError:
        return None  # removed meanwhile, or no link

    names = target.parent.parent.name.split("_")
    if len(names) != _NAMES:
        return None
    namespace, pod, uid = names
    name = target.parent.name

    named = f"{pod}_{namespace}_{name}-"
    if uid != container.pod_uid or f"{named}{container.id}"[:_LONGEST] != stem:
        return None
    if len(stem) - len(named) < _CERTAIN:
        return None
    return Holder(namespace, pod, name)

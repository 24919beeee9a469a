"""The cgroups of containers: folders below `/sys/fs/cgroup`, of version 2.

The kubelet's pods are some levels down; the depth depends on the node (`cgroups.py` lists the
forms). Only names that may lead there are searched: a node has hundreds of other cgroups, each a
folder of a hundred files.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from metagpu.core.contracts.host import Container
from metagpu.host.cgroups import find_container, parse_pod_uid

_EMPTY: Final = "populated 0"
"""A line of `cgroup.events`, of a cgroup without a process in it or below (cgroups(7))."""
_DEEPEST: Final = 8
_LEADS: Final = re.compile(
    r"kube.*|.*-kube.*|burstable|besteffort|docker.*|system\.slice|[0-9a-f]{64}"
    r"|(?:containerd|crio|docker|cri-docker|k3s|k3s-agent)\.service"
)


def is_cgroup_v2(root: Path) -> bool:
    """Return whether cgroups are of version 2, which alone counts GPU memory; blocks."""
    return (root / "cgroup.controllers").exists()


def find_container_cgroups(
    root: Path, containers: Collection[Container]
) -> Mapping[Container, Path]:
    """Return the cgroups of containers, without containers that have none; blocks."""
    if not containers:
        return {}
    wanted = set(containers)
    uids = {container.pod_uid for container in containers}
    found: dict[Container, Path] = {}

    for folder in _walked(root, "", uids):
        container = find_container(f"0::/{folder}", root)
        if container in wanted and container not in found:
            found[container] = root / folder
    return found


def find_pods(root: Path, uids: Collection[str]) -> frozenset[str]:
    """Return the pods that have a cgroup, in any version and hierarchy; blocks."""
    roots = [root] if is_cgroup_v2(root) else [it for it in root.glob("*") if it.is_dir()]
    names = (Path(path).name for it in roots for path in _walked(it, "", uids))
    return frozenset(uid for name in names if (uid := parse_pod_uid(name)) is not None)


def is_populated(cgroup: Path) -> bool:
    """Return whether a process is in a cgroup or below, as far as known; blocks."""
    try:
        return _EMPTY not in (cgroup / "cgroup.events").read_text().splitlines()
    except OSError:
        return True


def _walked(root: Path, folder: str, uids: Collection[str], depth: int = 0) -> Iterator[str]:
    """Yield folders that may be containers' cgroups, from the root, outer ones first."""
    for name in _folders(root / folder):
        path = f"{folder}/{name}" if folder else name
        uid = parse_pod_uid(name)
        if uid is not None:
            if uid not in uids:
                continue
            yield path
            yield from (f"{path}/{below}" for below in _folders(root / path))
        elif depth < _DEEPEST and _LEADS.fullmatch(name):
            yield from _walked(root, path, uids, depth + 1)


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # ended meanwhile

"""Where the cgroups of containers are: the folders below `/sys/fs/cgroup`, of version 2.

The kubelet's pods are some levels down, how many is the node's matter (`cgroups.py` lists them).
Only names that may lead there are gone into: a node has hundreds of other cgroups, each a folder of
a hundred files.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from metagpu.core.host import Container
from metagpu.host.cgroups import container_in, may_be_pod

DEFAULT_ROOT: Final = Path("/sys/fs/cgroup")

_DEEPEST: Final = 8
_LEADS: Final = re.compile(
    r"kube.*|.*-kube.*|burstable|besteffort|docker.*|podman.*|libpod.*|system\.slice|machine\.slice"
    r"|(?:containerd|crio|docker|cri-docker)\.service|[0-9a-f]{64}"
)


def counts_devices(root: Path) -> bool:
    """Tell whether cgroups are of version 2: GPU memory is counted in no other; blocks."""
    return (root / "cgroup.controllers").exists()


def find_homes(root: Path, containers: Collection[Container]) -> Mapping[Container, Path]:
    """Find the cgroups of containers that have one; blocks."""
    if not containers:
        return {}
    wanted = set(containers)
    uids = {container.pod_uid for container in containers}
    found: dict[Container, Path] = {}

    for folder in _walked(root, "", uids):
        container = container_in(f"0::/{folder}")
        if container in wanted and container not in found:
            found[container] = root / folder
    return found


def _walked(root: Path, folder: str, uids: Collection[str], depth: int = 0) -> Iterator[str]:
    """Give the folders in which containers may be, outer ones first, as paths below the root."""
    for name in _folders(root / folder):
        path = f"{folder}/{name}" if folder else name
        uid = may_be_pod(name)
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

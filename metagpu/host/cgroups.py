"""The container of a process, by the paths of its cgroups (`/proc/PID/cgroup`).

The kubelet gives each pod a cgroup whose name ends in its uid, and the runtime puts each container
one level below it. The form of the names depends on the node's settings:

    /kubepods/burstable/pod<uid>/<id>                                            cgroupfs
    /kubepods.slice/kubepods-pod<uid_>.slice/cri-containerd-<id>.scope           systemd
    /kubepods/pod<uid>/crio-<id>                                                 CRI-O on cgroupfs
    /system.slice/containerd.service/kubepods-pod<uid_>.slice:cri-containerd:<id>
                        a runtime set to cgroupfs below a kubelet set to systemd
    /docker/<node's id>/kubelet/kubepods/pod<uid>/<id>                           kind
    /../../burstable/pod<uid>/<id>       seen from a cgroup namespace: from the reader's own cgroup

A name alone proves nothing: systemd gives each user of the host a cgroup of the user's own, below
which the user makes any names. A pod's cgroup is one below the kubelet's root, in a folder of root.
"""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.contracts.host import Container

DEFAULT_ROOT: Final = Path("/sys/fs/cgroup")

_ID: Final = r"(?P<id>[0-9a-f]{64})"
_UID: Final = r"(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
"""A uuid, with underscores where systemd takes dashes for levels; a static pod's is a hash."""
_POD: Final = re.compile(rf"(?:.*-)?pod{_UID}(?:\.slice)?")
_CONTAINER: Final = re.compile(rf"(?:(?P<runtime>[a-z][a-z-]*)-)?{_ID}(?:\.scope)?")
_BOTH: Final = re.compile(rf"(?:.*-)?pod{_UID}\.slice:[a-z-]+:{_ID}")
_MONITOR: Final = "crio-conmon"
"""CRI-O's monitor of a container, in the pod's cgroup and outside the container's."""
_DELETED: Final = " (deleted)"

_QOS: Final = "(?:burstable|besteffort)"
_PODS: Final = (
    rf"(?:kubepods(?:/{_QOS})?|(?:[^/]+-)?kubepods\.slice(?:/(?:[^/]+-)?kubepods-{_QOS}\.slice)?)"
)
"""The kubelet's cgroup of all pods, and the one of a QoS class below it."""
_RUNTIME: Final = r"system\.slice/(?:containerd|crio|docker|cri-docker|k3s|k3s-agent)\.service"
_KNOWN: Final = re.compile(
    r"(?:docker/[0-9a-f]{64}/|system\.slice/docker-[0-9a-f]{64}\.scope/)?"  # a node of kind
    rf"(?:(?:kubelet(?:\.slice)?/)?{_PODS}|{_RUNTIME})"
)
"""Where the kubelet and its runtime put pods by default: only root makes these cgroups."""
_CONFIGURED: Final = re.compile(
    rf"(?:[^/]+(?<!\.scope)(?<!\.service)/)*(?:{_PODS}|system\.slice/[^/]+\.service)"
)
"""Where pods may be besides: below a `cgroupRoot` of any name, or another runtime's unit."""
_SIBLING: Final = re.compile(rf"{_QOS}?|(?:[^/]+-)?kubepods-{_QOS}\.slice")
"""What a cgroup namespace leaves of the path, where the reader is a pod itself."""


class _PodCgroup(msgspec.Struct, frozen=True):
    """A container in a path of cgroups.

    Attributes:
        parent: the folder in which the container's cgroup is, from the root of its hierarchy;
            `None` for a path that begins elsewhere.
        known: whether the names above show already that root has made the cgroup.
    """

    container: Container
    parent: str | None
    known: bool


def find_container(text: str, root: Path = DEFAULT_ROOT) -> Container | None:
    """Return the container in a text of `/proc/PID/cgroup`; `None` outside of pods.

    The outermost pod counts: a container may create any cgroups within its own. Where the folders
    are visible, the one that has the container's cgroup belongs to root, or to this process's user.
    The function blocks, for microseconds.
    """
    for line in text.split("\n"):  # a name may have any other character that ends lines elsewhere
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (found := _parse(path)) is None:
            continue
        owner = _owner(root, controllers, found.parent)
        if found.known if owner is None else owner in {0, os.geteuid()}:
            return found.container
    return None


def parse_pod_uid(name: str) -> str | None:
    """Return the pod's uid in the name of a cgroup, `None` for other cgroups."""
    found = _POD.fullmatch(name) or _BOTH.fullmatch(name)
    return None if found is None else _dashed(found["uid"])


@lru_cache(maxsize=1024)
def _parse(path: str) -> _PodCgroup | None:
    """Find the outermost pod in a path, if it is where a kubelet may have put it."""
    levels = path.removesuffix(_DELETED).removeprefix("/").split("/")
    above = 0
    while levels[above] == ".." and above < len(levels) - 1:
        above += 1

    for place, level in enumerate(levels):
        if both := _BOTH.fullmatch(level):
            container, end = Container(both["id"], _dashed(both["uid"])), place
            break
        if pod := _POD.fullmatch(level):
            inner = _CONTAINER.fullmatch("".join(levels[place + 1 : place + 2]))
            if inner is None or inner["runtime"] == _MONITOR:
                return None
            container, end = Container(inner["id"], _dashed(pod["uid"])), place + 1
            break
    else:
        return None

    head = "/".join(levels[above:place])
    known = _KNOWN.fullmatch(head) or (above and _SIBLING.fullmatch(head))
    if not known and not _CONFIGURED.fullmatch(head):
        return None
    return _PodCgroup(container, None if above else "/".join(levels[:end]), bool(known))


def _owner(root: Path, controllers: str, folder: str | None) -> int | None:
    """Return the user that owns a cgroup's folder; `None` where it is not visible."""
    if folder is None:
        return None
    hierarchies = [controllers.removeprefix("name=")] if controllers else ["", "unified"]
    for hierarchy in hierarchies:
        try:
            return os.lstat(f"{root}/{hierarchy}/{folder}").st_uid  # twice as fast as by Path
        except OSError:
            continue
    return None


def _dashed(uid: str) -> str:
    return uid.replace("_", "-")

"""Which container a process runs in, by the paths of its cgroups (`/proc/PID/cgroup`).

The kubelet gives each pod a cgroup whose name ends in its uid, and the runtime puts each container
one level below it. Who writes the names, and how, is the business of the node's settings:

    /kubepods/burstable/pod<uid>/<id>                                            cgroupfs
    /kubepods.slice/kubepods-pod<uid_>.slice/cri-containerd-<id>.scope           systemd
    /kubepods/pod<uid>/crio-<id>                                                 CRI-O on cgroupfs
    /system.slice/containerd.service/kubepods-pod<uid_>.slice:cri-containerd:<id>
                        a runtime set to cgroupfs below a kubelet set to systemd
    /docker/<node's id>/kubelet/kubepods/pod<uid>/<id>                           kind
"""

import re
from typing import Final

from metagpu.core.host import Container

_ID: Final = r"(?P<id>[0-9a-f]{64})"
_UID: Final = r"(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
"""A uuid, with underscores where systemd takes dashes for levels; a static pod's is a hash."""
_POD: Final = re.compile(rf"(?:.*-)?pod{_UID}(?:\.slice)?")
_CONTAINER: Final = re.compile(rf"(?:(?P<runtime>[a-z][a-z-]*)-)?{_ID}(?:\.scope)?")
_BOTH: Final = re.compile(rf"(?:.*-)?pod{_UID}\.slice:[a-z-]+:{_ID}")
_MONITOR: Final = "crio-conmon"
"""CRI-O's watchman of a container, in the pod's cgroup and outside the container's."""
_DELETED: Final = " (deleted)"


def container_in(text: str) -> Container | None:
    """Find the container in what `/proc/PID/cgroup` says; `None` when it is none of a pod.

    The outermost pod counts: what a container builds within its own cgroup is its own matter.
    """
    for line in text.splitlines():
        path = line.split(":", 2)[-1].removesuffix(_DELETED)
        if (found := _container_at(path)) is not None:
            return found
    return None


def may_be_pod(name: str) -> str | None:
    """Give the pod's uid in the name of a cgroup, `None` where it is no pod's."""
    found = _POD.fullmatch(name) or _BOTH.fullmatch(name)
    return None if found is None else _dashed(found["uid"])


def _container_at(path: str) -> Container | None:
    levels = path.split("/")

    for level, below in zip(levels, [*levels[1:], ""], strict=True):
        if both := _BOTH.fullmatch(level):
            return Container(both["id"], _dashed(both["uid"]))
        if pod := _POD.fullmatch(level):
            container = _CONTAINER.fullmatch(below)
            if container is None or container["runtime"] == _MONITOR:
                return None
            return Container(container["id"], _dashed(pod["uid"]))
    return None


def _dashed(uid: str) -> str:
    return uid.replace("_", "-")

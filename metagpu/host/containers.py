"""Containers on this host: the container of a process, cgroups, and names.

A process belongs to a container by the paths of its cgroups (`/proc/PID/cgroup`). The kubelet gives
each pod a cgroup whose name ends in its uid, and the runtime puts each container one level below
it. The form of the names depends on the node's settings:

    /kubepods/burstable/pod<uid>/<id>                                            cgroupfs
    /kubepods.slice/kubepods-pod<uid_>.slice/cri-containerd-<id>.scope           systemd
    /kubepods/pod<uid>/crio-<id>                                                 CRI-O on cgroupfs
    /system.slice/containerd.service/kubepods-pod<uid_>.slice:cri-containerd:<id>
                        a runtime set to cgroupfs below a kubelet set to systemd
    /docker/<node's id>/kubelet/kubepods/pod<uid>/<id>                           kind
    /../../burstable/pod<uid>/<id>       seen from a cgroup namespace: from the reader's own cgroup

A name alone proves nothing: systemd gives each user of the host a cgroup of the user's own, below
which the user makes any names. A pod's cgroup is one below the kubelet's root, in a folder of root.
Of the folders below `/sys/fs/cgroup` (version 2), systemd's units are not searched, but for those
that may have pods: a node has hundreds, each a folder of a hundred files.

For each container that it starts, the kubelet puts `<pod>_<namespace>_<container>-<id>.log` into
`/var/log/containers`, cut at 255 characters: a link to
`/var/log/pods/<namespace>_<pod>_<uid>/<container>/<n>.log`. Two containers of a pod whose links are
cut before their ids have one link, to the log of the first. The folder of the pod's logs names the
pod in full.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from metagpu.core.contracts.host import Container
from metagpu.core.model.shares import Holder

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


_EMPTY: Final = "populated 0"
"""A line of `cgroup.events`, of a cgroup without a process in it or below (cgroups(7))."""
_DEEPEST: Final = 8
_LEADS: Final = re.compile(
    r"(?!.*\.(?:mount|scope|service|socket|swap)$).*|docker-[0-9a-f]{64}\.scope"
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
    roots = [root] if is_cgroup_v2(root) else [file for file in root.glob("*") if file.is_dir()]
    names = (Path(path).name for where in roots for path in _walked(where, "", uids))
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


_NAMING: Final = (
    (
        *("io.kubernetes.cri.sandbox-uid", "io.kubernetes.cri.sandbox-namespace"),
        *("io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name"),
    ),
    (
        *("io.kubernetes.pod.uid", "io.kubernetes.pod.namespace", "io.kubernetes.pod.name"),
        "io.kubernetes.container.name",
    ),
)
"""Annotations with the uid of a container's pod and its names: containerd's, and the kubelet's
labels, which CRI-O makes annotations."""


def read_starting_holder(
    folder: Path, container: Container, annotations: Mapping[str, str]
) -> Holder | None:
    """Return the names of a container that starts; `None` for an unknown pod; blocks.

    Its link comes after its start. A runtime may give a container its pod's annotations, and writes
    its own over them (`SpecAddAnnotations` of CRI-O 1.34): so one of the names is true, and where
    two differ the folder of its logs names the pod alone.
    """
    named = {
        Holder(*names)
        for uid, *names in ([annotations.get(key, "") for key in keys] for keys in _NAMING)
        if uid == container.pod_uid and all(names)
    }
    if len(named) == 1:
        return named.pop()
    return _pods_of(folder.with_name(PODS), [container]).get(container)


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
    stems = {f"{named.pod}_{named.namespace}_{named.container}" for named in holders}
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

"""The roots of driver and device nodes, for the container runtime and for us.

In a pod a folder of the host has two paths. Answers to the kubelet and CDI files name the host's;
this process opens its own. The decision is pure; `host/driver_roots.py` looks at the folders.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec

DRIVER_CONTAINER: Final = "/run/nvidia/driver"
"""The file system of the driver container of NVIDIA's GPU operator."""
HOST_MOUNT: Final = "/host"
DRIVER_MOUNT: Final = "/driver-root"
"""Mounts of the host's folders and the driver's root in a pod, as pods of NVIDIA's have them."""
MOUNT_HOST: Final = f"mount the host's /usr, /lib, /dev and /run/nvidia below {HOST_MOUNT}"
"""For messages. The whole root would bring the host's sockets, which accept connections."""
NVML_LIBRARY: Final = "libnvidia-ml.so.1"


class Folder(msgspec.Struct, frozen=True):
    """A folder of the host.

    Attributes:
        host: its path for the host and the container runtime.
        here: its path for this process.
    """

    host: str
    here: str

    def __str__(self) -> str:
        return self.host if self.host == self.here else f"{self.host} (here {self.here})"

    @property
    def prefix(self) -> str:
        """The host's path before an absolute path below the folder, empty for the root."""
        return "" if self.host == "/" else self.host


class RootOptions(msgspec.Struct, frozen=True):
    """The named roots, by options and variables; an empty text names none.

    Attributes:
        driver: the driver's root, for the host.
        container_driver: the same folder, for this process.
        dev: the folder that has /dev with the device nodes, for the host.
        container_dev: the same folder, for this process.
    """

    driver: str = ""
    container_driver: str = ""
    dev: str = ""
    container_dev: str = ""


class FolderContents(msgspec.Struct, frozen=True):
    """The contents of a folder.

    Attributes:
        exists: it is a folder.
        is_root: it is the root of a system.
        library: the path of libnvidia-ml.so.1 below it, for this process; empty without one.
        has_devices: device nodes of NVIDIA's are in its /dev.
    """

    exists: bool = False
    is_root: bool = False
    library: str = ""
    has_devices: bool = False


class DriverRoots(msgspec.Struct, frozen=True):
    """The roots in use.

    Attributes:
        driver: the folder with the driver's libraries and programs.
        dev: the folder with the device nodes in its /dev.
        host: the host's root.
        library: the path of libnvidia-ml.so.1 for this process; empty if no folder has it.
        reason: why this is the driver's root.
    """

    driver: Folder = Folder("/", "/")
    dev: Folder = Folder("/", "/")
    host: Folder = Folder("/", "/")
    library: str = ""
    reason: str = "this file system"

    @property
    def libraries(self) -> tuple[str, ...]:
        """The names by which to load NVML, in their order.

        In this process's own root the linker finds it, also through LD_LIBRARY_PATH.
        """
        if self.library and self.driver.here != "/":
            return (self.library,)
        return (NVML_LIBRARY, *filter(None, [self.library]))


def candidates(options: RootOptions) -> Sequence[str]:
    """Return every folder to look at before a choice, as paths of this process."""
    driver = _driver_candidates(options)
    found = chain(driver, _dev_candidates(options, driver), _host_candidates())
    return tuple(dict.fromkeys(folder.here for folder in found))


def host_roots(options: RootOptions) -> Sequence[str]:
    """Return every possible root of the driver, as a path of the host."""
    return tuple(dict.fromkeys(folder.host for folder in _driver_candidates(options)))


def choose_roots(options: RootOptions, seen: Mapping[str, FolderContents]) -> DriverRoots:
    """Choose the roots: the named, the driver container's, the host's, or our own.

    Args:
        options: the named roots.
        seen: the contents of all `candidates`.
    """
    possible = _driver_candidates(options)
    said = bool(options.driver or options.container_driver)
    usual = [folder for folder in possible if said or folder.host == "/"]
    driver = next(
        (folder for folder in possible if seen[folder.here].library),
        next((folder for folder in usual if seen[folder.here].is_root), possible[-1]),
    )
    host = driver if driver.host == "/" else _host_root(driver, seen)
    nodes = _dev_candidates(options, (driver, host))
    dev = next(
        (node for node in nodes if seen[node.here].has_devices),
        next((node for node in nodes if seen[node.here].exists), nodes[-1]),
    )
    reason = "as the options say" if said else _reason(driver)
    return DriverRoots(driver, dev, host, seen[driver.here].library, reason)


def _driver_candidates(options: RootOptions) -> Sequence[Folder]:
    if options.container_driver:
        return (Folder(options.driver or "/", options.container_driver),)
    if options.driver:
        return (Folder(options.driver, DRIVER_MOUNT), *_views(options.driver))
    return (*_views(DRIVER_CONTAINER), *_views("/"))


def _dev_candidates(options: RootOptions, found: Sequence[Folder]) -> Sequence[Folder]:
    """Return the possible roots of /dev, after the driver's root and the host's."""
    if options.container_dev:
        return (Folder(options.dev or found[0].host, options.container_dev),)
    if options.dev:
        return (*(folder for folder in found if folder.host == options.dev), *_views(options.dev))
    return (*found, Folder("/", "/"))


def _host_candidates() -> Sequence[Folder]:
    return _views("/")


def _host_root(driver: Folder, seen: Mapping[str, FolderContents]) -> Folder:
    mounted = (candidate for candidate in _host_candidates() if candidate.here != driver.here)
    return next((folder for folder in mounted if seen[folder.here].is_root), Folder("/", "/"))


def _views(path: str) -> Sequence[Folder]:
    """Return the paths of this process that a folder of the host may have."""
    below = "" if path == "/" else path
    mounts = (f"{mount}{below}" for mount in (HOST_MOUNT, DRIVER_MOUNT))
    return (*(Folder(path, mount) for mount in mounts), Folder(path, path))


def _reason(driver: Folder) -> str:
    if driver.host == DRIVER_CONTAINER:
        return "the driver container has the driver"
    return "this file system" if driver.here == "/" else "the host's root is mounted here"

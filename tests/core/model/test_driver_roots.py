"""The choice of the driver's root and the root of /dev, in each layout of a node."""

from collections.abc import Mapping

import pytest

from metagpu.core.model.driver_roots import (
    DriverRoots,
    Folder,
    FolderContents,
    RootOptions,
    candidates,
    choose_roots,
)

CONTAINER = "/run/nvidia/driver"
NVML = "usr/lib64/libnvidia-ml.so.1"


def chosen(options: RootOptions, folders: Mapping[str, str]) -> DriverRoots:
    """Choose among folders, each with a word for what is in it: `driver`, `dev`, `system`."""
    seen = dict.fromkeys(candidates(options), FolderContents())
    for here, inside in folders.items():
        assert here in seen
        seen[here] = FolderContents(
            exists=True,
            is_root=True,
            library=f"{here.rstrip('/')}/{NVML}" if "driver" in inside else "",
            has_devices="dev" in inside,
        )
    return choose_roots(options, seen)


HOST = Folder("/", "/host")
OWN = Folder("/", "/")


@pytest.mark.parametrize(
    ("folders", "driver", "dev", "host"),
    [
        # A process of the host with a driver of packages, or a pod to which NVIDIA's runtime gave
        # the driver; then the driver container's.
        ({"/": "driver dev"}, OWN, OWN, OWN),
        (
            {"/": "dev", CONTAINER: "driver dev"},
            Folder(CONTAINER, CONTAINER),
            Folder(CONTAINER, CONTAINER),
            OWN,
        ),
        # A pod with the host's root at /host.
        ({"/": "", "/host": "driver dev"}, HOST, HOST, HOST),
        (
            {"/": "dev", "/host": "driver dev", "/host/run/nvidia/driver": "driver dev"},
            Folder(CONTAINER, "/host/run/nvidia/driver"),
            Folder(CONTAINER, "/host/run/nvidia/driver"),
            HOST,
        ),
        # The driver container has no device nodes yet, and the host has.
        (
            {"/": "", "/host": "dev", "/host/run/nvidia/driver": "driver"},
            Folder(CONTAINER, "/host/run/nvidia/driver"),
            HOST,
            HOST,
        ),
        # The driver container is starting: what it has not is not used.
        ({"/": "", "/host": "driver dev", "/host/run/nvidia/driver": ""}, HOST, HOST, HOST),
        # Nothing is installed yet.
        ({"/": "", "/host": ""}, HOST, HOST, HOST),
        # NVIDIA's own mount of the host's root.
        ({"/": "", "/driver-root": "driver dev"}, *[Folder("/", "/driver-root")] * 3),
    ],
)
def test_roots_are_found_by_themselves(
    folders: dict[str, str], driver: Folder, dev: Folder, host: Folder
) -> None:
    """Without options, the driver container comes first, then the host, then this file system."""
    roots = chosen(RootOptions(), folders)

    assert (roots.driver, roots.dev, roots.host) == (driver, dev, host)


def test_options_win() -> None:
    """A named root is used, where a mount has it or at its own path, and never another one."""
    named = RootOptions(driver="/opt/nvidia")

    folders = {"/driver-root": "driver", "/": "driver dev", "/host": "dev"}
    roots = chosen(named, folders)
    assert roots.driver == Folder("/opt/nvidia", "/driver-root")
    assert roots.dev == HOST
    assert roots.reason == "as the options say"
    roots = chosen(named, {"/host/opt/nvidia": "driver dev", "/host": "dev"})
    assert roots.driver == roots.dev == Folder("/opt/nvidia", "/host/opt/nvidia")
    assert chosen(named, {}).driver == Folder("/opt/nvidia", "/opt/nvidia")


def test_both_paths_may_be_named() -> None:
    """NVIDIA's variables name each root twice; the driver's root of the host is / by default."""
    both = RootOptions("/a", "/b", "/c", "/d")
    roots = chosen(both, {})
    assert (roots.driver, roots.dev) == (Folder("/a", "/b"), Folder("/c", "/d"))

    here = RootOptions(container_driver="/b", container_dev="/d")
    assert chosen(here, {}).driver == Folder("/", "/b")
    assert chosen(here, {}).dev == Folder("/", "/d")


def test_a_root_of_devices_of_its_own() -> None:
    """The named root of /dev is found below the host's mount, and the driver where it is."""
    options = RootOptions(dev="/nodes")
    roots = chosen(options, {"/host": "driver dev", "/host/nodes": "dev"})

    assert (roots.driver, roots.dev) == (HOST, Folder("/nodes", "/host/nodes"))
    same = RootOptions(driver="/x", dev="/x")
    assert chosen(same, {"/driver-root": "driver dev"}).dev == Folder("/x", "/driver-root")


def test_the_library_is_loaded_by_path_or_by_the_linker() -> None:
    """Another root's library is loaded by its path; in the own root the linker comes first."""
    assert chosen(RootOptions(), {"/host": "driver"}).libraries == (f"/host/{NVML}",)
    assert chosen(RootOptions(), {"/": "driver"}).libraries == ("libnvidia-ml.so.1", f"/{NVML}")
    assert chosen(RootOptions(), {"/host": ""}).libraries == ("libnvidia-ml.so.1",)


def test_a_folder_names_both_of_its_paths() -> None:
    """Reports name the host's path, and this process's where it differs."""
    assert str(HOST) == "/ (here /host)"
    assert str(OWN) == "/"
    assert (HOST.prefix, Folder("/a", "/b").prefix) == ("", "/a")

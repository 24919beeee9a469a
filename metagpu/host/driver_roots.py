"""The folders where the driver may be; `core.model.driver_roots` chooses."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from metagpu.core.model.driver_roots import (
    NVML_LIBRARY,
    DriverRoots,
    Folder,
    FolderContents,
    RootOptions,
    candidates,
    choose_roots,
)

LIBRARIES: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "usr/lib",
)
"""Folders of the driver's libraries: those of NVIDIA's container toolkit, GKE's and Arch's."""
TOOLKIT: Final = "usr/local/nvidia/toolkit"
"""The folder of the programs that the toolkit's container of the GPU operator installs."""
PROGRAMS: Final = ("usr/bin", "bin", "usr/local/bin", "usr/local/nvidia/bin", TOOLKIT)
_HOOKS: Final = ("nvidia-cdi-hook", "nvidia-ctk")
"""Programs that run a CDI file's hooks; toolkits before 1.17 have the second one alone."""

_MOST_LINKS: Final = 40
"""Links that the kernel follows in one path."""


def find_roots(options: RootOptions) -> DriverRoots:
    """Look for the driver and the device nodes, and choose. Blocks."""
    return choose_roots(options, {path: _contents(Path(path)) for path in candidates(options)})


def program_roots(options: RootOptions) -> tuple[Path, ...]:
    """Return the folders below which programs of the driver and the toolkit may be."""
    return tuple(map(Path, candidates(options)))


def library_folders(root: Path) -> Sequence[Path]:
    """Return the folders below a root that have NVML. Blocks."""
    possible = dict.fromkeys(
        folder
        for name in LIBRARIES
        for folder in (
            follow_links(root, name),
            follow_links(root, f"{name}/{NVML_LIBRARY}").parent,
        )
    )
    return [folder for folder in possible if _has_library(root, folder)]


def follow_links(root: Path, path: str) -> Path:
    """Return where a path below a root leads for the root's own system. Blocks.

    An absolute link there starts at that root, and the kernel would start at this process's.
    """
    found, links, left = root, _MOST_LINKS, [*reversed(Path(path).parts)]
    while left:
        part = left.pop()
        following = found / part
        if part == "/":
            found = root
        elif part == "..":
            found = root if found == root else found.parent
        elif links and following.is_symlink():
            links -= 1
            left.extend(reversed(following.readlink().parts))
        else:
            found = following
    return found


def find_hook(host: Folder) -> str:
    """Return the host's path of the program of CDI hooks, empty for none. Blocks."""
    for program in _HOOKS:
        for folder in PROGRAMS:
            if os.access(follow_links(Path(host.here), f"{folder}/{program}"), os.X_OK):
                return f"/{folder}/{program}"
    return ""


def _has_library(root: Path, folder: Path) -> bool:
    """Return whether the linker opens the root's own NVML in a folder."""
    library = folder / NVML_LIBRARY
    if not library.is_file():
        return False
    there = follow_links(root, str(library.relative_to(root)))
    return library.resolve() == there.resolve()


def _contents(root: Path) -> FolderContents:
    if not root.is_dir():
        return FolderContents()
    found = library_folders(root)
    return FolderContents(
        exists=True,
        is_root=(root / "usr").is_dir(),
        library=str(found[0] / NVML_LIBRARY) if found else "",
        has_devices=any((root / "dev").glob("nvidia*")),
    )

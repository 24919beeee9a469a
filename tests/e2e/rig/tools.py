"""Paths of the node's programs."""

import os
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.rig.go_programs import GoPrograms, cache_root, go_programs

REPOSITORY = Path(__file__).parents[3]

DISTRIBUTION_PROGRAMS = ("runc", "etcd", "busybox", "bridge", "loopback", "host-local")

DISTRIBUTION_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/lib/cni")
"""Folders of programs in packages; they differ between releases."""


def distribution_path(root: Path, program: str) -> Path:
    """Return the path of PROGRAM in packages unpacked into ROOT, or its usual path."""
    paths = [root / folder / program for folder in DISTRIBUTION_FOLDERS]
    return next((place for place in paths if os.access(place, os.X_OK)), paths[0])


@dataclass(frozen=True)
class Tools:
    """The folders of the node's programs."""

    built: tuple[GoPrograms, ...]
    distribution: Path

    @classmethod
    def cached(cls) -> "Tools":
        """Return the folders in the cache, filled or not."""
        return cls(go_programs(), cache_root() / "distribution")

    def path(self, program: str) -> str:
        """Return the path of a program, or of a file beside one, present or not."""
        for built in self.built:
            if program in built.programs or program in map(os.path.basename, built.files):
                return str(built.folder / program)
        return str(distribution_path(self.distribution, program))

    @property
    def cni_folder(self) -> str:
        """Return the folder of the network plugins, which containerd calls by name."""
        return str(Path(self.path("bridge")).parent)

    def search_path(self) -> str:
        """Return a PATH on which containerd finds its shim and runc first."""
        ours = [str(Path(self.path(name)).parent) for name in ("containerd", "runc")]
        return os.pathsep.join([*ours, "/usr/sbin", "/usr/bin", "/sbin", "/bin"])

    def missing(self) -> list[str]:
        """Return the programs that `prepare` has still to provide."""
        names = [program for built in self.built for program in built.programs]
        paths = {name: self.path(name) for name in (*names, *DISTRIBUTION_PROGRAMS)}
        return [name for name, path in paths.items() if not os.access(path, os.X_OK)]

"""Paths of the node's programs, and the version of Kubernetes."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]

KUBERNETES_PROGRAMS = (
    "kubelet",
    "kube-apiserver",
    "kube-scheduler",
    "kube-controller-manager",
    "kubectl",
)

DISTRIBUTION_PROGRAMS = (
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "runc",
    "etcd",
    "busybox",
    "bridge",
    "loopback",
    "host-local",
)

DISTRIBUTION_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/lib/cni")
"""Folders of programs in packages; they differ between releases."""


def kubernetes_version() -> str:
    """Return the version that go.mod pins, such as `1.34.4`."""
    text = (HERE / "go.mod").read_text()
    found = re.search(r"^\s*(?:require )?k8s\.io/kubernetes v(\S+)", text, re.MULTILINE)
    if found is None:
        raise ValueError("go.mod requires no k8s.io/kubernetes")
    return found.group(1)


def cache_root() -> Path:
    """Return the folder outside the clone that keeps slow builds."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "metagpu" / "e2e"


def distribution_path(root: Path, program: str) -> Path:
    """Return the path of PROGRAM in packages unpacked into ROOT, or its usual path."""
    paths = [root / folder / program for folder in DISTRIBUTION_FOLDERS]
    return next((place for place in paths if os.access(place, os.X_OK)), paths[0])


@dataclass(frozen=True)
class Tools:
    """The two folders of the node's programs."""

    kubernetes: Path
    distribution: Path

    @classmethod
    def cached(cls) -> "Tools":
        """Return the folders in the cache, filled or not."""
        root = cache_root()
        return cls(root / f"kubernetes-{kubernetes_version()}", root / "distribution")

    def path(self, program: str) -> str:
        """Return the path of PROGRAM, present or not."""
        if program in KUBERNETES_PROGRAMS:
            return str(self.kubernetes / program)
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
        names = (*KUBERNETES_PROGRAMS, *DISTRIBUTION_PROGRAMS)
        return [name for name in names if not os.access(self.path(name), os.X_OK)]

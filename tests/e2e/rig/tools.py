"""Where the programs of the node lie, and which version of Kubernetes they are."""

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
"""Where packages put their programs; which release puts what where differs."""


def kubernetes_version() -> str:
    """The version that go.mod pins, such as `1.34.4`; go.mod is its one home."""
    text = (HERE / "go.mod").read_text()
    found = re.search(r"^\s*(?:require )?k8s\.io/kubernetes v(\S+)", text, re.MULTILINE)
    if found is None:
        raise ValueError("go.mod requires no k8s.io/kubernetes")
    return found.group(1)


def cache_root() -> Path:
    """The folder outside the clone that keeps what is slow to make."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "metagpu" / "e2e"


def distribution_path(root: Path, program: str) -> Path:
    """Where packages unpacked into ROOT have PROGRAM, or usually would."""
    places = [root / folder / program for folder in DISTRIBUTION_FOLDERS]
    return next((place for place in places if os.access(place, os.X_OK)), places[0])


@dataclass(frozen=True)
class Tools:
    """The two folders of programs a node is started from."""

    kubernetes: Path
    distribution: Path

    @classmethod
    def cached(cls) -> "Tools":
        """The folders in the cache, whether they are filled yet or not."""
        root = cache_root()
        return cls(root / f"kubernetes-{kubernetes_version()}", root / "distribution")

    def path(self, program: str) -> str:
        """Where PROGRAM is, or would be."""
        if program in KUBERNETES_PROGRAMS:
            return str(self.kubernetes / program)
        return str(distribution_path(self.distribution, program))

    @property
    def cni_folder(self) -> str:
        """The folder of the network plugins, which containerd calls by name."""
        return str(Path(self.path("bridge")).parent)

    def search_path(self) -> str:
        """A PATH on which containerd finds its shim and runc before any other."""
        ours = [str(Path(self.path(name)).parent) for name in ("containerd", "runc")]
        return os.pathsep.join([*ours, "/usr/sbin", "/usr/bin", "/sbin", "/bin"])

    def missing(self) -> list[str]:
        """The programs that `prepare` has still to provide."""
        names = (*KUBERNETES_PROGRAMS, *DISTRIBUTION_PROGRAMS)
        return [name for name in names if not os.access(self.path(name), os.X_OK)]

"""The programs that the rig builds from Go modules.

A folder of `modules/` pins a module and all that it needs, by go.mod and go.sum. To move to another
version, change it in go.mod and run `go mod tidy` there.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.rig.errors import RigError

MODULES = Path(__file__).parent / "modules"

KUBERNETES = "METAGPU_E2E_KUBERNETES"
"""Environment variable: the minor version of Kubernetes, one of `modules/kubernetes-*`."""
USUAL_KUBERNETES = "1.36"

KWOK_STAGES = ("node/fast/node-initialize", "pod/fast/pod-ready", "pod/fast/pod-delete")
"""What kwok does by itself: a Node becomes ready, its pods run until they are deleted."""


def cache_root() -> Path:
    """Return the folder outside the clone that keeps slow builds."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "metagpu" / "e2e"


@dataclass(frozen=True)
class GoPrograms:
    """Programs of one version, built from a Go module that a folder of `modules/` pins."""

    name: str
    module: str
    packages: tuple[str, ...]
    """Below the module. The last element of each is a program's name."""
    pins: str = ""
    """The folder with go.mod and go.sum, where it is not NAME."""
    stamps: tuple[str, ...] = ()
    """Variables that the linker sets, as `PACKAGE.NAME={version}`."""
    files: tuple[str, ...] = ()
    """Files and folders of the module that are copied beside the programs."""
    cgo: bool = False
    """Whether the programs load libraries of the host."""
    tags: tuple[str, ...] = ()
    """Go's build tags."""

    @property
    def source(self) -> Path:
        """Return the folder with go.mod and go.sum."""
        return MODULES / (self.pins or self.name)

    @property
    def version(self) -> str:
        """Return the version that go.mod pins, such as `1.36.3`."""
        text = (self.source / "go.mod").read_text()
        pinned = re.search(rf"^\s*(?:require )?{re.escape(self.module)} v(\S+)", text, re.MULTILINE)
        if pinned is None:
            raise ValueError(f"{self.source}/go.mod requires no {self.module}")
        return pinned.group(1)

    @property
    def folder(self) -> Path:
        """Return the folder of the built programs in the cache."""
        return cache_root() / f"{self.name}-{self.version}"

    @property
    def programs(self) -> dict[str, str]:
        """Return the package of each program."""
        return {package.rpartition("/")[2]: f"{self.module}/{package}" for package in self.packages}

    def missing(self) -> bool:
        """Return whether a program has still to be built."""
        built = all(os.access(self.folder / program, os.X_OK) for program in self.programs)
        return not (built and all((self.folder / Path(file).name).exists() for file in self.files))


def kubernetes() -> GoPrograms:
    """Return the programs of the Kubernetes that the environment asks for.

    Raises:
        RigError: the rig does not have it.
    """
    minor = os.environ.get(KUBERNETES) or USUAL_KUBERNETES
    if not (MODULES / f"kubernetes-{minor}").exists():
        known = sorted(folder.name.partition("-")[2] for folder in MODULES.glob("kubernetes-*"))
        raise RigError(f"there is no Kubernetes {minor} here, but {' and '.join(known)}")
    servers = ("kubelet", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubectl")
    version = "k8s.io/component-base/version"
    return GoPrograms(
        "kubernetes",
        "k8s.io/kubernetes",
        tuple(f"cmd/{program}" for program in servers),
        pins=f"kubernetes-{minor}",
        stamps=(
            f"{version}.gitVersion=v{{version}}",
            f"{version}.gitMajor={{major}}",
            f"{version}.gitMinor={{minor}}",
        ),
    )


def go_programs() -> tuple[GoPrograms, ...]:
    """Return everything that the rig builds, in its order.

    Raises:
        RigError: the rig does not have the Kubernetes that the environment asks for.
    """
    node = kubernetes()
    containerd = "github.com/containerd/containerd/v2"
    toolkit, helm = "github.com/NVIDIA/nvidia-container-toolkit", "helm.sh/helm/v3"
    return (
        node,
        GoPrograms(
            "containerd",
            containerd,
            ("cmd/containerd", "cmd/containerd-shim-runc-v2", "cmd/ctr"),
            stamps=(f"{containerd}/version.Version={{version}}",),
        ),
        GoPrograms(
            "sample-device-plugin",
            node.module,
            ("test/images/sample-device-plugin",),
            pins=node.pins,
        ),
        GoPrograms(
            "helm", helm, ("cmd/helm",), stamps=(f"{helm}/internal/version.version=v{{version}}",)
        ),
        GoPrograms(
            "nvidia-ctk",
            toolkit,
            ("cmd/nvidia-ctk", "cmd/nvidia-cdi-hook"),
            stamps=(f"{toolkit}/internal/info.version={{version}}",),
            cgo=True,
        ),
        GoPrograms(
            "nfd",
            "sigs.k8s.io/node-feature-discovery",
            ("cmd/nfd-master",),
            files=("deployment/base/nfd-crds/nfd-api-crds.yaml",),
        ),
        GoPrograms(
            "kwok",
            "sigs.k8s.io/kwok",
            ("cmd/kwok",),
            files=tuple(f"kustomize/stage/{stage}.yaml" for stage in KWOK_STAGES),
        ),
        GoPrograms("kueue", "sigs.k8s.io/kueue", ("cmd/kueue",), files=("charts",)),
        GoPrograms("krew", "sigs.k8s.io/krew", ("cmd/krew",)),
        GoPrograms("cosign", "github.com/sigstore/cosign/v3", ("cmd/cosign",)),
    )

"""Paths of a simulated cluster's files; command lines read them too."""

from pathlib import Path
from typing import Final

NODE_NAME: Final = "sim"
"""The name of the Node, unless the user names it."""


def cluster_folder(run_dir: Path) -> Path:
    """Return the folder of the cluster in the run folder of its daemon."""
    return run_dir / "cluster"


def kubelet_dir(run_dir: Path) -> Path:
    """Return the device-plugins folder of the simulated kubelet."""
    return cluster_folder(run_dir) / "device-plugins"


def pod_resources(run_dir: Path) -> Path:
    """Return the path of the simulated kubelet's PodResources socket."""
    return cluster_folder(run_dir) / "pod-resources.sock"


def cdi_dir(run_dir: Path) -> Path:
    """Return the folder of CDI specifications."""
    return cluster_folder(run_dir) / "cdi"


def host_root(run_dir: Path) -> Path:
    """Return the folder with the simulated host's device nodes, as plain files."""
    return cluster_folder(run_dir) / "host"


def containers_dir(run_dir: Path) -> Path:
    """Return the folder that shows the daemon containers and their processes."""
    return cluster_folder(run_dir) / "containers"


def objects_file(run_dir: Path) -> Path:
    """Return the path of the API server's objects, which outlive the daemon."""
    return cluster_folder(run_dir) / "objects.json"


def kubeconfig(run_dir: Path) -> Path:
    """Return the path of a kubeconfig for the simulated API server."""
    return cluster_folder(run_dir) / "kubeconfig"

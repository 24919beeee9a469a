"""Traces that metagpu may leave: files, mounts, cgroups, processes, fields of the Node."""

from collections.abc import Mapping
from pathlib import Path

from tests.e2e.rig.host_folders import CDI_DIR, POD_DIR
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import running_processes
from tests.e2e.rig.settings import KUBELET_HOME

_KUBELETS = {"kubelet.sock", "kubelet_internal_checkpoint", "DEPRECATION"}
_CGROUPS = Path("/sys/fs/cgroup")


def traces(node: Node, run_folder: Path) -> Mapping[str, object]:
    """Return all of it, for a daemon with this run folder."""
    document = node.kubectl.get("node", node.name)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    programs = [Path(process[0]).name for process in running_processes().values()]
    return {
        "run folder": _files(run_folder),
        "pod folder": _files(POD_DIR),
        "CDI files": [*_files(CDI_DIR), *_files(node.paths.cdi)],
        "sockets": set(_files(KUBELET_HOME / "device-plugins")) - _KUBELETS,
        "mounts": [mount for mount in mounts if mount.startswith(f"{run_folder}/")],
        "cgroups": [*_CGROUPS.glob("metagpu"), *_CGROUPS.glob("*/metagpu")],
        "MPS daemons": [program for program in programs if program.startswith("nvidia-cuda-mps")],
        "labels": document["metadata"]["labels"],
        "annotations": sorted(document["metadata"]["annotations"]),
        "taints": document["spec"].get("taints"),
        "conditions": {condition["type"] for condition in document["status"]["conditions"]},
    }


def _files(folder: Path) -> list[str]:
    """Return the paths of the files below a folder; those of a missing folder are none."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())

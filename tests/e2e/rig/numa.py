"""Several NUMA nodes for the kubelet alone, whatever the machine has.

The kubelet finds NUMA nodes in one folder of sysfs. A kubelet that is started through
`launcher` has a mount namespace of its own, in which another folder replaces that one.
All other processes, and the kernel, see the real machine: no memory is nearer to any CPU.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.settings import KUBELET_HOME

NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
LOCAL_DISTANCE, REMOTE_DISTANCE = "10", "20"
"""Distances, as firmware reports them."""

# The runtime has to see the mounts that the kubelet makes for pods: the kubelet's home is shared
# between both, and sysfs is not.
ENTER = f'mount --make-rprivate /sys && mount --bind "$0" {NODES} && exec "$@"'


def halves() -> list[list[int]]:
    """Return the usable CPUs in two halves, for two NUMA nodes.

    Raises:
        RigError: there is but one.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise RigError("two NUMA nodes need two CPUs; this machine has one")
    middle = len(cpus) // 2
    return [cpus[:middle], cpus[middle:]]


def write_nodes(folder: Path, nodes: Sequence[Sequence[int]]) -> None:
    """Fill FOLDER with NUMA nodes that have these CPUs, in the form of sysfs."""
    for number, cpus in enumerate(nodes):
        node = folder / f"node{number}"
        node.mkdir(parents=True)
        for cpu in cpus:
            (node / f"cpu{cpu}").symlink_to(CPUS / f"cpu{cpu}")
        (node / "meminfo").write_text((NODES / "node0" / "meminfo").read_text())
        distances = [
            LOCAL_DISTANCE if other == number else REMOTE_DISTANCE for other in range(len(nodes))
        ]
        (node / "distance").write_text(" ".join(distances))


def launcher(folder: Path) -> list[str]:
    """Return the command that starts a program with FOLDER's NUMA nodes, by exec."""
    return ["unshare", "--mount", "--propagation=unchanged", "sh", "-c", ENTER, str(folder)]


def share_home() -> None:
    """Share mounts below the kubelet's home among all mount namespaces."""
    home = str(KUBELET_HOME)
    subprocess.run(["mount", "--bind", home, home], check=True)
    subprocess.run(["mount", "--make-shared", home], check=True)

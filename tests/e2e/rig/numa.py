"""A machine of several NUMA nodes for the kubelet alone, whatever the machine has.

The kubelet knows NUMA nodes by what lies in one folder of sysfs. One that is started through
`launcher` has a mount namespace of its own, in which another folder stands in that one's place.
Everybody else, and the kernel too, has the machine as it is: no memory is nearer to any CPU.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.settings import KUBELET_HOME

NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
HERE, THERE = "10", "20"
"""Distances, as firmware tells them."""

# What pods mount is mounted by the kubelet and has to be seen by the runtime: the kubelet's home is
# shared between both, and sysfs is not.
ENTER = f'mount --make-rprivate /sys && mount --bind "$0" {NODES} && exec "$@"'


def halves() -> list[list[int]]:
    """The CPUs that may be used here, for two NUMA nodes.

    Raises:
        RigError: there is but one.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise RigError("two NUMA nodes need two CPUs; this machine has one")
    middle = len(cpus) // 2
    return [cpus[:middle], cpus[middle:]]


def write_nodes(folder: Path, nodes: Sequence[Sequence[int]]) -> None:
    """Fill FOLDER with NUMA nodes that have these CPUs, as sysfs tells of them."""
    for number, cpus in enumerate(nodes):
        node = folder / f"node{number}"
        node.mkdir(parents=True)
        for cpu in cpus:
            (node / f"cpu{cpu}").symlink_to(CPUS / f"cpu{cpu}")
        (node / "meminfo").write_text((NODES / "node0" / "meminfo").read_text())
        distances = [HERE if other == number else THERE for other in range(len(nodes))]
        (node / "distance").write_text(" ".join(distances))


def launcher(folder: Path) -> list[str]:
    """What starts a program that finds FOLDER's NUMA nodes; it becomes that program."""
    return ["unshare", "--mount", "--propagation=unchanged", "sh", "-c", ENTER, str(folder)]


def share_home() -> None:
    """Let mounts below the kubelet's home, made in any mount namespace, be seen in all."""
    home = str(KUBELET_HOME)
    subprocess.run(["mount", "--bind", home, home], check=True)
    subprocess.run(["mount", "--make-shared", home], check=True)

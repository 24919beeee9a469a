"""Traces of a node on its machine, and their removal.

The same code runs after an orderly stop and after a crashed run:
no function here needs a running program of the node.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.e2e.rig import host_folders
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.programs import end_processes, running_processes
from tests.e2e.rig.settings import KUBELET_HOME, LOOPBACK, NETWORK, SERVICE_SUBNET, NodePaths
from tests.e2e.rig.waiting import wait_for

SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
)
"""Settings that the kubelet and the network plugin change."""

KUBELETS = ("kubelet", "k3s", "k0s")

MARK = KUBELET_HOME / ".metagpu-e2e"
"""The file marks a kubelet's home as the rig's, to be used again and removed."""

CONTAINER_LOGS = Path("/var/log/containers")
NETWORK_RESULTS = Path("/var/lib/cni/results")
SHIM_SOCKETS = Path("/run/containerd")


Lock = socket.socket
"""The lock of a run with a node; to be closed."""


def lock() -> Lock:
    """Bind a name that the kernel frees when its process ends.

    Raises:
        RigError: another run holds the name.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind("\0metagpu-e2e")
    except OSError:
        held.close()
        raise RigError("another run of the rig has a node on this machine") from None
    return held


def require_free_port(port: int) -> None:
    """Raise unless a port of the loopback interface is free.

    Raises:
        RigError: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise RigError(f"port {port} of {LOOPBACK} is taken") from error


def refuse_foreign_kubelet() -> None:
    """Raise if the machine is a node already.

    Raises:
        RigError: there is a kubelet, or the state of one, that the rig did not start.
    """
    for pid, command in running_processes().items():
        if Path(command[0]).name in KUBELETS and _sees_our_files(pid):
            raise RigError(f"process {pid} is a kubelet ({command[0]}): the rig needs its place")
    if KUBELET_HOME.exists() and not MARK.exists() and any(KUBELET_HOME.iterdir()):
        raise RigError(
            f"{KUBELET_HOME} belongs to a kubelet that is not the rig's; "
            "if no cluster needs it, remove it and try again"
        )


def _sees_our_files(pid: int) -> bool:
    """Return whether a process has our mount namespace.

    The kubelet of a cluster in containers has its own.
    """
    try:
        return Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
    except FileNotFoundError:
        return False  # the process has just ended


def record_state(paths: NodePaths) -> None:
    """Write down the machine's settings before any change."""
    KUBELET_HOME.mkdir(parents=True, exist_ok=True)
    MARK.touch()
    values = {name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()}
    before = {"sysctls": values, "shim_sockets": SHIM_SOCKETS.exists()}
    (paths.home / "before.json").write_text(json.dumps(before))


def clean(paths: NodePaths) -> None:
    """Remove every trace of a node whose programs have ended.

    Raises:
        RigError: something is still mounted or running; nothing is removed under it.
    """
    end_containers(paths)
    host_folders.unmount()
    unmount_under(paths.home)
    if MARK.exists():
        unmount_under(KUBELET_HOME)
        shutil.rmtree(KUBELET_HOME)
    _remove_cgroups()
    # The addresses that `service_address` gave to the machine.
    subprocess.run(
        ["ip", "address", "flush", "dev", "lo", "to", SERVICE_SUBNET],
        check=False,
        capture_output=True,
    )
    if Path(f"/sys/class/net/{NETWORK}").exists():
        subprocess.run(["ip", "link", "delete", NETWORK], check=True)
    for result in NETWORK_RESULTS.glob("*"):
        if str(paths.home) in result.read_text():  # a network namespace of ours
            result.unlink()
    _remove_container_logs(paths)
    for folder in (NETWORK_RESULTS, NETWORK_RESULTS.parent, CONTAINER_LOGS):
        with contextlib.suppress(OSError):  # absent, or in use by other programs too
            folder.rmdir()
    _restore(paths)
    shutil.rmtree(paths.home, ignore_errors=True)


def end_containers(paths: NodePaths) -> None:
    """End every container of the node at once, as a power cut would.

    containerd itself must have ended, or containerd would start the containers again.
    A shim has our socket in its command line, and CRI-O's conmon folders of ours; all processes
    of its container descend from it. MPS daemons do not: they have a folder of ours in their
    environment.
    """

    def none_remain() -> bool:
        everyone = running_processes()
        shims = {
            pid: command
            for pid, command in everyone.items()
            if Path(command[0]).name.startswith(("containerd-shim", "conmon"))
            and any(part.startswith(str(paths.home)) for part in command[1:])
        }
        mps = {pid for pid in everyone if _is_mps_daemon(pid, paths.home)}
        ours = (_descendants(set(shims)) | mps) & set(everyone)
        end_processes({pid: everyone[pid] for pid in ours})
        return not shims and not mps

    wait_for("the containers to end", none_remain, within_s=30)


def _is_mps_daemon(pid: int, home: Path) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # the process has just ended
    folders = (home, host_folders.RUN_DIR)
    return any(
        b"CUDA_MPS_PIPE_DIRECTORY=" + os.fsencode(folder) in environment for folder in folders
    )


def _descendants(ancestors: set[int]) -> set[int]:
    parents = {pid: _parent(pid) for pid in running_processes()}
    found = set(ancestors)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the name before may contain any character


def unmount_under(folder: Path) -> None:
    """Unmount FOLDER and everything below it.

    Raises:
        RigError: something stays mounted: removing files there would reach beyond.
    """
    for mount in reversed(_mounts_under(folder)):
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
    if left := _mounts_under(folder):
        raise RigError(f"cannot unmount {', '.join(map(str, left))}")


def _mounts_under(folder: Path) -> list[Path]:
    """Return the mounts under FOLDER, in the order in which they were mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [Path(point) for point in points if Path(point).is_relative_to(folder)]


def _remove_cgroups() -> None:
    """Remove the empty cgroups of pods and of MPS daemons from every hierarchy."""
    roots = [
        line.split()[1]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[2] in ("cgroup", "cgroup2")
    ]
    for root in roots:
        for name in ("kubepods", "metagpu"):
            for folder, _, _ in os.walk(Path(root) / name, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


def _remove_container_logs(paths: NodePaths) -> None:
    for link in CONTAINER_LOGS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(paths.home):
            link.unlink()


def _restore(paths: NodePaths) -> None:
    try:
        before = json.loads((paths.home / "before.json").read_text())
    except (FileNotFoundError, ValueError):
        return  # the earlier run ended before it changed anything
    for name, value in before["sysctls"].items():
        if _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)
    if not before["shim_sockets"]:
        shutil.rmtree(SHIM_SOCKETS, ignore_errors=True)


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name

"""What a node leaves on its machine, and how the machine gets rid of it.

Used in the same way after an orderly stop and on what a crashed run left behind:
nothing here asks a program of the node for help.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.programs import end_processes, running_processes
from tests.e2e.rig.settings import KUBELET_HOME, LOOPBACK, NETWORK, Places
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
"""What the kubelet and the network plugin change."""

KUBELETS = ("kubelet", "k3s", "k0s")

MARK = KUBELET_HOME / ".metagpu-e2e"
"""Says that this kubelet's home is the rig's, to be used again and to be removed."""

CONTAINER_LOGS = Path("/var/log/containers")
NETWORK_RESULTS = Path("/var/lib/cni/results")
SHIM_SOCKETS = Path("/run/containerd")


Lock = socket.socket
"""What one run holds as long as it has a node; to be closed."""


def lock() -> Lock:
    """Hold a name that the kernel forgets with its holder, whatever becomes of that.

    Raises:
        RigError: another run has it.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind("\0metagpu-e2e")
    except OSError:
        held.close()
        raise RigError("another run of the rig has a node on this machine") from None
    return held


def refuse_taken(port: int) -> None:
    """Make sure that a port of the loopback interface is free.

    Raises:
        RigError: it is not.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise RigError(f"port {port} of {LOOPBACK} is taken") from error


def refuse_foreign_kubelet() -> None:
    """Leave a machine alone that is a node already.

    Raises:
        RigError: there is a kubelet, or the state of one, that the rig did not start.
    """
    for pid, command in running_processes().items():
        if Path(command[0]).name in KUBELETS and _sees_our_files(pid):
            raise RigError(f"process {pid} is a kubelet ({command[0]}): the rig needs its place")
    if KUBELET_HOME.exists() and not MARK.exists() and any(KUBELET_HOME.iterdir()):
        raise RigError(
            f"{KUBELET_HOME} belongs to a kubelet that is not the rig's; "
            "if nobody needs it, remove it and try again"
        )


def _sees_our_files(pid: int) -> bool:
    """Not so for the kubelet of a cluster in containers, which has a home of its own."""
    try:
        return Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
    except FileNotFoundError:
        return False  # it has just ended


def claim(places: Places) -> None:
    """Note what is to be put back, before anything is changed."""
    KUBELET_HOME.mkdir(parents=True, exist_ok=True)
    MARK.touch()
    values = {name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()}
    before = {"sysctls": values, "shim_sockets": SHIM_SOCKETS.exists()}
    (places.home / "before.json").write_text(json.dumps(before))


def clean(places: Places) -> None:
    """Remove every trace of a node whose programs have ended.

    Raises:
        RigError: something is still mounted or running; nothing is removed under it.
    """
    end_containers(places)
    unmount_under(places.home)
    if MARK.exists():
        unmount_under(KUBELET_HOME)
        shutil.rmtree(KUBELET_HOME)
    _remove_cgroups()
    if Path(f"/sys/class/net/{NETWORK}").exists():
        subprocess.run(["ip", "link", "delete", NETWORK], check=True)
    for result in NETWORK_RESULTS.glob("*"):
        if str(places.home) in result.read_text():  # a network namespace of ours
            result.unlink()
    _remove_container_logs(places)
    for folder in (NETWORK_RESULTS, NETWORK_RESULTS.parent, CONTAINER_LOGS):
        with contextlib.suppress(OSError):  # absent, or somebody else's too
            folder.rmdir()
    _put_back(places)
    shutil.rmtree(places.home, ignore_errors=True)


def end_containers(places: Places) -> None:
    """End every container of the node at once, as a power cut would.

    containerd itself must have ended, or it would start anew what its pods want.
    A shim knows containerd by the address of our socket, and all that runs in its
    container descends from it.
    """

    def none_remain() -> bool:
        everyone = running_processes()
        address = str(places.containerd_socket)
        shims = {
            pid: command
            for pid, command in everyone.items()
            if Path(command[0]).name.startswith("containerd-shim") and address in command
        }
        ours = _descendants(set(shims)) & set(everyone)
        end_processes({pid: everyone[pid] for pid in ours})
        return not shims

    wait_for("the containers to end", none_remain, within_s=30)


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
    return int(stat.rpartition(")")[2].split()[1])  # the name before it may hold anything


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
    """In the order in which they were mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [Path(point) for point in points if Path(point).is_relative_to(folder)]


def _remove_cgroups() -> None:
    """Remove the pods' cgroups from every hierarchy; the emptied ones only."""
    roots = [
        line.split()[1]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[2] in ("cgroup", "cgroup2")
    ]
    for root in roots:
        for folder, _, _ in os.walk(Path(root) / "kubepods", topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _remove_container_logs(places: Places) -> None:
    for link in CONTAINER_LOGS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(places.home):
            link.unlink()


def _put_back(places: Places) -> None:
    try:
        before = json.loads((places.home / "before.json").read_text())
    except (FileNotFoundError, ValueError):
        return  # that run ended before it changed anything
    for name, value in before["sysctls"].items():
        if _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)
    if not before["shim_sockets"]:
        shutil.rmtree(SHIM_SOCKETS, ignore_errors=True)


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name

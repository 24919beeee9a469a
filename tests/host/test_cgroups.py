"""Containers of processes, by the cgroups that each runtime and driver writes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.contracts.host import Container, ProcessIdentity
from metagpu.host.containers import DEFAULT_ROOT, find_container
from metagpu.host.processes import read_identity

ID: Final = "3f1c5a90" * 8
OTHER: Final = "7b" * 32
UID: Final = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
OTHER_UID: Final = "ffffffff-4e5f-6071-8293-a4b5c6d7e8f9"
STATIC: Final = "8b7d105ff5c0a2da17b5f50a7b1d2b10"
LOW: Final = UID.replace("-", "_")
SLICES: Final = "/kubepods.slice/kubepods-burstable.slice"
KIND: Final = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"

USER: Final = "/user.slice/user-4242.slice/user@4242.service"
"""The cgroup that systemd gives to a user: what is below it has the names that the user likes."""

V1_CGROUPFS: Final = f"""\
12:cpuset:/kubepods/burstable/pod{UID}/{ID}
4:memory:/kubepods/burstable/pod{UID}/{ID}
1:name=systemd:/kubepods/burstable/pod{UID}/{ID}
"""
V1_SYSTEMD: Final = f"""\
9:memory:{SLICES}/kubepods-burstable-pod{LOW}.slice/docker-{ID}.scope
1:name=systemd:{SLICES}/kubepods-burstable-pod{LOW}.slice/docker-{ID}.scope
0::/system.slice/docker.service
"""
HYBRID: Final = f"""\
10:misc:/
5:memory:/kubepods/pod{UID}/{ID}
0::/
"""

FIXTURES: Final = {
    "containerd, systemd, v2": (
        f"0::{SLICES}/kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope\n"
    ),
    "containerd, systemd, v2, guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope\n"
    ),
    "containerd, cgroupfs, v2": f"0::/kubepods/besteffort/pod{UID}/{ID}\n",
    "containerd, cgroupfs, v1": V1_CGROUPFS,
    "containerd, cgroupfs, v1 beside an empty v2": HYBRID,
    "containerd on cgroupfs below a kubelet on systemd": (
        "1:name=systemd:/system.slice/containerd.service/"
        f"kubepods-burstable-pod{LOW}.slice:cri-containerd:{ID}\n"
    ),
    "CRI-O, systemd, v2": f"0::{SLICES}/kubepods-burstable-pod{LOW}.slice/crio-{ID}.scope\n",
    "CRI-O, systemd, with crun's level below": (
        f"0::{SLICES}/kubepods-burstable-pod{LOW}.slice/crio-{ID}.scope/container\n"
    ),
    "CRI-O, cgroupfs, v1": f"4:memory:/kubepods/burstable/pod{UID}/crio-{ID}\n",
    "docker by cri-dockerd, systemd, v1": V1_SYSTEMD,
    "docker by cri-dockerd, systemd, v2": (
        f"0::{SLICES}/kubepods-burstable-pod{LOW}.slice/docker-{ID}.scope\n"
    ),
    "docker by cri-dockerd, cgroupfs": f"4:memory:/kubepods/burstable/pod{UID}/{ID}\n",
    "kind, v2, seen from the machine": (
        f"0::/system.slice/docker-{OTHER}.scope{KIND}/"
        f"kubelet-kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope\n"
    ),
    "kind, v2, seen from the node": (
        f"0::{KIND}/kubelet-kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope\n"
    ),
    "kind, v1": f"4:memory:/docker/{OTHER}/kubelet/kubepods/besteffort/pod{UID}/{ID}\n",
    "seen from a cgroup namespace": f"0::/../kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope\n",
    "of another class, seen from one": f"4:memory:/../../burstable/pod{UID}/{ID}\n",
    "seen from one outside of pods": f"0::/../..{SLICES}/kubepods-burstable-pod{LOW}.slice/{ID}\n",
    "systemd in the container": f"0::/kubepods/pod{UID}/{ID}/init.scope\n",
    "docker in the container": f"0::/kubepods/pod{UID}/{ID}/docker/{OTHER}\n",
    "a cluster in the container": f"0::/kubepods/pod{UID}/{ID}/kubepods/pod{OTHER_UID}/{OTHER}\n",
    "a process that has ended": f"0::/kubepods/pod{UID}/{ID} (deleted)\n",
}
NOBODYS: Final = {
    "a shell": "0::/user.slice/user-0.slice/session-2.scope\n",
    "a daemon": "0::/system.slice/nvidia-persistenced.service\n",
    "docker beside Kubernetes": f"0::/system.slice/docker-{ID}.scope\n",
    "the kubelet": "0::/kubelet.slice/kubelet.service\n",
    "CRI-O's monitor": f"0::/kubepods.slice/kubepods-pod{LOW}.slice/crio-conmon-{ID}.scope\n",
    "the pod's own level": f"0::/kubepods/pod{UID}\n",
    "an id cut short": f"0::/kubepods/pod{UID}/{ID[:-1]}\n",
    "no uid": f"0::/kubepods/podracer/{ID}\n",
    "the root": "0::/\n",
    "nothing": "",
    "no cgroups": "\n\n",
    "a user's own cgroup": f"0::{USER}/pod{UID}/{ID}\n",
    "a user's own kubepods": f"0::{USER}/kubepods/pod{UID}/{ID}\n",
    "a user's own slices": f"0::{USER}{SLICES}/kubepods-burstable-pod{LOW}.slice/crio-{ID}.scope\n",
    "a user's own node of kind": f"0::{USER}/docker/{OTHER}/kubepods/pod{UID}/{ID}\n",
    "a user's own runtime": f"0::{USER}/kubepods-pod{LOW}.slice:cri-containerd:{ID}\n",
    "a user's, with version 1": f"1:name=systemd:{USER}/pod{UID}/{ID}\n0::/\n",
    "a user's, from a cgroup namespace": f"0::/../../..{USER}/kubepods/pod{UID}/{ID}\n",
    "a service's own": f"0::/system.slice/web.service/kubepods/pod{UID}/{ID}\n",
    "a container's beside Kubernetes": f"0::/machine.slice/libpod-{OTHER}.scope/pod{UID}/{ID}\n",
    "a root of another name that is not visible": f"0::/gpus/kubepods/pod{UID}/{ID}\n",
}


@pytest.mark.parametrize("text", FIXTURES.values(), ids=FIXTURES)
def test_a_container_is_known_by_its_cgroup(text: str) -> None:
    """Version, driver, runtime and nesting change the path, and not the container found."""
    assert find_container(text) == Container(ID, UID)


def test_a_static_pod_has_a_hash_for_a_uid() -> None:
    """Pods from files are named by a hash without dashes."""
    text = f"0::/kubepods.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope"

    assert find_container(text) == Container(ID, STATIC)


@pytest.mark.parametrize("text", NOBODYS.values(), ids=NOBODYS)
def test_other_processes_are_in_no_container(text: str) -> None:
    """A path that is not exactly a container of a pod is no container."""
    assert find_container(text) is None


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    """Any text gives a whole container or none."""
    found = find_container(text)

    assert found is None or (len(found.id) == 64 and len(found.pod_uid) in {32, 36})


# --- real cgroups ---------------------------------------------------------------------------------

HIERARCHIES: Final = [
    folder
    for name in ("", "unified", "systemd")
    if ((folder := DEFAULT_ROOT / name) / "cgroup.procs").exists()
]
"""The hierarchies of this machine that have no controller, or may be without."""
MOVE: Final = """
import os, pathlib, sys
given, made, user = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(given / "cgroup.procs").write_text("0")
os.setgid(user)
os.setuid(user)
(given / made).mkdir(parents=True)
(given / made / "cgroup.procs").write_text("0")
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def moved(hierarchy: Path, given: str, made: str, user: int) -> Iterator[ProcessIdentity]:
    """Run a process of a user that gets a cgroup, as by systemd, and makes another below."""
    top = hierarchy / f"metagpu-test-{os.getpid()}"
    delegated = top / given
    delegated.mkdir(parents=True)
    for name in ("", "cgroup.procs", "cgroup.subtree_control", "tasks"):
        if (delegated / name).exists():
            os.chown(delegated / name, user, user)

    command = [sys.executable, "-c", MOVE, str(delegated), made, str(user)]
    try:
        with subprocess.Popen(  # noqa: S603 - our own Python
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            identity = read_identity(Path("/proc"), process.pid)
            assert identity is not None
            yield identity
    finally:
        for folder, _, _ in os.walk(top, topdown=False):
            Path(folder).rmdir()


@pytest.mark.skipif(os.geteuid() != 0 or not HIERARCHIES, reason="needs root and cgroups")
@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=lambda folder: folder.name)
@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("user@4242.service", f"pod{UID}/{ID}"),
        ("user@4242.service", f"kubepods/burstable/pod{UID}/{ID}"),
        ("user@4242.service", f"{SLICES[1:]}/kubepods-burstable-pod{LOW}.slice/crio-{ID}.scope"),
        ("gpus", f"kubepods/burstable/pod{UID}/{ID}"),
        ("gpus/kubepods", f"pod{UID}/{ID}"),
    ],
)
def test_a_user_of_the_host_is_in_nobodys_container(hierarchy: Path, given: str, made: str) -> None:
    """A user names cgroups like a pod's below the user's own, and is in no container."""
    with moved(hierarchy, given, made, user=4242) as identity:
        assert identity.container is None


@pytest.mark.parametrize("end", ["\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028"])
def test_a_name_with_the_end_of_a_line_is_one_name(tmp_path: Path, end: str) -> None:
    """A user's cgroup whose name has a further line, by some characters, is in no container."""
    forged = f"0::/kubepods/burstable/pod{UID}/{ID}"
    text = f"0::/user.slice/user-1000.slice/user@1000.service/x{end}{forged}\n"
    assert find_container(text, tmp_path) is None
    assert find_container(f"{forged}\n", tmp_path) is not None


@pytest.mark.skipif(os.geteuid() != 0 or not HIERARCHIES, reason="needs root and cgroups")
@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=lambda folder: folder.name)
def test_roots_cgroups_are_the_kubelets_below_any_root(hierarchy: Path) -> None:
    """Below a `cgroupRoot` of any name, a container is known where the folders are root's."""
    with moved(hierarchy, "gpus", f"kubepods/burstable/pod{UID}/{ID}", user=0) as identity:
        assert identity.container == Container(ID, UID)

"""Whose process it is, by the words in which each runtime and driver writes its cgroups."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.host import Container
from metagpu.host.cgroups import container_in

ID: Final = "3f1c5a90" * 8
OTHER: Final = "7b" * 32
UID: Final = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
OTHER_UID: Final = "ffffffff-4e5f-6071-8293-a4b5c6d7e8f9"
STATIC: Final = "8b7d105ff5c0a2da17b5f50a7b1d2b10"
LOW: Final = UID.replace("-", "_")
SLICES: Final = "/kubepods.slice/kubepods-burstable.slice"
KIND: Final = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"

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
    "a cgroup root of the kubelet's": f"0::/gpus/kubepods/burstable/pod{UID}/{ID}\n",
    "seen from a cgroup namespace": f"0::/../kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope\n",
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
}


@pytest.mark.parametrize("text", FIXTURES.values(), ids=FIXTURES)
def test_a_container_is_known_by_its_cgroup(text: str) -> None:
    """Version, driver, runtime and nesting change the words, and not who it is."""
    assert container_in(text) == Container(ID, UID)


def test_a_static_pod_has_a_hash_for_a_uid() -> None:
    """Pods from files are named by a hash without dashes."""
    text = f"0::/kubepods.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope"

    assert container_in(text) == Container(ID, STATIC)


@pytest.mark.parametrize("text", NOBODYS.values(), ids=NOBODYS)
def test_other_processes_are_in_no_container(text: str) -> None:
    """What is not exactly a container of a pod is none: nobody is guessed."""
    assert container_in(text) is None


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    """Whatever stands there, the answer is a container in full or none."""
    found = container_in(text)

    assert found is None or (len(found.id) == 64 and len(found.pod_uid) in {32, 36})

"""Cgroups of containers, on nodes of every kind."""

from pathlib import Path

import pytest

from metagpu.core.contracts.host import Container, ContainerCgroup
from metagpu.core.model.shares import Holder
from metagpu.host.containers import find_container_cgroups
from metagpu.sim.machine.containers import SimHost, container_of

UID = "0123abcd-0123-0123-0123-0123456789ab"
LOW = UID.replace("-", "_")
ID = "ab" * 32
IT = Container(ID, UID)
QOS = "kubepods-besteffort"
KUBELET = "kubelet.slice/kubelet-kubepods.slice"
KIND = f"{KUBELET}/kubelet-kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope"
ALICE = Holder("team", "alice", "main")


def root_with(tmp_path: Path, *folders: str) -> Path:
    """Create a tree of cgroups."""
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "folder",
    [
        f"kubepods/burstable/pod{UID}/{ID}",
        f"kubepods/pod{UID}/crio-{ID}",
        f"kubepods.slice/{QOS}.slice/{QOS}-pod{LOW}.slice/cri-containerd-{ID}.scope",
        KIND,
        f"system.slice/containerd.service/kubepods-pod{LOW}.slice:cri-containerd:{ID}",
        f"docker/{'cd' * 32}/kubelet/kubepods/pod{UID}/{ID}",
        f"system.slice/docker-{'cd' * 32}.scope/{KIND}",
        f"site/gpu.pods/kubepods/pod{UID}/{ID}",
        f"site.slice/site-gpu.slice/site-gpu-kubepods.slice/site-gpu-kubepods-pod{LOW}.slice/{ID}",
    ],
)
def test_a_container_is_found_wherever_its_node_has_it(tmp_path: Path, folder: str) -> None:
    """Containers are found in all forms of names, of both drivers, and on nested nodes."""
    root = root_with(tmp_path, folder, f"{folder}/init.scope", "user.slice/user-0.slice")
    assert find_container_cgroups(root, [IT]) == {IT: root / folder}


def test_other_containers_are_not_found(tmp_path: Path) -> None:
    """A container of the same pod, or the same id in another pod's cgroup, is not found."""
    other = UID.replace("a", "b")
    root = root_with(tmp_path, f"kubepods/pod{UID}/{'ef' * 32}", f"kubepods/pod{other}/{ID}")
    assert find_container_cgroups(root, [IT]) == {}


async def test_version_1_has_no_cgroups(tmp_path: Path) -> None:
    """With cgroup version 1 no cgroup is found, as GPU memory is not counted there."""
    machine = SimHost(tmp_path)
    machine.start(ALICE)
    assert len(await machine.host.cgroups({ALICE})) == 1
    (machine.cgroups / "cgroup.controllers").unlink()
    assert await machine.host.cgroups({ALICE}) == ()


async def test_cgroups_are_found_by_the_kubelets_names(tmp_path: Path) -> None:
    """A name finds its running containers: after a restart the present one, of two pods both."""
    machine = SimHost(tmp_path)
    first = machine.start(ALICE)
    second = machine.start(ALICE, life=1)
    machine.start(Holder("team", "bob", "main"))
    machine.name(ALICE, container_of(ALICE, 2))  # it has ended: a link without a cgroup

    found_cgroups = await machine.host.cgroups({ALICE})
    assert {found_cgroup.cgroup: found_cgroup for found_cgroup in found_cgroups} == {
        str(first): ContainerCgroup(container_of(ALICE), ALICE, str(first)),
        str(second): ContainerCgroup(container_of(ALICE, 1), ALICE, str(second)),
    }


async def test_without_the_kubelets_links_no_cgroup_is_found(tmp_path: Path) -> None:
    """Names that cannot be read find no cgroup."""
    machine = SimHost(tmp_path)
    machine.start(ALICE)
    for link in machine.logs.iterdir():
        link.unlink()
    machine.logs.rmdir()
    assert await machine.host.cgroups({ALICE}) == ()

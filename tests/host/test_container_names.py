"""Names of containers, from the kubelet's links to the logs."""

from pathlib import Path

import pytest

from metagpu.core.contracts.host import Container
from metagpu.core.model.shares import Holder
from metagpu.host.containers import read_holders
from metagpu.sim.machine.containers import SimHost, container_of

ALICE = Holder("team", "alice-0", "main")


def test_a_link_names_pod_and_container(tmp_path: Path) -> None:
    """Namespace, pod and container come from the target of the container id's link."""
    rig = SimHost(tmp_path)
    bob = Holder("team", "bob", "main-2")
    rig.name(ALICE, container_of(ALICE))
    rig.name(bob, container_of(bob))

    wanted = [container_of(ALICE), container_of(bob)]
    assert read_holders(rig.logs, wanted) == {container_of(ALICE): ALICE, container_of(bob): bob}


def test_names_that_the_kubelet_cuts_are_found(tmp_path: Path) -> None:
    """A link's name ends at 255 characters, within the id; its target has the rest."""
    rig = SimHost(tmp_path)
    long = Holder("n" * 60, "p" * 80, "c" * 60)
    rig.name(long, container_of(long))
    rig.name(ALICE, container_of(ALICE))

    assert read_holders(rig.logs, [container_of(long)]) == {container_of(long): long}


def test_containers_with_one_link_have_the_name_of_their_pod(tmp_path: Path) -> None:
    """Two names that are cut to one link name no container: the folder of the logs has the pod."""
    rig = SimHost(tmp_path)
    first, second = (Holder("n" * 60, "p" * 140, "c" * 62 + end) for end in "ab")
    for holder in (first, second):
        rig.name(holder, container_of(holder))
    assert len(list(rig.logs.iterdir())) == 1

    pod = Holder("n" * 60, "p" * 140, "")
    wanted = [container_of(first), container_of(second)]
    assert read_holders(rig.logs, wanted) == dict.fromkeys(wanted, pod)


@pytest.mark.parametrize("digits", [0, 1, 11])
def test_a_link_with_few_digits_of_the_id_is_not_certain(tmp_path: Path, digits: int) -> None:
    """A link with less than twelve digits of an id may be another container's."""
    rig = SimHost(tmp_path)
    holder = Holder("n" * 60, "p" * 140, "c" * (251 - 203 - digits))
    rig.name(holder, container_of(holder))

    assert read_holders(rig.logs, [container_of(holder)]) == {
        container_of(holder): Holder(holder.namespace, holder.pod, "")
    }


@pytest.mark.parametrize(
    "target",
    [
        "/var/log/pods/team_alice-0_00000000-0000-0000-0000-000000000000/main/0.log",
        f"/var/log/pods/team_alice-0_{container_of(ALICE).pod_uid}/other/0.log",
        f"/var/log/pods/team_bob_{container_of(ALICE).pod_uid}/main/0.log",
        "/var/log/pods/team_alice-0/main/0.log",
        "0.log",
    ],
)
def test_a_link_that_contradicts_itself_gives_no_name(tmp_path: Path, target: str) -> None:
    """The pod's uid by the cgroup, the link's name and its target must all agree."""
    container = container_of(ALICE)
    (tmp_path / f"alice-0_team_main-{container.id}.log").symlink_to(target)

    assert read_holders(tmp_path, [container]) == {}


def test_a_file_that_is_no_link_gives_no_name(tmp_path: Path) -> None:
    """Files of other kinds in the folder give no names."""
    container = container_of(ALICE)
    (tmp_path / f"alice-0_team_main-{container.id}.log").write_text("")
    (tmp_path / "README").write_text("")

    assert read_holders(tmp_path, [container, Container("0" * 64, "u")]) == {}

"""What the kubelet calls a container, by its links to the logs."""

from pathlib import Path

import pytest

from metagpu.core.host import Container
from metagpu.core.model import Holder
from metagpu.host.logs import read_holders
from metagpu.sim.host import SimHost, container_of

ALICE = Holder("team", "alice-0", "main")


def test_a_link_names_pod_and_container(tmp_path: Path) -> None:
    """Namespace, pod and container are read from where the link of the container's id leads."""
    rig = SimHost(tmp_path)
    bob = Holder("team", "bob", "main-2")
    rig.name(ALICE, container_of(ALICE))
    rig.name(bob, container_of(bob))

    wanted = [container_of(ALICE), container_of(bob)]
    assert read_holders(rig.logs, wanted) == {container_of(ALICE): ALICE, container_of(bob): bob}


def test_names_that_the_kubelet_cuts_are_found(tmp_path: Path) -> None:
    """A link's name ends at 255 characters, within the id; its target says the rest."""
    rig = SimHost(tmp_path)
    long = Holder("n" * 60, "p" * 80, "c" * 60)
    rig.name(long, container_of(long))
    rig.name(ALICE, container_of(ALICE))

    assert read_holders(rig.logs, [container_of(long)]) == {container_of(long): long}


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
def test_a_link_that_contradicts_itself_names_nobody(tmp_path: Path, target: str) -> None:
    """The pod's uid by the cgroup, the link's name and its target must all agree."""
    container = container_of(ALICE)
    (tmp_path / f"alice-0_team_main-{container.id}.log").symlink_to(target)

    assert read_holders(tmp_path, [container]) == {}


def test_what_is_no_link_names_nobody(tmp_path: Path) -> None:
    """Files of other kinds in the folder are nobody's names."""
    container = container_of(ALICE)
    (tmp_path / f"alice-0_team_main-{container.id}.log").write_text("")
    (tmp_path / "README").write_text("")

    assert read_holders(tmp_path, [container, Container("0" * 64, "u")]) == {}

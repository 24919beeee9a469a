"""Names of containers, from the kubelet's links to the logs."""

from pathlib import Path

import pytest

from metagpu.core.contracts.host import Container, StartingContainer
from metagpu.core.model.shares import Holder
from metagpu.host.containers import read_holders, read_starting_holder
from metagpu.host.linux import LinuxHost
from metagpu.sim.machine.containers import SimHost, container_of
from tests.rigs.cgroups import real_cgroup
from tests.rigs.host import running

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


CONTAINERD = (
    *("io.kubernetes.cri.sandbox-uid", "io.kubernetes.cri.sandbox-namespace"),
    *("io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name"),
)
CRIO = (
    *("io.kubernetes.pod.uid", "io.kubernetes.pod.namespace", "io.kubernetes.pod.name"),
    "io.kubernetes.container.name",
)


def annotated(runtime: tuple[str, ...], uid: str, holder: Holder) -> dict[str, str]:
    """Return the annotations with which a runtime names a container."""
    return dict(zip(runtime, (uid, holder.namespace, holder.pod, holder.container), strict=True))


@pytest.mark.parametrize("runtime", [CONTAINERD, CRIO])
async def test_a_starting_container_has_its_name_by_its_runtime(
    tmp_path: Path, runtime: tuple[str, ...]
) -> None:
    """A container without a link has the name of its runtime's annotations, in a real cgroup."""
    container = Container("5" * 64, "5f2e1a3c-0000-4000-8000-00000000beef")
    logs = tmp_path / "containers"
    logs.mkdir()
    (tmp_path / "pods" / f"team_alice-0_{container.pod_uid}" / "main").mkdir(parents=True)
    host = LinuxHost(logs=logs, own_pids=True)

    with real_cgroup(container) as cgroup:
        async with running() as first:
            (cgroup / "cgroup.procs").write_text(str(first.pid))
            assert await host.holders([container]) == {container: Holder("team", "alice-0", "")}
            starts = StartingContainer(
                container.id, first.pid, annotated(runtime, container.pod_uid, ALICE)
            )
            found = await host.starting(starts)
            assert (found.container, found.holder) == (container, ALICE)
            assert await host.holders([container]) == {container: ALICE}


BOB = Holder("other", "bob", "main")


@pytest.mark.parametrize(("own", "others"), [(CONTAINERD, CRIO), (CRIO, CONTAINERD)])
def test_the_annotations_of_a_pod_name_no_other_pods_container(
    tmp_path: Path, own: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """A pod that adds another runtime's annotations gets its own name at most."""
    rig, container, bobs = SimHost(tmp_path), container_of(ALICE), container_of(BOB)
    (rig.pods / f"team_alice-0_{container.pod_uid}" / "main").mkdir(parents=True)
    (rig.pods / f"other_bob_{bobs.pod_uid}" / "main").mkdir(parents=True)
    true, pod = annotated(own, container.pod_uid, ALICE), Holder("team", "alice-0", "")

    def named(annotations: dict[str, str]) -> Holder | None:
        return read_starting_holder(rig.logs, container, annotations)

    assert named(true) == ALICE
    assert named(true | annotated(others, container.pod_uid, ALICE)) == ALICE
    assert named(true | annotated(others, container.pod_uid, BOB)) == pod
    assert named(true | annotated(others, bobs.pod_uid, BOB)) == ALICE
    assert named(annotated(others, bobs.pod_uid, BOB)) == pod


@pytest.mark.parametrize("runtime", [CONTAINERD, CRIO])
def test_a_runtime_names_containers_whose_logs_are_elsewhere(
    tmp_path: Path, runtime: tuple[str, ...]
) -> None:
    """A kubelet with another `podLogsDir` has no folder here; a runtime without names has none."""
    rig, own = SimHost(tmp_path), container_of(ALICE)
    assert read_starting_holder(rig.logs, own, annotated(runtime, own.pod_uid, ALICE)) == ALICE
    assert read_starting_holder(rig.logs, own, {}) is None

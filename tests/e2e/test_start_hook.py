"""The hook of the CDI specification: what the daemon does before a container's first process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metagpu.core.grants.cdi import FILE_NAME
from tests.e2e.cluster import CONFIGURATION, GPUS, MODEL, NAMESPACE, Cluster, container, pod
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.waiting import wait_for

STRICT: Final = (
    CONFIGURATION.replace(
        "    gpus: all\n", "    gpus: all\n    memoryEnforcement: {policy: kill}\n"
    )
    + "deviceListStrategy: cdi-cri\nstartHook: fail\n"
)
NODE_FILE: Final = f'driver: "615.71.09"\ngpus: [{{model: {MODEL}, count: {GPUS}}}]\n'
EACH: Final = 20
"""Containers of one pod."""
AS_VERSION_2: Final = """
mount -t tmpfs tmpfs "$0"
mkdir "$0/kubepods"
touch "$0/cgroup.controllers"
mount --bind /sys/fs/cgroup/memory/kubepods "$0/kubepods"
mount --rbind "$0" /sys/fs/cgroup
exec "$@"
"""
"""Shows a daemon the cgroups of a machine with version 1 as those of version 2: their paths are
the same, and the simulated driver counts by these."""
SOON_S: Final = 60.0


@pytest.fixture
def strict(cluster: Cluster, daemon: HostDaemon, tmp_path: Path) -> Iterator[Cluster]:
    """Configure limits that no container may start without; restore the node afterwards."""
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        daemon.launcher += ["unshare", "--mount", "sh", "-ec", AS_VERSION_2, str(tmp_path)]
    daemon.configure(STRICT)
    cluster.repair(*daemon.simulate(NODE_FILE))
    yield cluster
    daemon.launcher.clear()
    cluster.clear()
    daemon.stop()
    # It stays for containers that start again; its hook would fail those of the next test.
    (cluster.node.paths.cdi / FILE_NAME).unlink(missing_ok=True)
    daemon.configure()


def starts(cluster: Cluster) -> dict[str, int]:
    """Return the containers that started, each with the number of its limits at the last start."""
    lines = (line for line in cluster.daemon.log.splitlines() if "container starting" in line)
    return {record["container"]: record["driver_limits"] for record in map(json.loads, lines)}


def ended(cluster: Cluster) -> set[str]:
    """Return the containers whose command has run to its end."""
    return {
        f"{NAMESPACE}/{document['metadata']['name']} ({status['name']})"
        for document in cluster.kubectl.list("pods", NAMESPACE)
        for status in document["status"].get("containerStatuses", ())
        if status["state"].get("terminated", {}).get("exitCode") == 0
    }


def await_ended(cluster: Cluster, wanted: set[str]) -> None:
    """Wait until these containers have run their commands."""
    wait_for("the commands to end", lambda: ended(cluster) >= wanted, within_s=120)


@pytest.mark.parametrize(
    "pods", [3, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_no_container_reaches_its_command_without_its_limit(strict: Cluster, pods: int) -> None:
    """Of many containers, each has its name and its limit before its command runs."""
    names = [f"c{number}" for number in range(EACH)]
    wanted = set[str]()
    for number in range(0, pods, 5):
        batch = [f"p{index}" for index in range(number, min(number + 5, pods))]
        wanted |= {f"{NAMESPACE}/{name} ({each})" for name in batch for each in names}
        strict.kubectl.apply(
            *(
                pod(name, *(container(each, 1, ["true"]) for each in names), restartPolicy="Never")
                for name in batch
            )
        )
        await_ended(strict, wanted)
    assert {name: limits for name, limits in starts(strict).items() if name in wanted} == (
        dict.fromkeys(wanted, 1)
    )


@pytest.mark.long
@pytest.mark.usefixtures("each_runtime")
def test_a_container_waits_for_a_daemon_where_its_limit_is_required(strict: Cluster) -> None:
    """With `startHook: fail` a container that restarts waits for a daemon, and for its limit."""
    strict.run("patient", 10)
    before = strict.incarnations()
    strict.daemon.kill()
    strict.crash("patient")

    def refused() -> bool:
        events = strict.kubectl.list("events", NAMESPACE)
        found = [event["message"] for event in events if "metagpu-hook" in event["message"]]
        if not found:
            raise RigError(f"the Events are {[event['message'] for event in events]}")
        return True

    wait_for("the runtime to report the hook", refused, within_s=SOON_S)
    assert strict.incarnations().get("patient") in (None, before["patient"])
    with strict.wait_for_new_list():
        strict.daemon.start_again()
    wait_for(
        "the container to start",
        lambda: strict.incarnations().get("patient", before["patient"]) != before["patient"],
        within_s=2 * SOON_S,
    )
    assert starts(strict)[f"{NAMESPACE}/patient (main)"] == 1

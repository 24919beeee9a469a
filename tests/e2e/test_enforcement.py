"""Enforcement against a pod that uses more memory of a GPU than its share."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import (
    CONFIGURATION,
    NAMESPACE,
    Cluster,
    Incarnation,
    container,
    pod,
)
from tests.e2e.joined import Joined
from tests.e2e.rig.machine import CONTAINER_LOGS
from tests.e2e.rig.programs import first_process, running_processes
from tests.e2e.rig.waiting import wait_for

ENFORCED = CONFIGURATION.replace(
    "    gpus: all\n", "    gpus: all\n    memoryEnforcement: {policy: kill}\n"
)
SHARES = 25
PATIENT = ENFORCED.replace("policy: kill", "policy: kill, grace: 5s")
WITHIN_MIB, ABOVE_MIB = 9_000, 20_000
"""Less than 25 shares of 40960 MiB, and about twice as much."""
SOME_MIB = 6_144
"""15 of 100 shares: within 25 shares alone, above them with a second process of this size."""
SOON_S = 60.0
FOLDER_NAME, UID = 255, 36
"""Letters of the longest name of a file, and of a pod's uid: the kubelet joins both in one name."""


@pytest.fixture
def strict(member: Joined) -> Iterator[Cluster]:
    """Configure the node to kill processes above their limit; restore it afterwards."""
    member.daemon.configure(ENFORCED)
    yield member.cluster
    member.daemon.configure()


def await_named(cluster: Cluster, wanted: Mapping[str, set[int]]) -> None:
    """Wait until mgctl lists exactly these processes, pod -> pids."""

    def named() -> bool:
        return wanted == {
            container["pod"]: {process["pid"] for process in part["processes"]}
            for container in cluster.daemon.processes()["containers"]
            for part in container["gpus"]
        }

    wait_for("mgctl to name the pods' processes", named, within_s=SOON_S)


def await_restarted(cluster: Cluster, name: str, before: Incarnation) -> None:
    """Wait until a pod's container was ended and started again."""
    wait_for(
        f"the container of {name} to be started again",
        lambda: cluster.incarnations().get(name, before) != before,
        within_s=SOON_S,
    )


def await_event(cluster: Cluster, name: str, reason: str, *words: str) -> None:
    """Wait until an Event of the pod has all these words."""
    wait_for(
        f"an Event {reason} of {name} with {words}",
        lambda: all(word in cluster.event_messages(name, reason) for word in words),
        within_s=SOON_S,
    )


def test_a_pod_above_its_share_is_ended_and_its_neighbour_stays(strict: Cluster) -> None:
    """The pod is warned, its process ends, its Events have the reason, other pods run on."""
    greedy, neighbour = strict.run("greedy", SHARES), strict.run("neighbour", SHARES)
    before = strict.incarnations()
    (gpu,) = greedy.gpu_indices
    assert neighbour.gpu_indices == (gpu,)
    pids = {name: strict.first_process(name) for name in before}
    for pid in pids.values():
        strict.daemon.use(gpu, pid, WITHIN_MIB)
    await_named(strict, {name: {pid} for name, pid in pids.items()})
    assert strict.incarnations() == before

    strict.daemon.use(gpu, pids["greedy"], ABOVE_MIB)
    await_restarted(strict, "greedy", before["greedy"])
    await_event(strict, "greedy", "GPUMemoryExceeded", f"{ABOVE_MIB} MiB")
    await_event(strict, "greedy", "GPUProcessSignaled", str(pids["greedy"]))
    assert strict.incarnations()["neighbour"] == before["neighbour"]
    assert not strict.event_messages("neighbour", "GPUMemoryExceeded")

    for pid in pids.values():
        strict.daemon.free(gpu, pid)


def test_the_memory_of_two_processes_is_added_up(strict: Cluster) -> None:
    """Two processes below the container's share are ended when their sum is above it."""
    (gpu,) = strict.run("pair", SHARES).gpu_indices
    before = strict.incarnations()
    first = strict.first_process("pair")
    (second,) = map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())
    strict.daemon.use(gpu, first, SOME_MIB)
    await_named(strict, {"pair": {first}})
    assert strict.incarnations() == before

    strict.daemon.use(gpu, second, SOME_MIB)
    await_restarted(strict, "pair", before["pair"])
    await_event(strict, "pair", "GPUMemoryExceeded", f"{2 * SOME_MIB} MiB")

    for pid in (first, second):
        strict.daemon.free(gpu, pid)


def test_names_that_are_cut_spare_no_process_and_hit_no_neighbour(strict: Cluster) -> None:
    """The links to the logs of two containers are one link: their pod is judged as one.

    The kubelet cuts the name of a link at 251 letters, of which the pod's name takes most, and
    makes no second link of the same name.
    """
    name = "g" * (FOLDER_NAME - len(f"{NAMESPACE}__") - UID)
    first, second = (container("c" * 60 + end, n) for end, n in (("one", SHARES), ("two", 0)))
    second["resources"] = {}
    strict.start(pod(name, first, second))
    (gpu,) = strict.inspect_container(name, first["name"]).gpu_indices
    assert strict.run("neighbour", SHARES).gpu_indices == (gpu,)
    beside, before = strict.first_process("neighbour"), strict.incarnations()["neighbour"]
    assert len(list(CONTAINER_LOGS.glob(f"{name}_*"))) == 1

    strict.daemon.use(gpu, beside, WITHIN_MIB)
    for holder in (first, second):
        pid = process_of(strict, name, holder["name"])
        strict.daemon.use(gpu, pid, ABOVE_MIB)
        await_ended(pid)
        strict.daemon.free(gpu, pid)
    await_event(strict, name, "GPUProcessSignaled", first["name"])
    assert strict.incarnations()["neighbour"] == before
    strict.daemon.free(gpu, beside)


def await_ended(pid: int) -> None:
    """Wait until a process of this machine has ended."""
    wait_for("the process to end", lambda: pid not in running_processes(), within_s=SOON_S)


def process_of(cluster: Cluster, name: str, container_name: str) -> int:
    """Return the machine's pid of process 1 of a pod's container."""
    [status] = [
        container_status
        for container_status in cluster.kubectl.get("pod", name, NAMESPACE)["status"][
            "containerStatuses"
        ]
        if container_status["name"] == container_name
    ]
    return first_process(status["containerID"].partition("://")[2])


def test_a_process_that_ends_before_its_signal_harms_no_other(strict: Cluster) -> None:
    """After its early end no process is signalled, not even another one of its container."""
    strict.daemon.configure(PATIENT)
    (gpu,) = strict.run("greedy", SHARES).gpu_indices
    strict.run("neighbour", SHARES)
    before, earlier = strict.incarnations(), enforcement(strict)
    command = ["sleep", "123456789"]
    strict.execute("greedy", "sh", "-c", f"{' '.join(command)} >/dev/null 2>&1 &")
    (pid,) = (number for number, arguments in running_processes().items() if arguments == command)

    strict.daemon.use(gpu, pid, ABOVE_MIB)
    wait_for(
        "the pod to be warned",
        lambda: enforcement(strict)["warnings"] > earlier["warnings"],
        within_s=SOON_S,
        pause_s=0.02,
    )
    os.kill(pid, signal.SIGKILL)
    wait_for(
        "no container above its limit",
        lambda: not enforcement(strict)["overLimit"],
        within_s=SOON_S,
    )
    assert enforcement(strict)["signals"] == earlier["signals"]
    assert strict.incarnations() == before
    strict.daemon.free(gpu, pid)


def enforcement(cluster: Cluster) -> Mapping[str, Any]:
    """Return the daemon's enforcement counters and the containers above their limits."""
    report: Mapping[str, Any] = cluster.daemon.request("status")["enforcement"]
    return report

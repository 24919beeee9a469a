"""Enforcement against pods that use more memory of a GPU than their shares, in any way.

docs/security.md has a table of the attempts. The memory is simulated, all else is real: processes,
their users and cgroups, the container runtime, checks and signals.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from metagpu.host.daemon_launcher import hierarchies
from tests.e2e.cluster import (
    CONFIGURATION,
    NAMESPACE,
    Cluster,
    Incarnation,
    container,
    idle_pod,
    pod,
)
from tests.e2e.joined import Joined
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.machine import CONTAINER_LOGS
from tests.e2e.rig.programs import first_process, running_processes
from tests.e2e.rig.waiting import took, wait_for

ENFORCED = CONFIGURATION.replace(
    "    gpus: all\n", "    gpus: all\n    memoryEnforcement: {policy: kill}\n"
)
SHARES = 25
LENDING = ENFORCED.replace("policy: kill", "policy: kill, burst: {reserve: 4Gi}")
PATIENT = ENFORCED.replace("policy: kill", "policy: kill, grace: 5s")
WITHIN_MIB, ABOVE_MIB = 9_000, 20_000
"""Less than 25 shares of 40960 MiB, and about twice as much."""
SOME_MIB = 6_144
"""15 of 100 shares: within 25 shares alone, above them with a second process of this size."""
WITHIN_LIMIT_MIB = 10_597
SOON_S = 60.0
FOLDER_NAME, UID = 255, 36
"""Letters of the longest name of a file, and of a pod's uid: the kubelet joins both in one name."""
SIGTERM_S: Final = 1.5
"""A check finds the excess after 1.0 s at most, and the grace is 0.5 s."""
SIGKILL_S: Final = 2.0
FORGED: Final = ("NVIDIA_VISIBLE_DEVICES=all", "METAGPU_SHARES=100", "LD_PRELOAD=")
STUBBORN: Final = "trap '' TERM; exec sleep {}"
ATTEMPTS: Final[Mapping[str, tuple[str, str]]] = {
    "root, by exec": ("greedy", "exec sleep {}"),
    "without variables": ("greedy", "exec env -i sleep {}"),
    "with forged variables": ("greedy", f"exec env {' '.join(FORGED)} sleep {{}}"),
    "deaf to SIGTERM": ("greedy", STUBBORN),
    "in a cgroup of its own": ("greedy", "exec sleep {}"),
    "in a session of its own": ("greedy", "exec setsid sleep {}"),
    "another user": ("other-user", "exec sleep {}"),
}
"""The pod of each attempt, and what its shell runs; the number tells its process from others."""


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


@pytest.mark.usefixtures("each_runtime")
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


def test_a_borrower_gives_back_what_its_neighbour_needs(strict: Cluster) -> None:
    """A pod borrows above its limit until its neighbour, within its own, takes of the reserve."""
    strict.daemon.configure(LENDING)
    borrower, neighbour = strict.run("borrower", SHARES), strict.run("neighbour", 2 * SHARES)
    before = strict.incarnations()
    (gpu,) = borrower.gpu_indices
    assert neighbour.gpu_indices == (gpu,)
    pids = {name: strict.first_process(name) for name in before}
    strict.daemon.use(gpu, pids["borrower"], 30_000)
    strict.daemon.use(gpu, pids["neighbour"], SOME_MIB)
    await_named(strict, {name: {pid} for name, pid in pids.items()})
    assert strict.incarnations() == before

    strict.daemon.use(gpu, pids["neighbour"], WITHIN_MIB)
    await_restarted(strict, "borrower", before["borrower"])
    await_event(strict, "borrower", "GPUMemoryNeeded", "30000 MiB")
    await_event(strict, "borrower", "GPUProcessSignaled", str(pids["borrower"]))
    assert strict.incarnations()["neighbour"] == before["neighbour"]

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
    wait_for(
        "the process to end", lambda: pid not in running_processes(), within_s=SOON_S, pause_s=0.02
    )


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


def test_no_attempt_lasts(strict: Cluster, record_property: Callable[[str, object], None]) -> None:
    """Each process above its container's limit is gone in time, and the container runs on."""
    other = idle_pod("other-user", SHARES)
    other["spec"]["securityContext"] = {"runAsUser": 4711}
    strict.start(idle_pod("greedy", SHARES), other)
    (gpu,) = strict.inspect_container("greedy").gpu_indices
    assert strict.inspect_container("other-user").gpu_indices == (gpu,)
    before = strict.incarnations()

    for number, (attempt, (name, command)) in enumerate(ATTEMPTS.items(), 700_000):
        pid = begin(strict, name, command.format(number), ["sleep", str(number)])
        if attempt == "in a cgroup of its own":
            nest(pid)
        since = time.monotonic()
        strict.daemon.use(gpu, pid, ABOVE_MIB)
        await_ended(pid)
        lasted = time.monotonic() - since
        record_property(attempt, round(lasted, 2))
        took(f"an excess {attempt}", lasted, at_most=SIGKILL_S if "deaf" in attempt else SIGTERM_S)
        strict.daemon.free(gpu, pid)
    assert strict.incarnations() == before


def test_sixty_workers_are_one_excess(strict: Cluster) -> None:
    """So many small processes end as bring the container within its limit, not one at a time."""
    (gpu,) = strict.run("workers", SHARES).gpu_indices
    loop = "for i in $(seq 60); do sleep 71$i & done; wait"
    strict.execute("workers", "sh", "-c", f"({loop}) >/dev/null 2>&1 &")
    wait_for("60 workers", lambda: len(workers()) == 60, within_s=SOON_S)
    pids = workers()
    since = time.monotonic()
    for pid in pids:
        strict.daemon.use(gpu, pid, ABOVE_MIB // 60)
    wait_for(
        "the workers to be within the limit",
        lambda: len(workers()) * (ABOVE_MIB // 60) <= WITHIN_LIMIT_MIB,
        within_s=SOON_S,
        pause_s=0.02,
    )
    took("the excess of 60 workers", time.monotonic() - since, at_most=SIGTERM_S)
    assert len(workers()) >= 30
    for pid in pids:
        strict.daemon.free(gpu, pid)


def test_an_ephemeral_container_has_no_gpu(strict: Cluster) -> None:
    """None of its pod's devices is there; a process that has one nevertheless is unauthorized."""
    (gpu,) = strict.run("debugged", SHARES).gpu_indices
    document = strict.kubectl.get("pod", "debugged", NAMESPACE)
    debugger = {
        "name": "debugger",
        "image": BUSYBOX_IMAGE,
        "command": ["sh", "-c", "ls /dev; sleep 720000; true"],
    }
    document["spec"]["ephemeralContainers"] = [debugger]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/debugged/ephemeralcontainers"
    strict.kubectl("replace", "--raw", path, "-f", "-", feed=json.dumps(document))
    command = ["sleep", "720000"]
    wait_for("the debugger", lambda: bool(started(command)), within_s=SOON_S)
    (pid,) = started(command)
    assert "nvidia" not in strict.kubectl(
        "logs", "debugged", f"--namespace={NAMESPACE}", "--container=debugger"
    )

    strict.daemon.use(gpu, pid, ABOVE_MIB)
    wait_for(
        "the process to be unauthorized",
        lambda: pid in {each["pid"] for each in strict.daemon.processes()["unauthorized"]},
        within_s=SOON_S,
    )
    strict.daemon.free(gpu, pid)


def begin(cluster: Cluster, name: str, shell: str, command: list[str]) -> int:
    """Start a process in a pod's container; return its pid on the machine."""
    cluster.execute(name, "sh", "-c", f"({shell}) >/dev/null 2>&1 &")
    wait_for(f"{command} in {name}", lambda: bool(started(command)), within_s=SOON_S)
    (pid,) = started(command)
    return pid


def started(command: list[str]) -> list[int]:
    """Return the pids of the processes with this command line."""
    return [pid for pid, arguments in running_processes().items() if arguments == command]


def workers() -> list[int]:
    """Return the pids of the 60 workers that are left."""
    return [
        pid
        for pid, (program, *arguments) in running_processes().items()
        if program == "sleep" and arguments and arguments[0].startswith("71")
    ]


def nest(pid: int) -> None:
    """Move a process into a new cgroup below its container's, as Docker in the container does."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    for root, _ in hierarchies():
        # A new cpuset of cgroup v1 has no processors, and takes no process.
        for path in {path for *_, path in lines if "kubepods" in path}:
            if (root / path.lstrip("/")).is_dir() and root.name != "cpuset":
                inner = root / path.lstrip("/") / "docker" / ("f" * 64)
                inner.mkdir(parents=True, exist_ok=True)
                (inner / "cgroup.procs").write_text(str(pid))

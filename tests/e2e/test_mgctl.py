"""`mgctl` inside pods, on a real kubelet and runtime."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, idle_pod
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.waiting import wait_for

MIB = {"alice": 1000, "bob": 777}
SOON_S = 30.0
HARDENED = {
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def listed_processes(cluster: Cluster, name: str) -> list[tuple[str, int, int]]:
    """Return pod, pid and memory of each process that `mgctl get processes` lists in a pod."""
    answer = json.loads(cluster.execute(name, "mgctl", "get", "processes", "-o", "json"))
    return [
        (container["pod"], process["pid"], process["memoryMiB"])
        for container in answer["containers"]
        for part in container["gpus"]
        for process in part["processes"]
    ]


@pytest.fixture
def neighbours(cluster: Cluster) -> Iterator[Cluster]:
    """Start two pods on one GPU with a process each; one pod has minimal rights."""
    strict = idle_pod("alice", 25)
    strict["spec"]["containers"][0]["securityContext"] = HARDENED
    cluster.start(strict, idle_pod("bob", 25))
    (gpu,) = cluster.inspect_container("bob").gpu_indices
    pids = {name: cluster.first_process(name) for name in MIB}

    for name, pid in pids.items():
        cluster.daemon.use(gpu, pid, MIB[name])
    wait_for(
        "mgctl to list each pod's own process there",
        lambda: all(listed_processes(cluster, name) for name in MIB),
        within_s=SOON_S,
    )
    yield cluster
    for pid in pids.values():
        cluster.daemon.free(gpu, pid)


def test_a_pod_sees_itself_and_nothing_of_its_neighbour(neighbours: Cluster) -> None:
    """A pod without root or capabilities sees its own process, by its own pid, alone."""
    for name, mib in MIB.items():
        assert listed_processes(neighbours, name) == [(name, 1, mib)]
    for kind in ("devices", "processes", "pods"):
        for form in ("table", "wide", "json", "yaml"):
            answer = neighbours.execute("alice", "mgctl", "get", kind, "-o", form)
            assert "bob" not in answer
            assert not re.search(rf"\b{MIB['bob']}\b", answer)
    assert "alice (main)" in neighbours.execute("alice", "mgctl", "top")


def test_requests_about_a_neighbour_are_refused(neighbours: Cluster) -> None:
    """No option selects another pod, and the node's own socket is out of reach."""
    for arguments in (("get", "pods", "bob"), ("get", "processes", "--pod=bob"), ("kill", "1")):
        with pytest.raises(RigError, match="exit code 2"):
            neighbours.execute("alice", "mgctl", *arguments)
    assert neighbours.execute("alice", "ls", "/run/metagpu").split() == [
        "metagpu-hook",
        "mgctl",
        "mgctl.sock",
    ]
    with pytest.raises(RigError, match=r"Read-only file system|Permission denied"):
        neighbours.execute("bob", "touch", "/run/metagpu/x")


@pytest.mark.long
def test_many_requests_of_a_pod_delay_no_other_pod(neighbours: Cluster) -> None:
    """Beside a pod that calls mgctl in loops, its neighbour is answered and a new pod starts."""
    crowd = "for i in 1 2 3 4; do (while :; do mgctl version; done >/dev/null 2>&1 &) ; done"
    neighbours.execute("alice", "sh", "-c", crowd)

    wait_for(
        "the neighbour to be answered",
        lambda: listed_processes(neighbours, "bob") == [("bob", 1, MIB["bob"])],
        within_s=SOON_S,
    )
    assert neighbours.run("late", 10).share_ids


# The program joins the cgroups of a container, so that the kernel reports it as that container's.
# Then it sends requests that mgctl never sends, and prints all answers.
FORGER = """
import pathlib, random, socket, struct, sys
first, path, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
for line in pathlib.Path(f"/proc/{first}/cgroup").read_text().splitlines():
    _, controllers, group = line.split(":", 2)
    folder = pathlib.Path("/sys/fs/cgroup", controllers.removeprefix("name=")) / group.lstrip("/")
    if (folder / "cgroup.procs").exists():
        (folder / "cgroup.procs").write_text("0")
chance, received = random.Random(7), b""
for _ in range(times):
    garbage = chance.randbytes(chance.randint(1, 400))
    words = ["mgctl/1 tty=0 columns=0 rows=0 old=0", "get", "pods", "--pod=bob", "-o", "json"]
    forged = "".join(f"{word}\\0" for word in words[: chance.randint(1, 6)]).encode()
    payload = chance.choice([garbage, forged, forged + garbage, garbage + forged])
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(30)
        caller.connect(path)
        try:
            caller.sendall(struct.pack(">H", len(payload)) + payload)
            while part := caller.recv(65536):
                received += part
        except ConnectionError:
            pass
print(received.decode(errors="replace"))
"""
FORGED = 500


def test_forged_requests_reveal_nothing_of_a_neighbour(neighbours: Cluster) -> None:
    """Garbage and forged options from a container's cgroup get only its own answers."""
    socket = neighbours.daemon.pod_socket
    first = neighbours.first_process("alice")
    done = subprocess.run(
        [sys.executable, "-c", FORGER, str(first), str(socket), str(FORGED)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mgctl: ") > FORGED // 2  # answered as a container of a pod
    assert "answers containers of pods alone" not in done.stdout
    assert not re.search(rf"\b{MIB['bob']}\b|\"bob\"", done.stdout)
    wait_for(
        "the neighbour to be answered",
        lambda: listed_processes(neighbours, "bob") == [("bob", 1, MIB["bob"])],
        within_s=SOON_S,
    )


def test_mgctl_outlives_the_daemon(cluster: Cluster) -> None:
    """Mgctl reports a killed daemon; the next daemon answers earlier containers."""
    cluster.run("alice", 25)
    cluster.daemon.kill()
    with pytest.raises(RigError, match=r"no daemon answers on /run/metagpu/mgctl\.sock"):
        cluster.execute("alice", "mgctl", "version")

    cluster.daemon.start()
    wait_for(
        "mgctl to be answered again",
        lambda: cluster.execute("alice", "mgctl", "version").startswith("metagpu "),
        within_s=SOON_S,
    )

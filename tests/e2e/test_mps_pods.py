"""MPS control daemons outlive metagpu's container, NVIDIA's own; clients end before their kill."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import NAMESPACE, Cluster, container, pod
from tests.e2e.joined import Joined
from tests.e2e.mps_pods import (
    CONFIGURATION,
    NAME,
    RESOURCE,
    SOON_S,
    MpsPods,
    host_path,
    spec_with_python,
)
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import PAUSE_IMAGE
from tests.e2e.rig.nvidia_packages import MPS, provide
from tests.e2e.rig.waiting import wait_for


@pytest.fixture
def pods(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[MpsPods]:
    """Start metagpu as a DaemonSet with a driver's MPS programs, and a client."""
    try:
        root = provide(MPS, request.param)
    except RigError as error:
        pytest.skip(f"NVIDIA's own MPS programs were not tested: {error}")
    cluster.daemon.stop()
    made = MpsPods(cluster, root)
    try:
        made.prepare()
        made.apply()
        made.await_another(0)
        made.start_client()
        yield made
    finally:
        made.remove()


def roll(pods: MpsPods) -> None:
    """Change the DaemonSet's template: another pod replaces the one of before."""
    pods.apply(rolled="yes")


def change_image(pods: MpsPods) -> None:
    """Change the image of the DaemonSet."""
    pods.apply(PAUSE_IMAGE)


def kill(pods: MpsPods) -> None:
    """Kill metagpu: the kubelet starts its container again."""
    os.kill(pods.agent(), signal.SIGKILL)


def exhaust_memory(pods: MpsPods) -> None:
    """Make metagpu take more memory than its container may have."""
    os.kill(pods.agent(), signal.SIGUSR1)


def delete(pods: MpsPods) -> None:
    """Delete the pod by force."""
    target = (f"--selector=app={NAME}", f"--namespace={NAMESPACE}")
    pods.kubectl("delete", "pods", *target, "--grace-period=0", "--force")


ENDS: list[Callable[[MpsPods], None]] = [exhaust_memory, kill, roll, change_image, delete]


@pytest.mark.long
@pytest.mark.parametrize("pods", ["535", "550"], indirect=True)
def test_no_end_of_a_container_ends_a_control_daemon(pods: MpsPods) -> None:
    """Whatever ends metagpu's container, the control daemon serves on, and no client notices."""
    daemon, client = pods.control_daemon(), pods.client()

    for end in ENDS:
        agent = pods.agent()
        end(pods)
        pods.await_another(agent)
        assert (pods.control_daemon(), pods.client()) == (daemon, client), end.__name__
        if end is exhaust_memory:
            wait_for("the reason", lambda: pods.last_end() == "OOMKilled", within_s=SOON_S)


STUBBORN = """
import os, signal, socket, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as server, open(sys.argv[1], "w") as beats:
    server.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    server.setblocking(False)
    while True:
        try:
            word = "ended" if server.recv(1) == b"" else "?"
        except BlockingIOError:
            word = "connected"
        print(word, time.time(), file=beats, flush=True)
        time.sleep(0.05)
"""
"""A client of the stand-in that only SIGKILL ends; it writes whether it is connected still."""
GRACE_S = 6


@pytest.fixture
def with_mps(member: Joined) -> Iterator[Joined]:
    """Offer one GPU by MPS, and then what the node offered before."""
    member.daemon.configure(CONFIGURATION.replace("name: all", "name: all, gpus: {index: 0}"))
    member.cluster.await_amounts(10, 10, RESOURCE)
    yield member
    member.cluster.clear()
    member.daemon.configure()


@pytest.mark.long
def test_a_client_ends_before_the_kubelet_kills_it(
    with_mps: Joined, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A pod that ignores SIGTERM has no work in its last two seconds; its neighbour computes on."""
    cluster = with_mps.cluster
    names = ("neighbour", "stubborn")

    def beats(name: str) -> list[tuple[str, float]]:
        lines = (tmp_path / name).read_text().splitlines()[:-1]
        return [(word, float(at)) for word, at in map(str.split, lines)]

    for name in names:
        command = [sys.executable, "-c", STUBBORN, str(tmp_path / name)]
        spec = spec_with_python(container("main", 3, command, RESOURCE), host_path(tmp_path))
        cluster.kubectl.apply(pod(name) | {"spec": spec})
    cluster.await_running()
    for name in names:
        with_mps.daemon.use(0, cluster.first_process(name), 64)
    began = time.time()
    target = ("stubborn", f"--namespace={NAMESPACE}", f"--grace-period={GRACE_S}")
    cluster.kubectl("delete", "pod", *target, "--wait")

    ended = next(at for word, at in beats("stubborn") if word == "ended")
    killed = beats("stubborn")[-1][1]
    record_property("seconds from the end of the client to its kill", round(killed - ended, 2))
    assert ended - began > GRACE_S - 2.5
    assert killed - ended > 0.5
    assert beats("neighbour")[-1][1] > killed
    assert {word for word, _ in beats("neighbour")} == {"connected"}

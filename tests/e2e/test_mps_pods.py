"""MPS control daemons outlive the container of metagpu that started them: NVIDIA's own."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.mps_pods import NAME, SOON_S, MpsPods
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

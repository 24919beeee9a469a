"""ResourceClaims outlive restarts of kubelet, daemon and node, and keep what they hold."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pytest

from tests.e2e.claims import ClaimsNode, claims_node, pod, resource_claim, shares
from tests.e2e.cluster import Cluster, Incarnation
from tests.e2e.fake_node import exactly
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import took, wait_for

MIG = exactly("gpu", "mig.metagpu.io")
WIPED_S = 45.0
"""The kubelet deletes the slices of a driver that was away for 30 s."""
REGISTERED_S = 2.0
"""From the moment at which both the kubelet and the driver are there."""
BACK_S = 3.0
"""From the deletion of a slice."""


@pytest.fixture(scope="module")
def shared_node(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[ClaimsNode]:
    """Start the daemon with the configuration of the page."""
    with claims_node(Cluster(node, daemon), account) as live_claims_node:
        yield live_claims_node


@pytest.fixture
def claims(shared_node: ClaimsNode) -> Iterator[ClaimsNode]:
    """Return the node with a pod that has shares, and one that has a MIG device."""
    shared_node.start(
        *(resource_claim("part", shares(50)), pod("part", "part")),
        *(resource_claim("mig", MIG), pod("mig", "mig")),
    )
    yield shared_node
    shared_node.clear()


def test_the_kubelet_restarts(claims: ClaimsNode) -> None:
    """Slices are back at once; pods run on untouched, and nothing is prepared again."""
    before = settled(claims)
    old, registrations = uids(claims), claims.registrations()

    claims.node.restart_kubelet()
    claims.await_registered(registrations)
    wait_for(
        "new slices, as the kubelet deletes all",
        lambda: old.isdisjoint(uids(claims)),
        within_s=20,
    )
    began = time.monotonic()
    claims.await_slices()
    took("the return of slices", time.monotonic() - began, at_most=BACK_S)
    seconds = claims.logged("dra driver registered")[-1] - looks(claims)[-1]
    took("the registration at a new kubelet", seconds, at_most=REGISTERED_S)
    assert settled(claims) == before
    claims.start(resource_claim("late", shares(50)), pod("late", "late"))


@pytest.mark.long
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_daemon_restarts(claims: ClaimsNode, end: str) -> None:
    """Within 30 s no slice is deleted; the daemon knows all leases; claims end and begin."""
    before, slices, registrations = settled(claims), uids(claims), claims.registrations()
    getattr(claims.daemon, end)()
    claims.daemon.start_again()
    claims.await_registered(registrations)
    if end == "stop":  # of a driver that was killed, the kubelet lets go of the old socket first
        served, registered = map(claims.logged, ("dra driver served", "dra driver registered"))
        seconds = registered[-1] - served[-1]
        took("the registration of a new daemon", seconds, at_most=REGISTERED_S)
    wait_for("the same leases", lambda: settled(claims) == before, within_s=20)
    claims.await_slices()
    assert uids(claims) == slices

    claims.cluster.delete("part")
    wait_for("the lease to end", lambda: claims.leased() == before.leased - 50, within_s=10)
    claims.start(resource_claim("late", shares(20)), pod("late", "late"))
    assert claims.leased() == before.leased - 30


@pytest.mark.long
def test_the_daemon_is_away(claims: ClaimsNode) -> None:
    """Slices are deleted, published again when it is back, and a waiting pod starts."""
    before = settled(claims)
    claims.daemon.kill()
    claims.kubectl.apply(resource_claim("late", shares(20)), pod("late", "late"))
    wait_for("the slices to be deleted", lambda: not claims.slices(), within_s=WIPED_S)
    claims.daemon.start_again()
    claims.await_slices()
    wait_for("the pod to run", lambda: claims.phase("late") == "Running", within_s=120)
    assert claims.leased() == before.leased + 20


@pytest.mark.long
def test_the_node_reboots(claims: ClaimsNode) -> None:
    """The kubelet prepares nothing; all CDI names resolve, and the MIG device is made again."""
    before, held = settled(claims), {name: claims.inspect(name) for name in ("part", "mig")}
    registrations = claims.registrations()
    claims.node.power_off()
    claims.daemon.kill()
    for file in claims.cdi.iterdir():
        file.unlink()
    claims.driver_state.unlink()
    claims.daemon.start_again()
    claims.node.power_on()
    claims.await_registered(registrations)
    wait_for(
        "all pods to start again",
        lambda: started_again(claims, before),
        within_s=120,
    )
    assert settled(claims).leases == before.leases
    assert claims.inspect("part") == held["part"]
    assert claims.inspect("mig").gpu_devices == held["mig"].gpu_devices
    assert len(claims.instances()) == 1
    claims.start(resource_claim("late", shares(20)), pod("late", "late"))


@dataclass(frozen=True)
class State:
    """Leases by holder, CDI files, containers, and how often a claim was prepared."""

    leases: Mapping[str, int]
    files: Sequence[str]
    containers: Mapping[str, Incarnation]
    prepared: int

    @property
    def leased(self) -> int:
        """Return the number of leased shares."""
        return sum(self.leases.values())


def settled(claims: ClaimsNode) -> State:
    """Wait until the daemon knows all holders; return the state."""
    leases = claims.settled_leases()
    prepared = claims.daemon.log.count("resource claim prepared")
    return State(leases, claims.files(), claims.cluster.incarnations(), prepared)


def started_again(claims: ClaimsNode, before: State) -> bool:
    """Return whether every container runs and is another one than before."""
    now = claims.cluster.incarnations()
    return now.keys() == before.containers.keys() and all(
        now[name].container != before.containers[name].container for name in now
    )


def uids(claims: ClaimsNode) -> set[str]:
    """Return the uids of all ResourceSlices."""
    return {piece["metadata"]["uid"] for piece in claims.slices().values()}


def looks(claims: ClaimsNode) -> list[float]:
    """Return when the kubelet began to look for plugins, in seconds since the epoch."""
    log = claims.node.kubelet.log.read_text(errors="replace")
    found = re.findall(r"^I(\S+ \S+) .*Starting Kubelet Plugin Manager", log, re.MULTILINE)
    year = datetime.now().astimezone().year  # the log's times have none
    return [
        datetime.strptime(f"{year}{value}", "%Y%m%d %H:%M:%S.%f").astimezone().timestamp()
        for value in found
    ]

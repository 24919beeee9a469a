"""Hundreds of pods on a node whose MIG instances are created on demand."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.instances import (
    PREFIX,
    REFUSED,
    SETTLED_S,
    MigNode,
    failure,
    generalize,
    is_being_admitted,
    is_leaving,
    is_settled,
    is_unschedulable,
    mig_node,
    mig_pod,
)
from tests.e2e.rig.api import Api
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.waiting import wait_for

pytestmark = pytest.mark.daemon("pod")

PROFILES = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")
CONFIGURATION = f"""\
version: metagpu/v1
pools:
  - name: mig
    backends:
      - {{backend: mig, profiles: [{", ".join(PROFILES)}], keepWarm: 1s}}
"""
GPUS = (
    "{model: a100-40gb, count: 4, mig: true, "
    "provisioning: {duration: 100ms, computeDuration: 50ms}}"
)
EMPTY = {"1g.5gb": (28, 28), "2g.10gb": (12, 12), "3g.20gb": (8, 8), "7g.40gb": (4, 4)}

STARTING = 4
"""Pods that may be about to start when the next one comes. The kubelet has admitted all of them by
then, so the scheduler alone knows none of them."""
FULL, WAITING, LEAVING = 11, 3, 5
"""Limits of all pods, of unschedulable pods, and of pods that are being deleted."""
CHECKED = 50
"""Arrivals between two complete checks, which wait until all pods have settled."""


@pytest.fixture
def empty_node(cluster: Cluster) -> Iterator[MigNode]:
    """Start four empty A100s with instances on demand, and the Node patched as leases change."""
    joined = cluster.daemon.features("allocatable", "pods")
    with mig_node(cluster, CONFIGURATION, GPUS, *joined) as node:
        node.await_amounts(EMPTY)
        yield node


@dataclass
class Crowd:
    """Pods that come and go, and their outcomes."""

    node: MigNode
    api: Api
    chance: random.Random
    arrived: int = 0
    waited: set[str] = field(default_factory=set)
    lost: Counter[str] = field(default_factory=Counter)
    leaving: set[str] = field(default_factory=set)
    settled_s: float = SETTLED_S

    def arrive(self) -> None:
        """Create one more pod."""
        profile = self.chance.choices(PROFILES, (8, 6, 4, 2))[0]
        self.api.create(NAMESPACE, mig_pod(f"pod-{self.arrived}", PREFIX + profile))
        self.arrived += 1

    def await_settled(self, starting: int = 0, *, gone: bool = False) -> dict[str, Document]:
        """Wait until pods were admitted, refused or unschedulable, and few have still to start.

        A refused pod is counted and deleted. GONE: wait also until all deleted pods have left.
        """

        def probe() -> dict[str, Document]:
            pods = self.api.pods(NAMESPACE)
            self._note_all(pods)
            staying = {name: pod for name, pod in pods.items() if name not in self.leaving}
            coming = [name for name, pod in staying.items() if is_being_admitted(pod)]
            begun = [name for name, pod in staying.items() if not is_settled(pod)]
            going = sorted(pods.keys() - staying.keys())
            if coming or len(begun) > starting or len(going) > (0 if gone else LEAVING - 1):
                raise RigError(f"coming are {coming}, not settled {begun}, leaving {going}")
            if staying and not running(staying):
                raise RigError(f"nothing runs, and there are {sorted(staying)}")
            return staying or {"": {}}

        found = wait_for("pods to settle", probe, within_s=self.settled_s, pause_s=0.05)
        return {name: pod for name, pod in found.items() if name}

    def _note_all(self, pods: dict[str, Document]) -> None:
        for name, pod in pods.items():
            self._note(name, pod)

    def _note(self, name: str, pod: Document) -> None:
        if name in self.leaving or is_leaving(pod):
            return
        if why := failure(pod):
            assert why.startswith(REFUSED), f"{name} failed: {why}"
            self.lost[generalize(why)] += 1
            self.leave(name)
        elif is_unschedulable(pod):
            self.waited.add(name)

    def leave(self, *names: str) -> None:
        """Delete pods."""
        for name in names:
            self.leaving.add(name)
            self.api.delete(NAMESPACE, name)


def running(pods: Mapping[str, Document]) -> list[str]:
    """Return the pods that run."""
    return sorted(name for name, pod in pods.items() if pod["status"]["phase"] == "Running")


@pytest.mark.parametrize(
    "arrivals", [CHECKED, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_pods_come_and_go(
    empty_node: MigNode, arrivals: int, record_property: Callable[[str, object], None]
) -> None:
    """Instances are exactly where their pods are, and 1 % of pods are refused at most."""
    began = time.monotonic()
    chance = random.Random(4)  # noqa: S311 - the same pods every time
    with empty_node.cluster.node.api() as api:
        crowd = Crowd(empty_node, api, chance)
        while crowd.arrived < arrivals:
            pods = crowd.await_settled(STARTING)
            crowded = sum(map(is_unschedulable, pods.values())) >= WAITING
            if crowded or len(pods) >= FULL:
                crowd.leave(chance.choice(running(pods)))
            if crowded:
                continue
            crowd.arrive()
            if crowd.arrived % CHECKED == 0:
                crowd.await_settled(gone=True)
                empty_node.await_in_place()
                print(f"{crowd.arrived} in {time.monotonic() - began:.0f} s: {dict(crowd.lost)}")

        share = 100 * crowd.lost.total() / crowd.arrived
        record_property("arrived", crowd.arrived)
        record_property("refused", dict(crowd.lost))
        print(
            f"{crowd.arrived} pods came in {time.monotonic() - began:.0f} s, "
            f"{len(crowd.waited)} were unschedulable, {crowd.lost.total()} ({share:.1f} %) met "
            f"UnexpectedAdmissionError: {dict(crowd.lost)}"
        )
        crowd.leave(*crowd.await_settled())
        crowd.await_settled(gone=True)
    empty_node.await_nothing()
    empty_node.await_amounts(EMPTY)
    assert crowd.lost.total() <= max(1, arrivals // 100), crowd.lost

"""Pods with ResourceClaims of four backends come and go, while everything restarts at random."""

import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import anyio
import pytest

from metagpu.core.model.resource_claims import parse_claim_device
from metagpu.plugins.kubelet.pb import v1
from tests.e2e.claims import (
    await_registered,
    driver_file,
    node_of_both_apis,
    resource_claim,
    shares,
)
from tests.e2e.claims import pod as claiming_pod
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.fake_node import DRIVER, exactly
from tests.e2e.instances import (
    MigNode,
    is_settled,
    is_unschedulable,
    list_pod_resources,
    overlap,
)
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_mig_arrivals import Crowd, running

ARRIVALS = int(os.environ.get("ARRIVALS") or 120)
"""500 by hand; 120 take a few minutes."""
PROFILES = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")
CONFIGURATION = f"""\
version: metagpu/v1
pools:
  - name: mig
    gpus: {{index: 4}}
    api: dra
    backends: [{{backend: mig, profiles: [{", ".join(PROFILES)}], keepWarm: 1s}}]
  - name: shared
    api: dra
    backends:
      - {{backend: fraction, sharesPerGpu: 100}}
      - {{backend: whole}}
      - {{backend: timeslice, replicas: 4}}
"""
GPUS = (
    "{model: a100-40gb, count: 4}, "
    "{model: a100-40gb, mig: true, provisioning: {duration: 100ms, computeDuration: 50ms}}"
)
WEIGHTS = {"part": 6, "whole": 2, "time-slice": 4, "mig": 6}
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
STARTING, FULL, WAITING = 4, 12, 3
REFUSED_CLAIM = "resource claim refused"
"""The daemon's event of a claim that it did not prepare."""
SETTLED_S = 60.0
MIG_GPU = 4
BETWEEN = 10
"""Arrivals between two restarts, about."""
LONGEST_S = 240.0
"""For pods to settle after a restart: the kubelet asks again within 90 s at the latest."""


@pytest.fixture
def shared_node(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[MigNode]:
    """Run the daemon with ResourceClaims of four backends."""
    cluster = Cluster(node, daemon)
    with node_of_both_apis(cluster, account, CONFIGURATION, GPUS, MIG_GPU) as live_mig_node:
        yield live_mig_node


def restart_daemon(cluster: Cluster, end: str) -> None:
    """End the daemon by a signal, and start it again."""
    getattr(cluster.daemon, end)()
    cluster.daemon.start_again()


RESTARTS: dict[str, Callable[[Cluster], None]] = {
    "daemon, SIGTERM": lambda cluster: restart_daemon(cluster, "stop"),
    "daemon, SIGKILL": lambda cluster: restart_daemon(cluster, "kill"),
    "kubelet": lambda cluster: cluster.node.restart_kubelet(),
}


def restart_both(cluster: Cluster) -> None:
    """Kill the daemon, restart the kubelet meanwhile, and start the daemon again."""
    cluster.daemon.kill()
    cluster.node.restart_kubelet()
    cluster.daemon.start_again()


RESTARTS["both"] = restart_both


def reboot(cluster: Cluster) -> None:
    """Cut the node's power: CDI files and MIG devices are gone, the kubelet's account stays."""
    cluster.node.power_off()
    cluster.daemon.kill()
    for file in cluster.node.paths.cdi.iterdir():
        file.unlink()
    driver_file(cluster).unlink(missing_ok=True)
    cluster.daemon.start_again()
    cluster.node.power_on()


RESTARTS["node"] = reboot


def checked(crowd: "ClaimsCrowd") -> bool:
    """Check that nothing is held twice; a kubelet that has just started may not answer yet."""
    crowd.check()
    return True


@dataclass
class ClaimsCrowd(Crowd):
    """Pods with ResourceClaims of four backends.

    Attributes:
        kinds: how many arrivals there were of each kind.
        log_from: the place in the daemon's log where these arrivals begin.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    log_from: int = 0

    def draw(self) -> tuple[str, Document]:
        """Return the kind of the next pod, and the request of its claim."""
        (kind,) = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        match kind:
            case "whole":
                return kind, exactly("gpu", "gpu.metagpu.io")
            case "time-slice":
                return kind, exactly("gpu", "timeslice.metagpu.io")
            case "mig":
                (profile,) = self.chance.choices(PROFILES, (8, 6, 4, 2))
                cel = f"device.attributes['{DRIVER}'].profile == '{profile}'"
                selectors = [{"cel": {"expression": cel}}]
                return kind, exactly("gpu", "mig.metagpu.io", 1, selectors=selectors)
            case _:
                return kind, shares(self.chance.randint(10, 100))

    def arrive(self) -> None:
        """Create one more pod with its claim."""
        name, (kind, request) = f"pod-{self.arrived}", self.draw()
        self.api.call("POST", CLAIMS, resource_claim(name, request))
        self.kinds[kind] += 1
        self.api.create(NAMESPACE, claiming_pod(name, name))
        self.arrived += 1

    def leave(self, *names: str) -> None:
        """Delete pods, and the claims that were made for them."""
        super().leave(*names)
        for name in names:
            self.api.call("DELETE", f"{CLAIMS}/{name}")

    def change(self, pods: Mapping[str, Document]) -> None:
        """End a running pod where many wait or are there; create one where few of them start."""
        crowded = sum(map(is_unschedulable, pods.values())) >= WAITING
        if (crowded or len(pods) >= FULL) and (there := running(pods)):
            self.leave(self.chance.choice(there))
        if not crowded and sum(map(is_settled, pods.values())) >= len(pods) - STARTING:
            self.arrive()

    @property
    def refused_claims(self) -> set[str]:
        """The claims that were not prepared when the kubelet asked first."""
        lines = self.node.cluster.daemon.log[self.log_from :].splitlines()
        return {json.loads(line)["claim"] for line in lines if REFUSED_CLAIM in line}

    def check(self) -> None:
        """Check that the kubelet gave no share twice to pods that run."""
        before = set(running(self.api.pods(NAMESPACE)))
        answer = anyio.run(list_pod_resources)
        still = before & set(running(self.api.pods(NAMESPACE))) - self.leaving
        assert list(doubled(answer, still)) == []


def doubled(answer: v1.ListPodResourcesResponse, pods: set[str]) -> Iterator[str]:
    """Yield what two of these pods have, and GPUs that they have in two ways."""
    holders = defaultdict[str, set[str]](set)
    ways = defaultdict[str, set[str]](set)
    for pod in answer.pod_resources:
        for container in pod.containers if pod.name in pods else ():
            for share in shares_of(container):
                gpu, _, slot = share.partition("::")
                holders[share].add(pod.name)
                ways[gpu].add("mig" if "@" in slot else slot[:1] or "whole")
    yield from (
        f"{one} and {other} overlap"
        for one, other in combinations(sorted(holder for holder in holders if "@" in holder), 2)
        if overlap(one, other)
    )
    yield from (f"{share}: {names}" for share, names in holders.items() if len(names) > 1)
    yield from (f"{gpu}: {kinds}" for gpu, kinds in ways.items() if len(kinds) > 1)


def shares_of(container: v1.ContainerResources) -> Iterator[str]:
    """Yield the shares that the claims of a container hold."""
    for resource in container.dynamic_resources:
        for claim_resource in resource.claim_resources:
            for name in claim_resource.cdi_devices:
                if (found := parse_claim_device(name.name)) is not None:
                    yield from found.share_ids


@pytest.mark.long
@pytest.mark.timeout(1800 + 15 * ARRIVALS)
@pytest.mark.parametrize(
    "kinds",
    [pytest.param(sorted(RESTARTS), id="restarts"), pytest.param([], id="nothing-restarts")],
)
def test_restarts_amid_random_claims(
    shared_node: MigNode,
    kinds: Sequence[str],
    record_property: Callable[[str, object], None],
) -> None:
    """Nothing is held twice, no claim stays refused, and all pods settle after each restart.

    Without a restart no claim is refused at all.
    """
    began, cluster = time.monotonic(), shared_node.cluster
    chance = random.Random(14)  # noqa: S311 - the same pods every time
    made: list[str] = []
    due = chance.randint(1, BETWEEN)
    with cluster.node.api() as api:
        crowd = ClaimsCrowd(shared_node, api, chance, log_from=len(cluster.daemon.log))
        crowd.settled_s = LONGEST_S
        while crowd.arrived < ARRIVALS:
            if kinds and crowd.arrived >= due:
                due += chance.randint(1, 2 * BETWEEN)
                how = kinds[len(made) % len(kinds)]  # each of them, however many there are
                made.append(how)
                RESTARTS[how](cluster)
                await_registered(cluster)
            pods = crowd.await_settled(STARTING)
            wait_for("the account", lambda: checked(crowd), within_s=SETTLED_S)
            crowd.change(pods)
        pods = crowd.await_settled()
        crowd.check()
        print(
            f"{crowd.arrived} arrivals and {len(made)} restarts in "
            f"{time.monotonic() - began:.0f} s, {dict(crowd.kinds)}; {len(crowd.waited)} waited; "
            f"refused {crowd.refused_claims}; {made}"
        )
        record_property("refused", len(crowd.refused_claims))
        assert set(made) == set(kinds)
        assert kinds or not crowd.refused_claims, crowd.refused_claims
        assert crowd.kinds.keys() == WEIGHTS.keys()
        crowd.leave(*pods)
        crowd.await_settled(gone=True)
    wait_for("leases to end", lambda: not cluster.daemon.status()["leases"], within_s=SETTLED_S)
    assert not crowd.lost

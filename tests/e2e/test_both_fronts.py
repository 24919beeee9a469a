"""One pool under both fronts: pods with limits and pods with ResourceClaims come and go.

An account of the test's own, by what the kubelet says that running pods have, finds nothing held
twice; nearly nobody is refused, and who waits for a GPU that is free gets it.
"""

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import ClassVar, NamedTuple

import anyio
import pytest

from metagpu.core.model.claim_device import parse_claim_device
from metagpu.plugins.kubelet.pb import v1
from tests.e2e.claims import pod as claiming_pod
from tests.e2e.claims import resource_claim, shares
from tests.e2e.cluster import NAMESPACE, RESOURCE, Cluster
from tests.e2e.fake_node import dra_objects, exactly
from tests.e2e.instances import (
    MigNode,
    is_settled,
    is_unschedulable,
    list_pod_resources,
    mig_node,
    mig_pod,
    overlap,
)
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_mig_arrivals import Crowd, running

WHOLE, SLICED, MPS = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/gpu.mps"
RESOURCES = {RESOURCE, WHOLE, SLICED, MPS}
GPUS = 4
CONFIGURATION = f"""\
version: metagpu/v1
pools:
  - name: all
    fronts: [device-plugin, dra]
    backends:
      - {{backend: fraction, resource: {RESOURCE}, sharesPerGpu: 100}}
      - {{backend: whole, resource: {WHOLE}}}
"""
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
STARTING, FULL, WAITING = 4, 12, 3
MAY_LOSE = {40: 0.1, 300: 0.04}
"""The part of so many arrivals that may be refused, on a machine that others keep busy. The aim is
1 % in the long run, and 2 of 300 were: with 3 expected, more than 12 come once in 50,000 runs."""
REFUSED_CLAIM = "resource claim refused"
"""The daemon's event of a claim that it did not prepare."""
SETTLED_S = 60.0


@pytest.fixture
def shared_node(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[MigNode]:
    """Run the daemon with both fronts on four GPUs."""
    cluster = Cluster(node, daemon)
    cluster.clear()
    models = f"{{model: a100-40gb, count: {GPUS}}}"
    with (
        dra_objects(cluster.kubectl),
        mig_node(cluster, CONFIGURATION, models, *account) as it,
    ):
        wait_for(
            "the driver to be registered",
            lambda: (daemon.status()["dra"] or {}).get("registered") is True,
            within_s=SETTLED_S,
        )
        wait_for(
            "the Node to show a part of the GPUs",
            lambda: cluster.node.resource(RESOURCE)[1] in range(1, GPUS * 100),
            within_s=SETTLED_S,
        )
        yield it


class Wanted(NamedTuple):
    """A wish of a pod: the request of a claim, and the same as an amount of a resource."""

    kind: str
    request: Document
    resource: str
    amount: int = 1


@dataclass
class FrontsCrowd(Crowd):
    """Pods of both kinds.

    Attributes:
        claims_part: the part of pods that have claims.
        claimed: the pods with claims.
        log_from: the place in the daemon's log where these arrivals begin.
    """

    claims_part: ClassVar[float] = 1 / 2
    claimed: set[str] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    log_from: int = 0

    def draw(self) -> Wanted:
        """Return what the next pod wants: a whole GPU or a part of one."""
        whole, amount = self.chance.random() < 1 / 4, self.chance.randint(10, 100)
        if whole:
            return Wanted("whole", exactly("gpu", "gpu.metagpu.io"), WHOLE)
        return Wanted("part", shares(amount), RESOURCE, amount)

    def arrive(self) -> None:
        """Create one more pod, half of them with a claim."""
        name, wanted = f"pod-{self.arrived}", self.draw()
        if self.chance.random() < self.claims_part:
            self.api.call("POST", CLAIMS, resource_claim(name, wanted.request))
            document = claiming_pod(name, name)
            self.claimed.add(name)
        else:
            document = mig_pod(name, wanted.resource, wanted.amount)
        self.kinds[f"{wanted.kind} by claim" if name in self.claimed else wanted.kind] += 1
        self.api.create(NAMESPACE, document)
        self.arrived += 1

    def leave(self, *names: str) -> None:
        """Delete pods, and the claims that were made for them."""
        super().leave(*names)
        for name in names:
            if name in self.claimed:
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
        return {json.loads(it)["claim"] for it in lines if REFUSED_CLAIM in it}

    @property
    def refused(self) -> int:
        """The number of refused arrivals."""
        return self.lost.total() + len(self.refused_claims)

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
        for one, other in combinations(sorted(it for it in holders if "@" in it), 2)
        if overlap(one, other)
    )
    yield from (f"{share}: {names}" for share, names in holders.items() if len(names) > 1)
    yield from (f"{gpu}: {kinds}" for gpu, kinds in ways.items() if len(kinds) > 1)


def shares_of(container: v1.ContainerResources) -> Iterator[str]:
    """Yield the shares of a container, of both fronts."""
    for device in container.devices:
        if device.resource_name in RESOURCES:
            yield from device.device_ids
    for resource in container.dynamic_resources:
        for it in resource.claim_resources:
            for name in it.cdi_devices:
                if (found := parse_claim_device(name.name)) is not None:
                    yield from found.share_ids


@pytest.mark.parametrize(
    "arrivals", [40, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)
@pytest.mark.timeout(600)
def test_pods_of_both_fronts_come_and_go(
    shared_node: MigNode, arrivals: int, record_property: Callable[[str, object], None]
) -> None:
    """Nothing is held twice, and nearly nothing is refused."""
    began, cluster = time.monotonic(), shared_node.cluster
    chance = random.Random(83)  # noqa: S311 - the same pods every time
    with cluster.node.api() as api:
        crowd = FrontsCrowd(shared_node, api, chance, log_from=len(cluster.daemon.log))
        while crowd.arrived < arrivals:
            pods = crowd.await_settled(STARTING)
            crowd.check()
            crowd.change(pods)
        pods = crowd.await_settled()
        crowd.check()
        print(
            f"{crowd.arrived} arrivals in {time.monotonic() - began:.0f} s, {dict(crowd.kinds)}; "
            f"{len(crowd.waited)} waited; refused {dict(crowd.lost)}, {crowd.refused_claims}"
        )
        record_property("refused", crowd.refused)
        crowd.leave(*pods)
        crowd.await_settled(gone=True)
    wait_for("leases to end", lambda: not cluster.daemon.status()["leases"], within_s=SETTLED_S)
    assert crowd.refused <= MAY_LOSE[arrivals] * arrivals, (crowd.lost, crowd.refused_claims)

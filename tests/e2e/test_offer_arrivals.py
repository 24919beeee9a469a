"""Fractions of mixed sizes come and go: exact offers, beside offers of every free share.

Each refusal is printed with its cause, by a journal of what the API server reported. With 170 pods
on each of the nodes of 1, 2 and 8 GPUs, under both policies, it takes half an hour:

$ ARRIVALS=170 python -m pytest tests/e2e/test_offer_arrivals.py -m e2e --timeout 900 -s
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pytest

from tests.e2e.arrival_journal import journal
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.instances import is_settled, is_unschedulable, mig_node, mig_pod
from tests.e2e.rig.kubectl import Document
from tests.e2e.test_mig_arrivals import STARTING, WAITING, Crowd, running

ARRIVALS: Final = int(os.environ.get("ARRIVALS", "0"))
WHOLE: Final = 100
SMALLEST, LARGEST = 10, 150
PERIOD: Final = "10s"
"""The period in which a kubelet writes the Node's numbers by default."""
LONGEST_S: Final = 30
"""The longest life of the pods that end by themselves."""


@dataclass
class FractionCrowd(Crowd):
    """Pods of fractions: half of them end by themselves, the others are deleted.

    Attributes:
        gpus: the GPUs of the node.
        resource: the resource that the pods request.
        sizes: the shares that each pod requests.
        use: share-seconds that running pods held.
        seconds: the time of the samples.
    """

    gpus: int = 1
    resource: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    use: float = 0.0
    seconds: float = 0.0
    _sampled: float = 0.0

    def arrive(self) -> None:
        """Create one more pod."""
        largest = min(LARGEST, self.gpus * WHOLE)
        name, size = f"pod-{self.arrived}", self.chance.randint(SMALLEST, largest)
        pod = mig_pod(name, self.resource, size)
        if self.chance.random() < 1 / 2:
            life = self.chance.randint(2, LONGEST_S)
            pod["spec"]["containers"][0]["command"] = ["sleep", str(life)]
            pod["spec"]["restartPolicy"] = "Never"
        self.sizes[name] = size
        self.api.create(NAMESPACE, pod)
        self.arrived += 1

    def _note(self, name: str, pod: Document) -> None:
        if pod["status"]["phase"] == "Succeeded" and name not in self.leaving:
            self.leave(name)
        super()._note(name, pod)

    def _note_all(self, pods: dict[str, Document]) -> None:
        super()._note_all(pods)
        now = time.monotonic()
        if self._sampled:
            passed = now - self._sampled
            self.seconds += passed
            self.use += passed * sum(self.sizes[name] for name in running(pods))
        self._sampled = now

    @property
    def mean_use(self) -> float:
        """The mean part of the GPUs that running pods held."""
        return self.use / (self.seconds * self.gpus * WHOLE)


def arrivals(cluster: Cluster, offer: str, gpus: int, count: int) -> FractionCrowd:
    """Create pods under a policy, and end running ones while others wait."""
    # A name of its own: the daemon of before may offer as many shares.
    resource = f"example.com/{offer}"
    backend = f"{{backend: fraction, resource: {resource}, offer: {offer}}}"
    text = f"version: metagpu/v1\npools: [{{name: all, backends: [{backend}]}}]\n"
    joined = ("--node-name", cluster.node.name, "--kubeconfig", cluster.node.kubeconfig)
    models = f"{{model: a100-40gb, count: {gpus}}}"
    began = time.monotonic()
    with (
        cluster.node.configured_kubelet({"nodeStatusUpdateFrequency": PERIOD}),
        mig_node(cluster, text, models, *joined, "--cluster", "allocatable,pods") as node,
        cluster.node.api() as api,
        journal(cluster, resource) as kept,
    ):
        cluster.await_amounts(gpus * WHOLE, gpus * WHOLE, resource)
        chance = random.Random(gpus)  # noqa: S311 - the same pods every time
        crowd = FractionCrowd(node, api, chance, gpus=gpus, resource=resource)
        while crowd.arrived < count:
            pods = crowd.await_settled(STARTING)
            waiting = sum(map(is_unschedulable, pods.values()))
            if waiting >= WAITING and (there := running(pods)):
                crowd.leave(chance.choice(there))
            if waiting < WAITING and sum(map(is_settled, pods.values())) >= len(pods) - STARTING:
                crowd.arrive()
        crowd.leave(*crowd.await_settled())
        crowd.await_settled(gone=True)
    print(
        f"{gpus} GPUs, offer {offer}: {crowd.arrived} pods in {time.monotonic() - began:.0f} s, "
        f"{len(crowd.waited)} waited, use {crowd.mean_use:.1%}, refused {dict(crowd.lost)}"
    )
    for refusal in kept.refusals():
        print(f"  {refusal}")
    return crowd


@pytest.mark.long
@pytest.mark.parametrize(("gpus", "count"), [(2, 40), (8, 60)])
def test_nearly_no_pod_is_refused(
    cluster: Cluster, gpus: int, count: int, record_property: Callable[[str, object], None]
) -> None:
    """Pods wait where no GPU has their shares: 5 % are refused at most, in so few arrivals."""
    crowd = arrivals(cluster, "exact", gpus, count)
    record_property("refused", crowd.lost.total())
    assert crowd.lost.total() <= count // 20, crowd.lost


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not ARRIVALS, reason="takes minutes; give ARRIVALS=170")
@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("offer", ["exact", "all"])
def test_exact_offers_refuse_nearly_no_pod(
    cluster: Cluster, gpus: int, offer: str, record_property: Callable[[str, object], None]
) -> None:
    """Of many pods 1 % are refused at most; with all on offer many more."""
    crowd = arrivals(cluster, offer, gpus, ARRIVALS)
    record_property("refused", crowd.lost.total())
    record_property("use", crowd.mean_use)
    if offer == "exact":
        assert crowd.lost.total() <= max(1, ARRIVALS // 100)

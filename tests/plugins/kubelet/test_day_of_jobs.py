"""A day of indexed Jobs on one node, in simulated time: all complete, and nothing is held twice.

The registry, the backends and the answers to the kubelet are metagpu's; scheduler, kubelet and
their delays are the model of `bench`.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pytest

from bench.cluster_model import Cluster, Pod, job_back_off
from metagpu.core.availability.reasons import availability_of
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import Holder, ResourceName, Share, ShareId
from metagpu.core.state.facts import (
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    LeasesObserved,
    PodsListed,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.node_object import allocatable_of, healthy_shares_of
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.pb import v1beta1
from tests.rigs.build import config, gpu

pytestmark = pytest.mark.long

HOUR, DAY = 3600.0, 24 * 3600.0
GPUS: Final = 4
PARTS, WHOLE = ResourceName("cnvrg.io/metagpu"), ResourceName("nvidia.com/gpu")
CONFIGURATION: Final = """
version: metagpu/v1
pools:
  - name: all
    backends: [{backend: fraction}, {backend: whole}]
"""
INDEXES: Final = (1, 2, 4, 5, 10, 20)
"""The indexes of a Job of 100 shares; each pod has an equal part."""
JOBS: Final = 130
STAY_S: Final = HOUR / 2
"""The mean; a GPU is used for that long by each Job, and four fifths of the day by all."""
OUTAGE: Final = (8 * HOUR, 10 * HOUR)
"""A GPU is out of service meanwhile; its pods run on."""
DRAINED: Final = 2 * DAY
SEED: Final = 16
FEW: Final = 8
"""Pods that are refused of 900, in a day with an outage of one GPU."""


@dataclass(eq=False)
class Index(Pod):
    """The pod of one index of a Job."""

    job: int = 0
    index: int = 0


@dataclass(eq=False)
class MetagpuNode:
    """A node of metagpu's own code, and an account of who holds what.

    Attributes:
        held: the kubelet's allocations, which the daemon only knows once it asks.
        completed: how often each index of each Job has ended.
        refused: how often each index of each Job was refused.
    """

    loop: asyncio.Runner
    registry: Registry = field(default_factory=Registry)
    held: dict[Pod, tuple[Share, ...]] = field(default_factory=dict)
    ending: set[Pod] = field(default_factory=set)
    completed: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    refused: Counter[tuple[int, int]] = field(default_factory=Counter)
    now: float = 0.0
    _outages: list[float] = field(default_factory=lambda: list(OUTAGE))

    def __post_init__(self) -> None:
        """Offer idle GPUs."""
        gpus = [gpu(index) for index in range(GPUS)]
        self.layout = build_layout(config(CONFIGURATION), gpus, Injection())
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        self.registry.apply(self.layout.offer_fact)

    def amounts(self) -> Mapping[str, int]:
        """Return the Node's allocatable amounts, as metagpu writes them."""
        return {
            str(name): number for name, number in allocatable_of(self.registry.snapshot).items()
        }

    def listed(self) -> Mapping[str, int]:
        """Return what the kubelet counts of the lists."""
        return {
            str(name): number for name, number in healthy_shares_of(self.registry.snapshot).items()
        }

    def admit(self, pod: Pod) -> bool:
        """Admit a pod, or count its refusal."""
        assert isinstance(pod, Index)
        admitted = self._admit(pod)
        self.refused[pod.job, pod.index] += not admitted
        return admitted

    def _admit(self, pod: Index) -> bool:
        """Choose and allocate as the kubelet does, and check the account."""
        snapshot, resource = self.registry.snapshot, ResourceName(pod.resource)
        taken = {share.id for shares in self.held.values() for share in shares}
        free = [
            share
            for of, shares in snapshot.offers[resource].by_gpu.items()
            if snapshot.gpus[of].verdict.healthy
            for share in shares
            if share.id not in taken | availability_of(snapshot.gpus[of]).unlisted
        ]
        if len(free) < pod.size:
            return False
        backend = self.layout.backends[resource]
        chosen = tuple(backend.prefer(free, [], pod.size, snapshot))
        if not self._allocated(resource, [share.id for share in chosen]):
            return False
        self.held[pod] = chosen
        self._check({share.gpu for share in chosen})
        return True

    def announce(self, pod: Pod) -> None:
        """Report that a pod is about to end."""
        self.ending.add(pod)
        self._observe()

    def release(self, pod: Pod, now: float) -> None:  # noqa: ARG002 - the model's protocol
        """End a pod at the kubelet."""
        assert isinstance(pod, Index)
        del self.held[pod]
        self.ending.discard(pod)
        self.completed[pod.job][pod.index] += 1

    def advance(self, now: float) -> float:
        """Read what the kubelet lists, and let a GPU fail and come back."""
        self.now = now
        while self._outages and now >= self._outages[0]:
            at, of = self._outages.pop(0), next(iter(self.registry.snapshot.gpus))
            fails = at == OUTAGE[0]
            self.registry.apply(
                GpuFaulted(of, "XID 79", at) if fails else GpuRecovered(of, "", at=at)
            )
        self._observe()
        return self._outages[0] if self._outages else float("inf")

    def use(self) -> float:
        """Return the held part of the GPUs."""
        parts = (
            1.0 if share.resource == WHOLE else 0.01
            for all_ in self.held.values()
            for share in all_
        )
        return sum(parts) / GPUS

    def _allocated(self, resource: ResourceName, ids: list[ShareId]) -> bool:
        service = DevicePluginService(
            resource, self.registry, lambda name: self.layout.backends[name], lambda: self.now
        )
        container = v1beta1.ContainerAllocateRequest(
            devices_ids=[str(share_id) for share_id in ids]
        )
        request = v1beta1.AllocateRequest(container_requests=[container])
        try:
            self.loop.run(service._allocate(bytes(request)))
        except RequestError:
            return False
        return True

    def _check(self, gpus: set[GpuId]) -> None:
        """Check that no share is held twice, and no GPU whole and in parts."""
        held = [share for shares in self.held.values() for share in shares if share.gpu in gpus]
        assert len({share.id for share in held}) == len(held)
        for of in gpus:
            resources = Counter(share.resource for share in held if share.gpu == of)
            assert resources[WHOLE] == 0 or resources == {WHOLE: 1}, resources

    def _observe(self) -> None:
        holders = {s.id: _holder(pod) for pod, shares in self.held.items() for s in shares}
        names = {s.id: s.resource for shares in self.held.values() for s in shares}
        self.registry.apply(
            LeasesObserved(holders, at=self.now, admission_timeout=0, resources=names)
        )
        known = [
            KnownPod(name, "team", name, "Running", terminating=pod in self.ending)
            for pod in self.held
            for name in (_holder(pod).pod,)
        ]
        self.registry.apply(PodsListed(tuple(known)))


def test_all_indexes_of_a_days_jobs_complete() -> None:
    """Each index of 130 Jobs runs to its end once, also the few that were refused."""
    pods = day_of_jobs(random.Random(SEED))  # noqa: S311 - no secret
    with asyncio.Runner() as loop:
        node = MetagpuNode(loop)
        cluster = Cluster(node, delay=0.02, announced=True, back_off=job_back_off)
        cluster.run(pods, 0.0, DRAINED)

    wanted: dict[int, Counter[int]] = defaultdict(Counter)
    for pod in pods:
        wanted[pod.job][pod.index] += 1
    assert node.completed == wanted
    assert node.held == {}
    assert node.refused.total() <= FEW


def day_of_jobs(chance: random.Random) -> list[Index]:
    """Return the pods of Jobs that come through a day: of 100 shares, or of one whole GPU."""
    pods = []
    for job in range(JOBS):
        arrives, indexes = chance.uniform(0, DAY), chance.choice(INDEXES)
        whole = indexes == 1 and chance.random() < 0.5
        resource, size = (str(WHOLE), 1) if whole else (str(PARTS), 100 // indexes)
        pods += [
            Index(
                resource,
                size,
                arrives,
                chance.expovariate(1 / STAY_S),
                False,  # noqa: FBT003 - the model's
                job=job,
                index=number,
            )
            for number in range(indexes)
        ]
    return sorted(pods, key=lambda index: index.arrives)


def _holder(pod: Pod) -> Holder:
    assert isinstance(pod, Index)
    return Holder("team", f"job-{pod.job}-{pod.index}-{pod.failures}", "main")

"""Pods with limits and pods with ResourceClaims race for the last free GPU of a pool.

$ RACES=200 python -m pytest tests/e2e/test_front_races.py -m e2e -s
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import anyio
import pytest

from tests.e2e.claims import pod as claiming_pod
from tests.e2e.claims import resource_claim, shares
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.fake_node import DRIVER, dra_objects, exactly
from tests.e2e.instances import (
    REFUSED,
    MigNode,
    failure,
    generalize,
    healthy_resources,
    is_leaving,
    is_unschedulable,
    mig_node,
    mig_pod,
)
from tests.e2e.rig.api import Api
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_both_fronts import CLAIMS, REFUSED_CLAIM, SETTLED_S
from tests.e2e.test_dra_random_restarts import RESTARTS, await_registered, leave_nothing
from tests.e2e.test_mig_arrivals import running

RACES = int(os.environ.get("RACES") or 21)
"""200 by hand; 21 take a minute."""
POOLS = 7
"""Pools of one GPU, in which the races are side by side: a turn of a front lasts seconds."""
PARTS = "example.com/parts"
PARTS_GPU = POOLS
CONFIGURATION = "version: metagpu/v1\npools:\n" + "".join(
    f"  - {{name: {name}, gpus: {{index: {index}}}, fronts: [device-plugin, dra], "
    f"backends: [{{backend: {backend}, resource: {resource}}}]}}\n"
    for index, name, backend, resource in (
        *((it, f"last-{it}", "whole", f"example.com/last-{it}") for it in range(POOLS)),
        (PARTS_GPU, "parts", "fraction", PARTS),
    )
)
MAY_FAIL = 0.01
"""The part of pods with limits that may lose a race by failing."""
BETWEEN_S = 8.0
"""Seconds between two restarts."""
RACE_S = 240.0
"""For a race: the kubelet asks for a claim again within 90 s at the latest."""
PAUSE_S = 0.1
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture
def shared_node(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[MigNode]:
    """Run the daemon with both fronts, on pools of one GPU each."""
    cluster = Cluster(node, daemon)
    cluster.clear()
    models = f"{{model: a100-40gb, count: {POOLS + 1}}}"
    # The account's options have GPUs too, and the last ones count.
    options = (*account, *daemon.simulate(""))
    with (
        dra_objects(cluster.kubectl),
        mig_node(cluster, CONFIGURATION, models, *options) as it,
    ):
        await_registered(cluster)
        yield it
        leave_nothing(cluster)
    for file in node.paths.cdi.glob("metagpu.io-*.json"):
        file.unlink()  # an uninstallation of later tests leaves nothing


@dataclass(eq=False)
class Pool:
    """A pool of one GPU, and the races for it: a pod of each kind, created at once.

    Attributes:
        uuid: the GPU.
        names: the pods of the present race, by kind, without those that have gone.
        failed: why pods with limits were refused, with their number.
        won: the winners of all races.
    """

    api: Api
    index: int
    uuid: str
    chance: random.Random
    races: int = 0
    names: dict[str, str] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    won: Counter[str] = field(default_factory=Counter)
    _decided: bool = False
    _since: float = 0.0

    @property
    def resource(self) -> str:
        """The resource of pods with limits."""
        return f"example.com/last-{self.index}"

    def begin(self) -> None:
        """Create both pods, in either order."""
        number = f"{self.index}-{self.races}"
        self.names = {"claim": f"claim-{number}", "limits": f"limits-{number}"}
        self.races, self._decided, self._since = self.races + 1, False, time.monotonic()
        cel = f"device.attributes['{DRIVER}'].uuid == '{self.uuid}'"
        request = exactly("gpu", "gpu.metagpu.io", 1, selectors=[{"cel": {"expression": cel}}])
        self.api.call("POST", CLAIMS, resource_claim(self.names["claim"], request))
        pods = [
            claiming_pod(self.names["claim"], self.names["claim"]),
            mig_pod(self.names["limits"], self.resource),
        ]
        self.chance.shuffle(pods)
        for it in pods:
            self.api.create(NAMESPACE, it)

    def step(self, pods: Mapping[str, Document]) -> bool:
        """Do what is due by the pods as they are now; return whether the race is over.

        The winner ends once it runs, and then the loser has to run.
        """
        self.names = {kind: it for kind, it in self.names.items() if it in pods}
        here = {kind: pods[it] for kind, it in self.names.items() if not is_leaving(pods[it])}
        assert time.monotonic() - self._since < RACE_S, f"race for {self.resource}: {here}"
        run = running(here)
        assert len(run) < 2, f"two pods have GPU {self.index}: {self.names}"
        for kind, it in here.items():
            if why := failure(it):
                assert kind == "limits", why
                assert why.startswith(REFUSED), why
                self.failed[generalize(why)] += 1
                self._end(kind)
        for kind in run:
            if not self._decided:
                self.won[kind] += 1
            self._decided = True
            self._end(kind)
        return not self.names

    def _end(self, kind: str) -> None:
        self.api.delete(NAMESPACE, self.names[kind])
        if kind == "claim":
            self.api.call("DELETE", f"{CLAIMS}/{self.names[kind]}")

    def check(
        self,
        claims: Mapping[str, Document],
        amounts: Mapping[str, str],
        healthy: Collection[str],
        pods: Mapping[str, Document],
    ) -> None:
        """Check that neither Node nor kubelet offers a GPU that a ResourceClaim has.

        The claims were read first, then the Node's amounts and the kubelet's devices, then the
        pods.
        """
        claim = claims.get(self.names.get("claim", ""))
        limits = pods.get(self.names.get("limits", ""))
        if claim is None or is_leaving(claim) or "allocation" not in claim.get("status", {}):
            return
        if limits is None or "nodeName" not in limits["spec"]:
            assert amounts[self.resource] == "0", f"{claim['metadata']['name']} has the GPU"
            assert self.resource not in healthy, f"{claim['metadata']['name']} has the GPU"


def races(it: MigNode, api: Api, chance: random.Random, restarts: Sequence[str]) -> Sequence[Pool]:
    """Run all races, with a restart every few seconds; return the pools."""
    cluster, coming = it.cluster, cycle(restarts)
    uuids = [gpu["uuid"] for gpu in cluster.daemon.status()["gpus"]]
    pools = [Pool(api, index, uuids[index], chance) for index in range(POOLS)]
    busy, due = list(pools), time.monotonic() + BETWEEN_S
    for pool in pools:
        pool.begin()
    while busy:
        if restarts and time.monotonic() >= due:
            RESTARTS[next(coming)](cluster)
            await_registered(cluster)
            due = time.monotonic() + BETWEEN_S
        claims = api.objects(CLAIMS)
        amounts = api.call("GET", f"/api/v1/nodes/{cluster.node.name}")["status"]["allocatable"]
        healthy = anyio.run(healthy_resources)
        pods = api.pods(NAMESPACE)
        for pool in tuple(busy):
            pool.check(claims, amounts, healthy, pods)
            if pool.step(pods):
                if sum(each.races for each in pools) < RACES:
                    pool.begin()
                else:
                    busy.remove(pool)
        time.sleep(PAUSE_S)
    return pools


@pytest.mark.timeout(300 + 20 * RACES)
@pytest.mark.parametrize(
    "restarts",
    [
        pytest.param([], id="nothing-restarts"),
        pytest.param(sorted({*RESTARTS} - {"node"}), id="restarts", marks=pytest.mark.long),
    ],
)
def test_fronts_race_for_the_last_gpu(
    shared_node: MigNode, restarts: Sequence[str], record_property: Callable[[str, object], None]
) -> None:
    """One of two pods has it, and the other one waits for its end."""
    began, daemon = time.monotonic(), shared_node.cluster.daemon
    log_from = len(daemon.log)
    with shared_node.cluster.node.api() as api:
        pools = races(shared_node, api, random.Random(28), restarts)  # noqa: S311 - the same ones
    failed = sum((it.failed for it in pools), Counter[str]())
    won = sum((it.won for it in pools), Counter[str]())
    waited = daemon.log[log_from:].count(REFUSED_CLAIM)
    print(
        f"{sum(it.races for it in pools)} races in {time.monotonic() - began:.0f} s, won by "
        f"{dict(won)}; pods failed: {dict(failed)}; claims refused at first: {waited}"
    )
    record_property("failed", failed.total())
    # A kubelet without a plugin refuses what the scheduler still counts.
    assert restarts or failed.total() <= max(1, MAY_FAIL * RACES), failed
    # All pools are in step: each turn of the device plugin may meet a restart.
    assert restarts or len(won) == 2, won
    wait_for("leases to end", lambda: not daemon.status()["leases"], within_s=SETTLED_S)


def capacities(api: Api, uuid: str) -> set[str]:
    """Return the shares that claims may have of a GPU, by its slices."""
    return {
        device["capacity"]["shares"]["value"]
        for it in api.objects(SLICES).values()
        for device in it["spec"].get("devices", ())
        if device["name"].startswith(uuid.lower()) and "shares" in device.get("capacity", {})
    }


def test_a_claim_takes_what_a_pod_leaves(shared_node: MigNode) -> None:
    """Beside a pod of 30 shares a GPU has 70 for claims: one of 70 runs, and one of 71 waits."""
    cluster, kubectl = shared_node.cluster, shared_node.cluster.kubectl
    kubectl.apply(mig_pod("thirty", PARTS, 30))
    cluster.await_running()
    uuid = cluster.daemon.status()["gpus"][PARTS_GPU]["uuid"]
    here = [{"cel": {"expression": f"device.attributes['{DRIVER}'].uuid == '{uuid}'"}}]

    def ask(amount: int) -> None:
        name = f"wants-{amount}"
        kubectl.apply(
            resource_claim(name, shares(amount, selectors=here)), claiming_pod(name, name)
        )

    with cluster.node.api() as api:
        wait_for("the capacity", lambda: capacities(api, uuid) == {"70"}, within_s=SETTLED_S)
        ask(71)
        ask(70)
        wait_for(
            "the claim of 70 shares",
            lambda: running(api.pods(NAMESPACE)) == ["thirty", "wants-70"],
            within_s=SETTLED_S,
        )
        assert is_unschedulable(api.pods(NAMESPACE)["wants-71"])
    leases = cluster.daemon.status()["leases"]
    assert sum(it["shares"] for it in leases if it["gpu"] == PARTS_GPU) == 100

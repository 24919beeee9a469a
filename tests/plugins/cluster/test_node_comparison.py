"""The Node's amounts beside metagpu's lists, at a simulated API server."""

from pathlib import Path

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder
from metagpu.core.state.facts import LeasesObserved, PodsListed, RegistrationProblemFound
from metagpu.plugins.cluster.node_comparison import shown_amounts
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, cluster_at_work
from tests.rigs.build import METAGPU
from tests.rigs.waiting import becomes

SOON = ClusterTiming(difference_after=0.2)
TEXT = f"{METAGPU}: the Node shows 0 allocatable, and metagpu lists 20"


async def test_a_difference_that_stays_is_reported_until_it_ends(tmp_path: Path) -> None:
    """The status has the difference, and one Event; both numbers are named."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 0})

    async with cluster_at_work(tmp_path, Feature.EVENTS, server=server, timing=SOON) as it:
        it.offer()
        await server.until(lambda: [each["note"] for each in server.events()] == [TEXT])
        assert list(it.cluster.report()["nodeDifferences"]) == [METAGPU]

        server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
        await becomes(lambda: not it.cluster.report()["nodeDifferences"])
        assert len(server.events()) == 1


async def test_a_number_that_the_kubelet_may_follow_is_no_difference(tmp_path: Path) -> None:
    """A difference begins again whenever our own number changes."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        await becomes(lambda: it.cluster.report()["connected"])
        comparison = it.connection.comparison

        def wait(listed: int, now: float) -> float:
            (found,) = comparison._track({METAGPU: listed}, {METAGPU: 0}, now).values()
            return found[1]

        assert [wait(20, 0), wait(20, 30), wait(10, 50), wait(10, 110)] == [60, 30, 60, 0]
        assert comparison._track({METAGPU: 0}, {METAGPU: 0}, 120) == {}
        assert wait(10, 130) == 60


async def test_a_resource_that_the_kubelet_lacks_is_reported_as_that(tmp_path: Path) -> None:
    """A resource with a problem at the kubelet has no second one at the Node."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 0})

    async with cluster_at_work(tmp_path, Feature.EVENTS, server=server, timing=SOON) as it:
        it.offer()
        await becomes(lambda: it.cluster.report()["nodeDifferences"])
        it.registry.apply(RegistrationProblemFound(METAGPU, "the kubelet does not read its list"))
        server.label(NODE, {"team": "vision"})
        await becomes(lambda: not it.cluster.report()["nodeDifferences"])


async def test_the_place_that_metagpu_keeps_for_an_arriving_pod_is_right_too(
    tmp_path: Path,
) -> None:
    """The kubelet writes the healthy shares; beside a pod about to end another one may arrive."""
    server = SimApiServer()
    server.add_node(NODE)
    leaving = KnownPod("a", "team", "a", "Running", terminating=True)
    arriving = KnownPod("c", "team", "c", "Pending", requests={METAGPU: 16}, arriving=True)

    async with cluster_at_work(tmp_path, Feature.EVENTS, server=server) as it:
        await becomes(lambda: it.cluster.connection)
        it.registry.apply(PodsListed((leaving, arriving)))
        it.offer()
        shares = list(it.registry.snapshot.offers[METAGPU].shares.values())
        held = {share.id: Holder("team", "a", "main") for share in shares[:2]}
        held |= {share.id: Holder("team", "b", "main") for share in (*shares[2:6], *shares[10:14])}
        it.registry.apply(LeasesObserved(held, at=1))
        comparison = it.connection.comparison

        async def differs(amount: int) -> bool:
            server.report(NODE, {METAGPU: 20}, {METAGPU: amount})
            await becomes(lambda: shown_amounts(comparison.node.object or {}) == {METAGPU: amount})
            return await comparison.reconcile() is not None

        assert [await differs(amount) for amount in (16, 14, 20)] == [False, False, True]

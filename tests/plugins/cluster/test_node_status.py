"""Taint, condition and free amounts of the Node, at a simulated API server."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import anyio
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from structlog.testing import capture_logs

from metagpu.core.availability.reasons import availability_of, count_free
from metagpu.core.model.gpu import Connection, Topology
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import (
    CordonSource,
    Holder,
    OfferTurn,
    ProvisionedState,
    ResourceClaimRef,
    ResourceName,
)
from metagpu.core.model.snapshot import Versions
from metagpu.core.reports.diagnosis import check_driver_upgrade
from metagpu.core.reports.reading import plain_report, read_report
from metagpu.core.reports.schema.daemon import DriverPodReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import (
    BackendAttached,
    BackendResumed,
    BackendSuspended,
    CompetingPluginFound,
    DriverRead,
    Fact,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    GpuUncordoned,
    InstanceFaulted,
    LeasesObserved,
    NodeWithdrawn,
    PodsListed,
    ProvisioningReported,
    RegistrationProblemFound,
    SharesClaimed,
    SharesReleased,
    TopologyRead,
    TurnsChanged,
    UnreadableGpusFound,
)
from metagpu.core.state.registry import Registry
from metagpu.display.status import cluster_problems
from metagpu.plugins.cluster import node_status
from metagpu.plugins.cluster.event_recorder import EventReason
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.node_status import (
    STATE_LABEL,
    DriverUpgradeFollower,
    NodeCordonFollower,
    NodeStatusWriter,
    holding_pods,
    shown_amounts,
    summary,
    upgrade_state,
    watched_state,
)
from metagpu.plugins.cluster.settings import CORDON_PREFIX, ClusterTiming, Feature
from metagpu.plugins.cluster.watch import NodePatcher
from metagpu.sim.apiserver.server import SimApiServer
from tests.core.devices.test_devices import SIZED
from tests.plugins.cluster.rig import NODE, QUICK, SIDE_BY_SIDE, SLICED, Scene, cluster_at_work
from tests.rigs.build import METAGPU, after, gpu, layout_of
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip

FOUR_BACKENDS = """
version: metagpu/v1
pools:
  - name: all
    backends:
      - {backend: fraction, sharesPerGpu: 10}
      - {backend: timeslice, resource: nvidia.com/gpu.shared, replicas: 4}
      - {backend: whole, resource: nvidia.com/gpu}
      - {backend: mps, resource: example.com/mps, unitsPerGpu: 100}
"""
FOUR_NAMES = (METAGPU, SLICED, "nvidia.com/gpu", "example.com/mps")


async def test_startup_taint_goes_when_every_resource_is_shown(tmp_path: Path) -> None:
    """Our taint leaves once the node has all shares, and other taints stay."""
    server = SimApiServer()
    other = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}
    ours = {"key": "metagpu.io/starting", "effect": "NoSchedule"}
    server.add_node(NODE, taints=[other, ours])

    async with cluster_at_work(tmp_path, Feature.TAINT, Feature.LABELS, server=server) as scene:
        scene.offer()
        server.report(NODE, {METAGPU: 10}, {METAGPU: 10})
        await scene.has_labels(nvidia_com__gpu_count="2")
        assert ours in server.node(NODE)["spec"]["taints"]

        server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
        await server.until(lambda: server.node(NODE)["spec"]["taints"] == [other])


async def test_startup_taint_goes_after_an_error_of_the_api_server(tmp_path: Path) -> None:
    """A removal that failed is reported and tried again, though nothing else changes."""
    server = SimApiServer()
    server.add_node(NODE, taints=[{"key": "metagpu.io/starting", "effect": "NoSchedule"}])
    server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
    async with cluster_at_work(tmp_path, Feature.TAINT, server=server) as scene:
        await server.watched(NODES)
        server.fail(500)
        with capture_logs() as logs:
            scene.offer()
            await server.until(lambda: "taints" not in server.node(NODE)["spec"])
            await becomes(lambda: scene.cluster.report().features["taint"] == "")
    assert [each["event"] for each in logs].count("startup taint removed") == 1


async def test_startup_taint_goes_from_a_node_of_resource_claims(tmp_path: Path) -> None:
    """A node whose pools have DRA shows no resource, and is ready without one."""
    server = SimApiServer()
    server.add_node(NODE, taints=[{"key": "metagpu.io/starting", "effect": "NoSchedule"}])
    async with cluster_at_work(tmp_path, Feature.TAINT, server=server) as scene:
        scene.offer(SIZED)
        await server.until(lambda: "taints" not in server.node(NODE)["spec"])


async def test_taints_that_others_change_meanwhile_are_kept(tmp_path: Path) -> None:
    """The list of taints replaces the version that was read, or is read again."""
    server = SimApiServer()
    server.add_node(NODE, taints=[{"key": "metagpu.io/starting", "effect": "NoSchedule"}])
    server.report(NODE, {METAGPU: 20}, {METAGPU: 20})

    async with cluster_at_work(tmp_path, Feature.TAINT, server=server) as scene:
        await server.watched(NODES)
        server.fail(409, reason="Conflict")
        scene.offer()
        await server.until(lambda: [each.method for each in server.requests].count("PATCH") >= 1)
        server.label(NODE, {"team": "vision"})
        await server.until(lambda: "taints" not in server.node(NODE)["spec"])
        assert scene.cluster.report().features["taint"] == ""
        assert [each.method for each in server.requests].count("PATCH") >= 2


async def test_condition_says_which_gpu_is_out_and_why(tmp_path: Path) -> None:
    """A GPU that leaves service is a problem of the node until its recovery."""
    async with cluster_at_work(tmp_path, Feature.CONDITION) as scene:
        scene.offer()

        def said() -> tuple[str, str]:
            found = scene.server.node(NODE)["status"].get("conditions") or [{}]
            return found[0].get("status", ""), found[0].get("message", "")

        await scene.server.until(lambda: said() == ("False", "all 2 GPUs are in service"))
        scene.registry.apply(GpuFaulted(gpu(1).id, "XID 79: fallen off the bus", at=5))
        await scene.server.until(lambda: said()[0] == "True")
        assert said()[1] == f"GPU {gpu(1)}: XID 79: fallen off the bus"

        scene.registry.apply(GpuRecovered(gpu(1).id, "quiet", at=9))
        await scene.server.until(lambda: said()[0] == "False")


async def test_amounts_fall_at_once_and_rise_when_the_kubelet_knows(tmp_path: Path) -> None:
    """A grant lowers the node's allocatable number before the kubelet does."""
    timing = ClusterTiming(raise_delay=0.02)
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20, SLICED: 8}, {METAGPU: 20, SLICED: 8})

    async with cluster_at_work(
        tmp_path, Feature.ALLOCATABLE, server=server, timing=timing
    ) as scene:
        scene.offer(SIDE_BY_SIDE)
        share = next(iter(scene.registry.snapshot.offers[SLICED].shares.values()))

        def free() -> dict[str, str]:
            return dict(server.node(NODE)["status"]["allocatable"])

        scene.registry.apply(SharesClaimed((share,), at=1))
        await server.until(lambda: free() == {METAGPU: "10", SLICED: "8"})

        scene.registry.apply(SharesReleased((share,), at=2))
        await server.until(lambda: free() == {METAGPU: "20", SLICED: "8"})


async def test_an_amount_that_falls_is_written_before_all_else(tmp_path: Path) -> None:
    """A fault lowers the Node's amount at once; its condition follows."""
    timing = ClusterTiming(reconcile_interval=0.0, others_delay=1e6)
    features = Feature.CONDITION, Feature.ALLOCATABLE
    server = SimApiServer()
    server.add_node(NODE)

    async with cluster_at_work(tmp_path, *features, server=server, timing=timing) as scene:
        scene.offer()
        server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
        await server.until(lambda: server.node(NODE)["status"].get("conditions"))
        watched = scene.connection.node
        await becomes(lambda: (watched.object or {})["status"].get("conditions"))
        await anyio.wait_all_tasks_blocked()  # the Node's change has triggered all
        before = len(server.requests)

        scene.registry.apply(GpuFaulted(gpu(1).id, "XID 79: fallen off the bus", at=5))
        await server.until(lambda: server.node(NODE)["status"]["allocatable"][METAGPU] == "10")
        patches = [each for each in server.requests[before:] if each.method == "PATCH"]
        assert "allocatable" in patches[0].body["status"]


async def test_a_daemon_that_withdraws_knows_whether_the_node_shows_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amounts that the kubelet raises count as shown until they are lowered again."""
    patch, go_on = NodePatcher.patch, anyio.Event()

    async def waits(self: NodePatcher, subresource: str, body: Mapping[str, Any]) -> None:
        await go_on.wait()
        await patch(self, subresource, body)

    monkeypatch.setattr(NodePatcher, "patch", waits)
    server = SimApiServer()
    server.add_node(NODE)
    async with cluster_at_work(tmp_path, Feature.ALLOCATABLE, server=server) as scene:
        scene.offer()
        scene.registry.apply(PodsListed((), 0.0))
        scene.registry.apply(NodeWithdrawn(hands_over=True))
        assert not scene.cluster.shows_shares()
        for _ in range(2):
            server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
            await becomes(scene.cluster.shows_shares)
            go_on.set()
            await becomes(lambda: not scene.cluster.shows_shares())
            go_on = anyio.Event()

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as other:
        other.offer()
        other.registry.apply(PodsListed((), 0.0))
        other.registry.apply(NodeWithdrawn(hands_over=True))
        server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
        await becomes(lambda: other.cluster.report().connected)
        assert not other.cluster.shows_shares(), "without the feature metagpu lowers none"


async def test_amounts_rise_though_the_answer_of_the_lowering_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Node may be seen lowered, and the share be released, before the request is answered."""
    patch, late = NodePatcher.patch, [1]

    async def first_is_late(self: NodePatcher, subresource: str, body: Mapping[str, Any]) -> None:
        is_first = late and late.pop()
        await patch(self, subresource, body)
        if is_first:
            await anyio.sleep_forever()

    monkeypatch.setattr(NodePatcher, "patch", first_is_late)
    timing = ClusterTiming(raise_delay=0.0)
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20, SLICED: 8}, {METAGPU: 20, SLICED: 8})

    async with cluster_at_work(
        tmp_path, Feature.ALLOCATABLE, server=server, timing=timing
    ) as scene:
        await server.watched(NODES)
        scene.offer(SIDE_BY_SIDE)
        share = next(iter(scene.registry.snapshot.offers[SLICED].shares.values()))
        scene.registry.apply(SharesClaimed((share,), at=1))
        await server.until(lambda: server.node(NODE)["status"]["allocatable"][METAGPU] == "10")
        scene.registry.apply(SharesReleased((share,), at=2))
        await server.until(lambda: server.node(NODE)["status"]["allocatable"][METAGPU] == "20")


class WrittenNode:
    """A Node that is patched at once; in the place of `NodePatcher`."""

    def __init__(self, amounts: Mapping[str, int]) -> None:
        numbers = {name: str(amount) for name, amount in amounts.items()}
        status = {"capacity": numbers, "allocatable": dict(numbers)}
        self.object = {"metadata": {}, "status": status}
        self.node = self

    @property
    def amounts(self) -> dict[str, str]:
        """The allocatable numbers."""
        return self.object["status"]["allocatable"]

    async def patch(self, _: str, body: Mapping[str, Any]) -> None:
        """Merge allocatable numbers."""
        self.amounts.update(body["status"]["allocatable"])


@pytest.mark.parametrize("known", ["10", "0"], ids=["released", "released, claimed, released"])
async def test_no_change_makes_the_delay_of_another_shorter(known: str) -> None:
    """The kubelet has time for each release, also for one while an earlier one waits."""
    registry, stats = Registry(), KubeletCallStats()
    registry.apply(GpusFound((gpu(0), gpu(1)), at=0))
    registry.apply(layout_of(gpu(0), gpu(1), text=SIDE_BY_SIDE).offer_fact)
    for name in (METAGPU, SLICED):
        stats.of_resource(name).listed = True
    node: Any = WrittenNode({METAGPU: 20, SLICED: 8})
    writer = NodeStatusWriter(node, registry, stats, ClusterTiming(raise_delay=60.0))
    by_gpu = registry.snapshot.offers[SLICED].by_gpu
    first, second = by_gpu[gpu(0).id][0], by_gpu[gpu(1).id][0]

    async def after_delay(*changes: Fact) -> str:
        async with anyio.create_task_group() as group:
            group.start_soon(writer.restore_allocatable)
            await anyio.wait_all_tasks_blocked()
            for change in changes:
                registry.apply(change)
                await anyio.wait_all_tasks_blocked()
            skip(60)
        return str(node.amounts[METAGPU])

    registry.apply(SharesClaimed((first, second), at=1))
    await writer.lower_allocatable()
    registry.apply(SharesReleased((first,), at=2))
    again = (SharesClaimed((first,), at=3), SharesReleased((first,), at=4))
    dip = again if known == "0" else ()
    assert await after_delay(*dip, SharesReleased((second,), at=5)) == known
    assert await after_delay() == "20"


@pytest.mark.parametrize("owner", FOUR_NAMES)
async def test_a_grant_of_any_backend_lowers_all_others(tmp_path: Path, owner: str) -> None:
    """After the grant of an idle GPU the Node has no share of it for other backends."""
    server = SimApiServer()
    server.add_node(NODE)

    async with cluster_at_work(tmp_path, Feature.ALLOCATABLE, server=server) as scene:
        scene.offer(FOUR_BACKENDS)
        offers = scene.registry.snapshot.offers
        assert {*offers} == {*FOUR_NAMES}
        amounts = {str(name): len(offer.shares) for name, offer in offers.items()}
        server.report(NODE, amounts, amounts)
        [first, *_] = offers[ResourceName(owner)].shares.values()
        before = watched_state(scene.registry.snapshot)
        scene.registry.apply(SharesClaimed((first,), at=1))
        assert watched_state(scene.registry.snapshot) != before  # this wakes the writer at once

        left = {name: str(n if name == owner else n // 2) for name, n in amounts.items()}
        await server.until(lambda: server.node(NODE)["status"]["allocatable"] == left)


async def test_shares_that_a_backend_holds_back_are_no_amount(tmp_path: Path) -> None:
    """A pause of single shares and a cordon lower the amounts as a grant does."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 20})

    async with cluster_at_work(tmp_path, Feature.ALLOCATABLE, server=server) as scene:
        scene.offer()

        def free() -> str:
            return str(server.node(NODE)["status"]["allocatable"][METAGPU])

        [share, *_] = scene.registry.snapshot.gpus[gpu(0).id].shares
        paused = ProvisionedState(paused={share.id: "its control daemon fails"})
        scene.registry.apply(
            BackendAttached(gpu(0).id, "fraction", needs_setup=False, needs_cleanup=False, at=1)
        )
        before = watched_state(scene.registry.snapshot)
        scene.registry.apply(ProvisioningReported(gpu(0).id, "fraction", paused, at=1))
        assert watched_state(scene.registry.snapshot) != before
        await server.until(lambda: free() == "19")
        before = watched_state(scene.registry.snapshot)
        scene.registry.apply(GpuCordoned(gpu(1).id, "new fan", at=2))
        assert watched_state(scene.registry.snapshot) != before
        await server.until(lambda: free() == "9")


async def test_amounts_that_the_kubelet_lowered_are_not_raised(tmp_path: Path) -> None:
    """Only numbers that we lowered are ours to raise, and those of the daemon before us."""
    timing = ClusterTiming(raise_delay=0.01)
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 0})

    features = (Feature.ALLOCATABLE, Feature.LABELS)
    async with cluster_at_work(tmp_path, *features, server=server, timing=timing) as scene:
        scene.offer()
        await server.until(lambda: server.node(NODE)["status"]["allocatable"] == {METAGPU: "20"})
        await scene.reads_node()  # else the number is raised once more
        server.report(NODE, {METAGPU: 20}, {METAGPU: 5})
        scene.offer(count=3)
        await scene.has_labels(nvidia_com__gpu_count="3")

        assert server.node(NODE)["status"]["allocatable"] == {METAGPU: "5"}


async def test_amounts_rise_with_a_backend_that_starts_after_its_list(tmp_path: Path) -> None:
    """The kubelet would raise them within 10 s: the shares of MPS wait for control daemons."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 10}, {METAGPU: 0})

    features = (Feature.ALLOCATABLE, Feature.LABELS)
    async with cluster_at_work(tmp_path, *features, server=server) as scene:
        scene.registry.apply(GpusFound((gpu(0),), at=0))
        scene.registry.apply(
            BackendAttached(gpu(0).id, "fraction", needs_setup=True, needs_cleanup=False, at=1)
        )
        scene.offer(count=1)
        await scene.has_labels(nvidia_com__gpu_count="1")
        assert server.node(NODE)["status"]["allocatable"] == {METAGPU: "0"}
        scene.registry.apply(BackendResumed(gpu(0).id, "fraction", at=2))
        await server.until(lambda: server.node(NODE)["status"]["allocatable"] == {METAGPU: "10"})


async def test_a_turn_that_ends_is_counted_no_more(tmp_path: Path) -> None:
    """The Node's number falls while the list is the same, and the next backend's rises."""
    timing = ClusterTiming(raise_delay=0.02)
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 10, SLICED: 4}, {METAGPU: 10, SLICED: 0})

    async with cluster_at_work(
        tmp_path, Feature.ALLOCATABLE, server=server, timing=timing
    ) as scene:
        scene.offer(SIDE_BY_SIDE, count=1)

        def free() -> dict[str, str]:
            return dict(server.node(NODE)["status"]["allocatable"])

        def turn(of: OfferTurn) -> None:
            scene.registry.apply(TurnsChanged({gpu(0).id: of}))

        turn(OfferTurn("fraction", since=0))
        await server.until(lambda: free() == {METAGPU: "10", SLICED: "0"})
        turn(OfferTurn("fraction", since=0, withdrawn=True, next="timeslice"))
        await server.until(lambda: free() == {METAGPU: "0", SLICED: "0"})
        assert not availability_of(scene.registry.snapshot.gpus[gpu(0).id]).unlisted & {
            share.id for share in scene.registry.snapshot.offers[METAGPU].shares.values()
        }

        turn(OfferTurn("timeslice", since=1))
        await server.until(lambda: free() == {METAGPU: "0", SLICED: "4"})


@pytest.mark.parametrize("refused", [False, True])
async def test_a_turn_raises_no_number_of_a_kubelet_without_the_list(
    tmp_path: Path,
    refused: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A kubelet whose stream has ended, or that refused, would reject each pod."""
    timing = ClusterTiming(raise_delay=0.02)
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20, SLICED: 8}, {METAGPU: 0, SLICED: 0})

    async with cluster_at_work(
        tmp_path, Feature.ALLOCATABLE, server=server, timing=timing
    ) as scene:
        scene.offer(SIDE_BY_SIDE, count=2)
        if refused:
            scene.registry.apply(RegistrationProblemFound(METAGPU, "the kubelet refuses it"))
        else:
            scene.call_stats.of_resource(METAGPU).listed = False

        turns = [OfferTurn("fraction", since=0), OfferTurn("timeslice", since=0)]
        scene.registry.apply(TurnsChanged({gpu(n).id: turn for n, turn in enumerate(turns)}))
        await server.until(lambda: allocatable(server)[SLICED] == "4")
        assert allocatable(server)[METAGPU] == "0"


async def test_a_deleted_pod_lowers_the_amount_before_its_end(tmp_path: Path) -> None:
    """The scheduler counts a pod's shares as free at its end: what nobody can have is gone."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
    features = (Feature.ALLOCATABLE, Feature.PODS)

    async with cluster_at_work(tmp_path, *features, server=server) as scene:
        scene.offer()
        shares = list(scene.registry.snapshot.offers[METAGPU].shares.values())
        holders = {
            share.id: Holder("team", name, "main")
            for name, held in {"a": shares[:2], "b": shares[2:6], "c": shares[10:14]}.items()
            for share in held
        }
        server.add_pod("team", "a", NODE, uid="a")
        scene.registry.apply(LeasesObserved(holders, at=1))

        def free() -> str:
            return str(server.node(NODE)["status"]["allocatable"][METAGPU])

        await server.until(lambda: free() == "16")
        deleted = {"metadata": {"deletionTimestamp": "2026-11-21T12:00:00Z"}}
        server.store.merge(("pods", "team", "a"), deleted, status=False, manager="kubectl")
        await server.until(lambda: free() == "14")


def allocatable(server: SimApiServer) -> dict[str, str]:
    """Return the Node's allocatable numbers."""
    return dict(server.node(NODE)["status"]["allocatable"])


SOON = ClusterTiming(difference_after=0.2)
TEXT = f"{METAGPU}: the Node shows 0 allocatable, and metagpu lists 20"


async def test_a_difference_that_stays_is_reported_until_it_ends(tmp_path: Path) -> None:
    """The status has the difference, and one Event; both numbers are named."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 0})

    async with cluster_at_work(tmp_path, Feature.EVENTS, server=server, timing=SOON) as scene:
        scene.offer()
        await server.until(lambda: [each["note"] for each in server.events()] == [TEXT])
        assert list(scene.cluster.report().node_differences) == [METAGPU]

        server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
        await becomes(lambda: not scene.cluster.report().node_differences)
        assert len(server.events()) == 1


async def test_a_number_that_the_kubelet_may_follow_is_no_difference(tmp_path: Path) -> None:
    """A difference begins again whenever our own number changes."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as scene:
        await becomes(lambda: scene.cluster.report().connected)
        comparison = scene.connection.comparison

        def wait(listed: int, now: float) -> float:
            (found,) = comparison._track({METAGPU: listed}, {METAGPU: 0}, now).values()
            return found[1]

        assert [wait(20, 0), wait(20, 30), wait(10, 50), wait(10, 110)] == [60, 30, 60, 0]
        assert comparison._track({METAGPU: 0}, {}, 120) == {}
        assert wait(10, 130) == 60


async def test_a_resource_that_the_kubelet_lacks_is_reported_as_that(tmp_path: Path) -> None:
    """A resource with a problem at the kubelet has no second one at the Node."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 0})

    async with cluster_at_work(tmp_path, Feature.EVENTS, server=server, timing=SOON) as scene:
        scene.offer()
        await becomes(lambda: scene.cluster.report().node_differences)
        scene.registry.apply(
            RegistrationProblemFound(METAGPU, "the kubelet does not read its list")
        )
        server.label(NODE, {"team": "vision"})
        await becomes(lambda: not scene.cluster.report().node_differences)


async def test_the_place_that_metagpu_keeps_for_an_arriving_pod_is_right_too(
    tmp_path: Path,
) -> None:
    """The kubelet writes the healthy shares; beside a pod about to end another one may arrive."""
    server = SimApiServer()
    server.add_node(NODE)
    leaving = KnownPod("a", "team", "a", "Running", terminating=True)
    arriving = KnownPod("c", "team", "c", "Pending", requests={METAGPU: 16}, arriving=True)

    async with cluster_at_work(tmp_path, Feature.EVENTS, server=server) as scene:
        await becomes(lambda: scene.cluster.connection)
        scene.registry.apply(PodsListed((leaving, arriving)))
        scene.offer()
        shares = list(scene.registry.snapshot.offers[METAGPU].shares.values())
        held = {share.id: Holder("team", "a", "main") for share in shares[:2]}
        held |= {share.id: Holder("team", "b", "main") for share in (*shares[2:6], *shares[10:14])}
        scene.registry.apply(LeasesObserved(held, at=1))
        comparison = scene.connection.comparison

        async def differs(amount: int) -> bool:
            server.report(NODE, {METAGPU: 20}, {METAGPU: amount})
            await becomes(lambda: shown_amounts(comparison.node.object or {}) == {METAGPU: amount})
            return await comparison.reconcile() is not None

        assert [await differs(amount) for amount in (16, 14, 20)] == [False, False, True]


def annotate(scene: Scene, **values: str | None) -> None:
    """Write annotations of the Node, as a person does; `_` stands for `-`."""
    keys = {f"{CORDON_PREFIX}{key.removeprefix('n')}": value for key, value in values.items()}
    patch = {"metadata": {"annotations": keys}}
    scene.server.store.merge(("nodes", "", NODE), patch, status=False, manager="kubectl")


def reasons(scene: Scene) -> list[str | None]:
    """Return why each GPU is cordoned by the Node."""
    states = scene.registry.snapshot.gpus.values()
    found = [state.cordons.get(CordonSource.NODE) for state in states]
    return [None if pause is None else pause.reason for pause in found]


async def test_annotations_cordon_gpus_and_their_removal_ends_that(tmp_path: Path) -> None:
    """A GPU is cordoned while its annotation is there; each source lifts its own cordon."""
    async with cluster_at_work(tmp_path, Feature.CORDON, timing=QUICK) as scene:
        scene.offer()
        annotate(scene, n1="replace  the fan", n7="no such GPU")
        await becomes(lambda: reasons(scene) == [None, "replace the fan"])
        scene.registry.apply(GpuCordoned(gpu(1).id, "mine", time.time()))
        annotate(scene, n1="", n0="both")
        await becomes(lambda: reasons(scene) == ["both", "no reason was given"])
        annotate(scene, n1=None, n0=None)
        await becomes(lambda: reasons(scene) == [None, None])
        assert [state.cordon is not None for state in scene.registry.snapshot.gpus.values()] == [
            *(False, True)
        ]
        scene.registry.apply(GpuUncordoned(gpu(1).id, time.time()))
        assert not any(state.cordon for state in scene.registry.snapshot.gpus.values())


async def test_a_gpu_that_comes_later_is_cordoned_too(tmp_path: Path) -> None:
    """An annotation that is older than the GPU cordons it as soon as it is found."""
    async with cluster_at_work(tmp_path, Feature.CORDON, timing=QUICK) as scene:
        annotate(scene, n0="early")
        scene.offer()
        await becomes(lambda: reasons(scene) == ["early", None])


async def test_without_the_feature_annotations_mean_nothing(tmp_path: Path) -> None:
    """A daemon without the feature follows no annotation."""
    async with cluster_at_work(tmp_path, Feature.LABELS, timing=QUICK) as scene:
        annotate(scene, n0="ignored")
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        assert reasons(scene) == [None, None]


PAUSED: Final = "paused-for-driver-upgrade"


@pytest.mark.parametrize(
    ("value", "under_way"),
    [
        ("", False),
        ("upgrade-required", False),
        ("cordon-required", True),
        ("wait-for-jobs-required", True),
        ("pod-deletion-required", True),
        ("drain-required", True),
        ("node-maintenance-required", True),
        ("post-maintenance-required", True),
        ("pod-restart-required", True),
        ("upgrade-failed", True),
        ("validation-required", False),
        ("uncordon-required", False),
        ("upgrade-done", False),
        ("a-state-of-tomorrow", False),
    ],
)
def test_an_upgrade_is_under_way_while_the_old_driver_has_to_go(
    value: str, *, under_way: bool
) -> None:
    """Every state of the operator's label is decided; the validator finds shares again."""
    assert upgrade_state({STATE_LABEL: value}) == (f"{STATE_LABEL}={value}" if under_way else "")


@pytest.mark.parametrize("value", [PAUSED, f"container_{PAUSED}"])
def test_paused_operands_are_an_upgrade_without_the_operators_label(value: str) -> None:
    """A driver container pauses the operands itself where no upgrade controller runs."""
    labels = {STATE_LABEL: "upgrade-done", "nvidia.com/gpu.deploy.dcgm": value}

    assert upgrade_state(labels) == f"nvidia.com/gpu.deploy.dcgm={value}"
    assert upgrade_state({"nvidia.com/gpu.deploy.dcgm": "paused-for-mig-change"}) == ""
    assert upgrade_state({"example.com/team": PAUSED}) == ""


def free_shares(scene: Scene) -> int:
    """Return how many shares the kubelet could give."""
    snapshot = scene.registry.snapshot
    return sum(count_free(state, METAGPU) for state in snapshot.gpus.values())


def node_events(scene: Scene) -> list[tuple[str, str, str]]:
    """Return type, reason and note of each Event about a driver upgrade, in order."""
    return [
        (each["type"], each["reason"], each["note"])
        for each in scene.server.events()
        if "DriverUpgrade" in each["reason"]
    ]


async def test_shares_are_withdrawn_and_the_pods_in_the_way_named(tmp_path: Path) -> None:
    """From the label on no share is free, held ones stay, and Events name who holds the driver."""
    features = (Feature.EVENTS, Feature.POD_EVENTS)
    async with cluster_at_work(
        tmp_path, *features, drain_on_driver_upgrade=True, timing=QUICK
    ) as scene:
        scene.server.label(NODE, {STATE_LABEL: "upgrade-required"})
        scene.offer()
        shares = scene.registry.snapshot.offers[METAGPU].shares
        held = next(iter(shares))
        scene.registry.apply(LeasesObserved({held: Holder("team", "alice", "main")}, at=1))
        scene.registry.apply(PodsListed((KnownPod("u1", "team", "alice"),)))
        await scene.cluster.wait_for_choice()
        assert free_shares(scene) == 19

        scene.server.label(NODE, {STATE_LABEL: "pod-deletion-required"})
        await becomes(lambda: free_shares(scene) == 0)
        state = scene.registry.snapshot.gpus[gpu(0).id]
        assert held not in availability_of(state).unlisted
        assert scene.registry.snapshot.gpus[gpu(1).id].cordon is not None
        report = scene.cluster.report().present_upgrade
        assert report is not None
        assert report.pods == [DriverPodReport("team/alice", seen_by_operator=False)]
        cluster = {"cluster": plain_report(scene.cluster.report())}
        assert check_driver_upgrade(read_report(cluster, StatusReport))[0] == "warning"
        assert report.summary in cluster_problems(scene.cluster.report())

        scene.server.label(NODE, {STATE_LABEL: "validation-required"})
        await becomes(lambda: free_shares(scene) == 19)
        assert scene.cluster.report().driver_upgrade is None

        await scene.server.until(lambda: len(node_events(scene)) == 3)
        advice = (
            "the GPU operator upgrades the driver of this node. The pod holds the driver through "
            "its GPU, and the upgrade waits for the pod's end, or fails: delete the pod, or drain "
            "the node"
        )
        assert sorted(node_events(scene)) == [
            (
                "Normal",
                "DriverUpgradeEnded",
                "the driver upgrade is over, and the GPUs give shares again",
            ),
            ("Warning", "DriverUpgradeUnderWay", report.summary),
            ("Warning", "GPUDriverUpgrade", advice),
        ]
        assert report.summary == (
            "the GPU operator upgrades the driver of this node "
            f"({STATE_LABEL}=pod-deletion-required), and no GPU gives new shares; these pods hold "
            "the driver: team/alice (the operator does not see it)"
        )


async def test_an_operators_cordon_outlasts_the_upgrade(tmp_path: Path) -> None:
    """The end of an upgrade ends its own cordon alone; without the option nothing follows it."""
    async with cluster_at_work(tmp_path, drain_on_driver_upgrade=True, timing=QUICK) as cluster:
        cluster.server.label(NODE, {STATE_LABEL: "drain-required"})
        cluster.offer()
        cluster.registry.apply(GpuCordoned(gpu(0).id, "fan", at=1))
        await becomes(lambda: free_shares(cluster) == 0)
        cluster.server.label(NODE, {STATE_LABEL: "upgrade-done"})
        await becomes(lambda: free_shares(cluster) == 10)
        assert cluster.registry.snapshot.gpus[gpu(0).id].cordons.keys() == {CordonSource.OPERATOR}

    async with cluster_at_work(tmp_path, Feature.LABELS, timing=QUICK) as scene:
        scene.server.label(NODE, {STATE_LABEL: "drain-required"})
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        assert (free_shares(scene), scene.cluster.report().driver_upgrade) == (20, UNSET)


def test_a_sentence_names_a_few_pods() -> None:
    """A node has more pods than a sentence: the rest is a number, and no pods is said too."""
    many = {f"team/{number}": number % 2 == 0 for number in range(10)}

    assert "team/0, team/1 (the operator does not see it)" in summary("x=y", many)
    assert summary("x=y", many).endswith("team/7 (the operator does not see it), 2 more")
    assert summary("x=y", {}).endswith("; no pod holds the driver")


async def test_a_node_that_is_not_read_is_no_difference(tmp_path: Path) -> None:
    """A Node that was read last hours ago is compared with nothing."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 0})
    async with cluster_at_work(tmp_path, Feature.EVENTS, server=server) as scene:
        scene.offer()
        await becomes(lambda: scene.cluster.report().connected)
        comparison = scene.connection.comparison
        assert await comparison.reconcile() is not None
        comparison.node.problem = "away"
        assert await comparison.reconcile() is None


BASE: Final = after(GpusFound((gpu(0), gpu(1)), at=0), layout_of(gpu(0), gpu(1)).offer_fact)


@pytest.mark.parametrize(
    "fact",
    [
        GpuFaulted(gpu(0).id, "XID 79", at=1),
        InstanceFaulted(gpu(0).id, "MIG-x", "XID 94", 1),
        BackendSuspended(gpu(0).id, "mig", "reset it", at=1, until_reset=True),
        UnreadableGpusFound({2: "GPU 2: it hangs"}, at=1),
        TopologyRead(Topology({frozenset((gpu(0).id, gpu(1).id)): Connection(nvlinks=4)})),
        DriverRead(Versions("580.1", (13, 0))),
        CompetingPluginFound(METAGPU, "a.sock"),
        PodsListed((KnownPod("a", "team", "a", "Running", terminating=True),)),
        PodsListed((KnownPod("a", "team", "a", requests={METAGPU: 1}, arriving=True),)),
        NodeWithdrawn(hands_over=False),
    ],
    ids=lambda fact: type(fact).__name__,
)
def test_whatever_the_node_shows_is_watched(fact: Fact) -> None:
    """Labels, conditions, taint and amounts follow each fact that they are computed from."""
    assert watched_state(after(fact, since=BASE)) != watched_state(BASE)


def test_a_node_that_is_away_changes_no_cordon() -> None:
    """The Node as it was read last holds; a GPU that is not found yet decides nothing."""
    registry = Registry()
    upgrade = DriverUpgradeFollower(registry, lambda *_, **__: None)
    cordons = NodeCordonFollower(registry)
    labels, annotations = {STATE_LABEL: "drain-required"}, {f"{CORDON_PREFIX}0": "x" * 300}
    found = {"metadata": {"labels": labels, "annotations": annotations}}
    with capture_module_logs(node_status) as lines:
        for follower in (upgrade, cordons):
            follower.follow(found)
            assert not follower.decided.is_set()
    assert [line["event"] for line in lines] == ["driver upgrade under way"]
    registry.apply(GpusFound((gpu(0),), at=0))
    for follower in (upgrade, cordons):
        follower.follow(found)
        follower.follow(None)
        assert follower.decided.is_set()
    state = registry.snapshot.gpus[gpu(0).id]
    assert state.cordons.keys() == {CordonSource.NODE, CordonSource.DRIVER_UPGRADE}
    assert state.cordons[CordonSource.NODE].reason == "x" * 200


def test_each_step_of_an_upgrade_is_an_event() -> None:
    """The label of the operator goes through its states; without pods none is a warning."""
    found: list[tuple[str, bool]] = []

    def record(reason: EventReason, note: str, action: str, *, warning: bool = False) -> None:
        assert note
        assert action
        found.append((reason, warning))

    follower = DriverUpgradeFollower(Registry(), record)
    for state in ("cordon-required", "cordon-required", "drain-required", "upgrade-done"):
        follower.follow({"metadata": {"labels": {STATE_LABEL: state}}})
    assert found == [
        ("DriverUpgradeUnderWay", False),
        ("DriverUpgradeUnderWay", False),
        ("DriverUpgradeEnded", False),
    ]


def test_the_operator_sees_a_pod_by_one_of_its_shares() -> None:
    """The operator evicts pods with NVIDIA's resource names, whatever else they hold."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: whole, resource: nvidia.com/gpu}]}\n"
        "  - {name: b, backends: [{backend: fraction, sharesPerGpu: 10}]}\n"
    )
    gpus = gpu(0), gpu(1)
    snapshot = after(GpusFound(gpus, at=0), layout_of(*gpus, text=text).offer_fact)
    first, second = (state.shares for state in snapshot.gpus.values())
    both, own = Holder("team", "both", "main"), Holder("team", "own", "main")
    holders = {first[0].id: both, second[0].id: both, second[1].id: own}
    held = after(LeasesObserved(holders, at=1), since=snapshot)
    assert holding_pods(held) == {"team/both": True, "team/own": False}

    claim = ResourceClaimRef("team", "claim", "uid")
    state = held.gpus[gpu(0).id]
    leases = {share: replace(lease, resource_claim=claim) for share, lease in state.leases.items()}
    state = replace(state, leases=MappingProxyType(leases))
    claimed = replace(held, gpus=MappingProxyType({**held.gpus, gpu(0).id: state}))
    assert holding_pods(claimed) == {"team/both": False, "team/own": False}

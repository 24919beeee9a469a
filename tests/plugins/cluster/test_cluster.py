"""The node's reports to its cluster, and the configuration from there, over HTTP."""

from pathlib import Path

import anyio
import pytest

from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    BackendSuspended,
    GpuFaulted,
    GpuRecovered,
    InstanceFaulted,
    InstanceRecovered,
    LeasesObserved,
    NodeWithdrawn,
)
from metagpu.plugins.cluster import cluster, connection, node_status, reconciler
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.settings import ALL_FEATURES, ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import CONFIG_MAP, NODE, cluster_at_work
from tests.rigs.build import METAGPU, gpu
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip


async def test_api_server_that_is_away_is_logged_once_and_found_again(tmp_path: Path) -> None:
    """An outage is one log line; old state stays, new state comes later."""
    server = SimApiServer()
    with capture_module_logs(reconciler) as lines:
        async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
            scene.offer()
            await scene.has_labels(nvidia_com__gpu_count="2")
            server.fail(503, times=3)
            scene.offer(count=3)
            await scene.has_labels(nvidia_com__gpu_count="3")

    events = [line["event"] for line in lines]
    assert events.count("reconciliation failed") == 1


async def test_right_that_is_missing_is_named(tmp_path: Path) -> None:
    """The status names a feature without its right; other features work."""
    server = SimApiServer()
    server.denied.append(("PATCH", "/status"))

    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        await becomes(lambda: scene.cluster.report().features["condition"])

        assert scene.cluster.report().features["condition"] == (
            'the API server does not allow it: User "sim" cannot patch '
            f"/api/v1/nodes/{NODE}/status; docs/permissions.md has the rule to add, or remove the "
            "feature from --cluster"
        )
        assert scene.cluster.report().features["labels"] == ""


async def test_fault_of_ours_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected exception is logged, and all features restart."""
    failing = True

    def broken(snapshot: Snapshot) -> object:
        if failing:
            raise KeyError("unforeseen")
        return node_status.watched_state(snapshot)

    monkeypatch.setattr(connection, "watched_state", broken)
    with capture_module_logs(cluster) as lines:
        async with cluster_at_work(
            tmp_path, Feature.LABELS, timing=ClusterTiming(restart_delay=600.0)
        ) as scene:
            await becomes(lambda: lines)
            await anyio.sleep(0.2)
            assert len(lines) == 1
            failing = False
            skip(600)
            scene.offer()
            await scene.has_labels(nvidia_com__gpu_count="2")

    assert lines[0]["event"] == "cluster features failed; restarting"


async def test_health_changes_are_events(tmp_path: Path) -> None:
    """A GPU that leaves service, and its return, are Events of the node."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as scene:
        scene.offer()
        await scene.server.watched(NODES)
        scene.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
        scene.registry.apply(GpuRecovered(gpu(0).id, "acknowledged", at=2))
        await scene.server.until(lambda: len(scene.server.events()) == 2)

        events = [(e["reason"], e["type"], e["note"]) for e in scene.server.events()]
        assert events == [
            ("GPUUnhealthy", "Warning", f"GPU {gpu(0)}: XID 79"),
            ("GPURecovered", "Normal", f"GPU {gpu(0)}: acknowledged"),
        ]


async def test_connection_and_dropped_events_are_reported(tmp_path: Path) -> None:
    """The connection starts as down; dropped Events are counted."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as scene:
        assert not scene.cluster.report().connected
        await becomes(lambda: scene.cluster.report().connected)

        scene.cluster.parts.node_events.recorder.dropped = 3
        assert scene.cluster.report().events_dropped == 3
        assert scene.cluster.report().pod_events_dropped == 0


async def test_a_needed_reset_is_reported_with_its_command(tmp_path: Path) -> None:
    """An Event has the reset command, also for an earlier fault; others are no Events."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as scene:
        scene.offer()
        await scene.server.watched(NODES)
        first, second = gpu(0).id, gpu(1).id
        scene.registry.apply(BackendSuspended(first, "mig", "MIG mode is off", at=1))
        scene.registry.apply(BackendSuspended(first, "mig", "reset it", at=2, until_reset=True))
        scene.registry.apply(InstanceFaulted(second, "MIG-x", "XID 94", at=3))
        scene.registry.apply(InstanceRecovered(second, "MIG-x", "it was removed", at=4))
        await scene.server.until(lambda: len(scene.server.events()) == 3)

        events = [(e["reason"], e["type"], e["note"]) for e in scene.server.events()]
        assert events == [
            ("GPUResetNeeded", "Warning", f"GPU {gpu(0)}: reset it"),
            ("MIGDeviceUnhealthy", "Warning", f"GPU {gpu(1)}: MIG device MIG-x alone: XID 94"),
            ("MIGDeviceRecovered", "Normal", f"GPU {gpu(1)}: MIG device MIG-x: it was removed"),
        ]


async def test_a_daemon_without_the_node_writes_its_own_events_alone(tmp_path: Path) -> None:
    """A daemon that waits follows its profile, to be ready once the one before it ends."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "a"})
    server.configure(*CONFIG_MAP, {"a": "A"})
    features = ALL_FEATURES | {Feature.FREE_LABELS}
    async with cluster_at_work(
        tmp_path, *features, server=server, config_map=CONFIG_MAP, taken=False
    ) as scene:
        scene.offer()
        await server.until(server.events)
        server.label(NODE, {"team": "vision"})  # triggers all that runs
        await scene.reads_node()
        await anyio.sleep(0.2)
        assert {
            each.target.rpartition("/")[2] for each in server.requests if each.method != "GET"
        } == {"events"}
        assert not any("/pods" in each.target for each in server.requests)
        scene.taken.set()
        await scene.has_labels(nvidia_com__gpu_count="2")


@pytest.mark.parametrize("waits", [False, True])
async def test_a_daemon_that_hands_over_leaves_the_labels(tmp_path: Path, *, waits: bool) -> None:
    """The next daemon writes the same labels, and pods are placed by them meanwhile."""
    async with cluster_at_work(tmp_path, Feature.LABELS, remove_labels=True) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        scene.registry.apply(NodeWithdrawn(hands_over=waits))
    assert ("nvidia.com/gpu.count" in scene.server.labels(NODE)) is waits


async def test_a_daemon_without_the_node_removes_no_label(tmp_path: Path) -> None:
    """The labels are those of the daemon that has the node."""
    async with cluster_at_work(tmp_path, Feature.LABELS) as first:
        first.offer()
        await first.has_labels(nvidia_com__gpu_count="2")
    async with cluster_at_work(
        tmp_path, Feature.LABELS, server=first.server, remove_labels=True, taken=False
    ) as second:
        await becomes(lambda: second.cluster.report().connected)
    assert first.server.labels(NODE)["nvidia.com/gpu.count"] == "2"


async def test_a_label_that_cannot_be_removed_keeps_no_condition(tmp_path: Path) -> None:
    """One removal that fails ends no other."""
    async with cluster_at_work(
        tmp_path, Feature.LABELS, Feature.CONDITION, remove_labels=True
    ) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        await scene.server.until(lambda: scene.server.node(NODE)["status"].get("conditions"))
        await scene.reads_node()
        scene.server.fail(500)
    assert scene.server.labels(NODE)["nvidia.com/gpu.count"] == "2"
    assert scene.server.node(NODE)["status"]["conditions"] == []


async def test_a_lost_connection_is_reported(tmp_path: Path) -> None:
    """A Node that is not watched any more is no connection."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as scene:
        await becomes(lambda: scene.cluster.report().connected)
        await scene.server.watched(NODES)
        scene.server.failing.append(("GET", "/nodes"))
        scene.server.end_watches()
        await becomes(lambda: not scene.cluster.report().connected)
        assert "answers 503" in scene.cluster.report().problem
        scene.server.failing.clear()
        await becomes(lambda: scene.cluster.report().connected)


@pytest.mark.parametrize(
    ("unread", "problem"),
    [
        ("/nodes", 'the API server does not allow it: User "sim" cannot get /api/v1/nodes'),
        ("/configmaps", "the node's profile is not known yet"),
    ],
)
async def test_a_daemon_says_what_it_waits_for(tmp_path: Path, unread: str, problem: str) -> None:
    """A rollout stops at a daemon that is not ready, with its reason."""
    server = SimApiServer()
    server.denied.append(("GET", unread))
    async with cluster_at_work(
        tmp_path, Feature.CONFIG, server=server, config_map=CONFIG_MAP
    ) as scene:
        assert scene.cluster.preparation_problem == "it has not answered yet"
        await becomes(lambda: scene.cluster.preparation_problem.startswith(problem))
        report = scene.cluster.report
        await becomes(lambda: "cannot get" in report().problem + report().features["config"])
        server.denied.clear()
        await becomes(lambda: not scene.cluster.preparation_problem)


async def test_a_start_waits_once_for_an_api_server_that_is_away(tmp_path: Path) -> None:
    """The time counts from the first attempt, however late the first offer is."""
    server = SimApiServer()
    server.denied.append(("GET", "/nodes"))
    async with cluster_at_work(
        tmp_path, Feature.CONFIG, Feature.CORDON, server=server, choice_timeout=1e6
    ) as scene:
        await becomes(lambda: scene.cluster.connection and scene.connection.node.problem)
        skip(1e6)
        with anyio.fail_after(20):
            await scene.cluster.wait_for_choice()


@pytest.mark.parametrize("last", ["cordons", "upgrade_follower"])
async def test_a_start_waits_for_what_the_node_says(tmp_path: Path, last: str) -> None:
    """A Node that was read names cordons and upgrades, which the GPUs follow before their offer."""
    followed = anyio.Event()
    async with cluster_at_work(
        tmp_path, Feature.CORDON, drain_on_driver_upgrade=True, choice_timeout=1e6
    ) as scene:

        async def start() -> None:
            await scene.cluster.wait_for_choice()
            followed.set()

        await becomes(lambda: scene.cluster.report().connected)
        skip(1e6)
        async with anyio.create_task_group() as group:
            group.start_soon(start)
            for name in sorted(("cordons", "upgrade_follower"), key=lambda each: each == last):
                await anyio.sleep(0.1)
                assert not followed.is_set()
                getattr(scene.cluster.parts, name).decided.set()
            await followed.wait()


async def test_each_feature_reports_its_own_problem(tmp_path: Path) -> None:
    """A right that is missing is named where it is, as long as it is."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
    server.denied += [("PATCH", "/status"), ("POST", "/events")]
    features = (Feature.EVENTS, Feature.POD_EVENTS, Feature.ALLOCATABLE)
    timing = ClusterTiming(raise_delay=1e6)
    async with cluster_at_work(tmp_path, *features, server=server, timing=timing) as scene:
        await server.watched(NODES)
        scene.offer()
        [share, *_] = scene.registry.snapshot.gpus[gpu(0).id].shares
        scene.registry.apply(LeasesObserved({share.id: Holder("team", "alice", "main")}, at=1))
        scene.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))

        def problems() -> list[str]:
            return [problem for problem in scene.cluster.report().features.values() if problem]

        await becomes(lambda: len(problems()) == len(features))
        server.denied.clear()
        await becomes(lambda: not problems())

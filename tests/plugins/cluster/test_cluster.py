"""The node's reports to its cluster, and the configuration from there, over HTTP."""

from pathlib import Path

import pytest

from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    BackendSuspended,
    GpuFaulted,
    GpuRecovered,
    InstanceFaulted,
    InstanceRecovered,
)
from metagpu.plugins.cluster import cluster, connection, node_status, reconciler
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, cluster_at_work
from tests.rigs.build import gpu
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes


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
            tmp_path, Feature.LABELS, timing=ClusterTiming(restart_delay=0.01)
        ) as scene:
            await becomes(lambda: lines)
            failing = False
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

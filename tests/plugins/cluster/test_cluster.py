"""What a node tells its cluster, and how it hears of its configuration: over HTTP, both ways."""

from pathlib import Path

import pytest

from metagpu.core.facts import (
    BackendSuspended,
    GpuFaulted,
    GpuRecovered,
    InstanceFaulted,
    InstanceRecovered,
)
from metagpu.core.snapshot import Snapshot
from metagpu.plugins import cluster
from metagpu.plugins.cluster import chore, telling
from metagpu.plugins.cluster.settings import Feature
from metagpu.sim.apiserver import SimApiServer
from tests.build import gpu
from tests.heard import heard
from tests.plugins.cluster.rig import NODE, cluster_at_work
from tests.waiting import becomes


async def test_api_server_that_is_away_is_told_once_and_found_again(tmp_path: Path) -> None:
    """While nobody answers, one line says so; what was known stays, and what is new comes later."""
    server = SimApiServer()
    with heard(chore) as lines:
        async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
            it.offer()
            await it.has_labels(nvidia_com__gpu_count="2")
            server.fail(503, times=3)
            it.offer(count=3)
            await it.has_labels(nvidia_com__gpu_count="3")

    told = [line["event"] for line in lines]
    assert told.count("not done at the API server; trying again") == 1


async def test_right_that_is_missing_is_named(tmp_path: Path) -> None:
    """A feature without its right says so in the status, and hinders no other."""
    server = SimApiServer()
    server.denied.append(("PATCH", "/status"))

    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION, server=server) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        await becomes(lambda: it.cluster.report()["uses"]["condition"])

        assert it.cluster.report()["uses"]["condition"] == (
            'the API server does not allow it: User "sim" cannot patch '
            f"/api/v1/nodes/{NODE}/status; docs/permissions.md has the rule to add, or take the "
            "use out of --cluster"
        )
        assert it.cluster.report()["uses"]["labels"] == ""


async def test_fault_of_ours_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody foresaw is logged, and all of it starts anew."""
    monkeypatch.setattr(cluster, "ANEW", 0.01)
    failing = True

    def broken(snapshot: Snapshot) -> object:
        if failing:
            raise KeyError("unforeseen")
        return telling.look(snapshot)

    monkeypatch.setattr(cluster, "look", broken)
    with heard(cluster) as lines:
        async with cluster_at_work(tmp_path, Feature.LABELS) as it:
            await becomes(lambda: lines)
            failing = False
            it.offer()
            await it.has_labels(nvidia_com__gpu_count="2")

    assert lines[0]["event"] == "the API server's side failed; it starts anew"


async def test_health_is_told_as_events(tmp_path: Path) -> None:
    """A GPU that goes out of service, and its return, are Events of the node."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        it.offer()
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        it.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
        it.registry.apply(GpuRecovered(gpu(0).id, "acknowledged", at=2))
        await it.server.until(lambda: len(it.server.events()) == 2)

        told = [(e["reason"], e["type"], e["note"]) for e in it.server.events()]
        assert told == [
            ("GPUOutOfService", "Warning", f"GPU {gpu(0)}: XID 79"),
            ("GPUBackInService", "Normal", f"GPU {gpu(0)}: acknowledged"),
        ]


async def test_connection_and_dropped_events_are_told(tmp_path: Path) -> None:
    """Not connected before it is; and what was dropped before a new beginning stays counted."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        assert not it.cluster.report()["connected"]
        await becomes(lambda: it.cluster.report()["connected"])

        recorder = it.cluster._recorder
        assert recorder is not None
        recorder.dropped = 3
        it.cluster._arranged(recorder.client)
        assert it.cluster.report()["eventsDropped"] == 3
        assert it.cluster.report()["podEventsDropped"] == 0


async def test_a_reset_that_is_needed_is_told_with_its_command(tmp_path: Path) -> None:
    """Also if it was before the API server was there; other suspensions are no Events."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        it.offer()
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        first, second = gpu(0).id, gpu(1).id
        it.registry.apply(BackendSuspended(first, "mig", "MIG mode is off", at=1))
        it.registry.apply(BackendSuspended(first, "mig", "reset it", at=2, reset=True))
        it.registry.apply(InstanceFaulted(second, "MIG-x", "XID 94", at=3))
        it.registry.apply(InstanceRecovered(second, "MIG-x", "it was removed", at=4))
        await it.server.until(lambda: len(it.server.events()) == 3)

        told = [(e["reason"], e["type"], e["note"]) for e in it.server.events()]
        assert told == [
            ("GPUResetNeeded", "Warning", f"GPU {gpu(0)}: reset it"),
            ("MIGDeviceOutOfService", "Warning", f"GPU {gpu(1)}: MIG device MIG-x alone: XID 94"),
            ("MIGDeviceFaultOver", "Normal", f"GPU {gpu(1)}: MIG device MIG-x: it was removed"),
        ]

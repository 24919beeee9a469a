"""Recent events as sentences: who got shares, and what became of GPUs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from metagpu.core.config.profiles import LAST_GOOD
from metagpu.core.model.shares import CordonSource, Holder
from metagpu.core.reports.schema.gpus import UsedGpuReport
from metagpu.core.state.events import ConfigRejected, LayoutApplied, MemoryExceeded
from metagpu.core.state.facts import (
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    GpuUncordoned,
    InstanceFaulted,
    LeasesObserved,
    SharesClaimed,
)
from metagpu.core.state.registry import Registry
from metagpu.core.usage.report import RequestingPod
from metagpu.plugins.web import recent_events as module
from metagpu.plugins.web.recent_events import KEPT, RecentEvents
from tests.rigs.build import METAGPU, gpu, offer, share
from tests.rigs.reported import complete
from tests.rigs.waiting import becomes

A = gpu(0)
SHARES = tuple(share(A, number) for number in range(10))
ALICE, BOB = Holder("team", "alice", "main"), Holder("team", "bob", "main")


@pytest.fixture
def registry() -> Registry:
    """Return the registry of a node whose GPU has ten shares, two of them held since before."""
    live_registry = Registry()
    live_registry.apply(GpusFound((A,), at=1))
    live_registry.apply(offer(*SHARES))
    live_registry.apply(LeasesObserved({each.id: BOB for each in SHARES[8:]}, at=1))
    return live_registry


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0)


Said = tuple[str, str, int | None, str]
"""Reason, severity, GPU and text of an event."""


@asynccontextmanager
async def followed(registry: Registry) -> AsyncIterator[RecentEvents]:
    """Follow the registry until the block ends; it starts when the present leases are known."""
    recent = RecentEvents(registry, "gpu-1")
    async with anyio.create_task_group() as group:
        group.start_soon(recent.run)
        await becomes(lambda: recent._held)
        yield recent
        group.cancel_scope.cancel()


async def said(recent: RecentEvents, count: int) -> list[Said]:
    """Wait for this number of events; return them, the oldest first."""
    await becomes(lambda: len(recent.report()) >= count)
    found = recent.report()
    assert all(report.node == "gpu-1" for report in found)
    return [(report.reason, report.severity, report.gpu, report.text) for report in reversed(found)]


async def test_grants_and_ends_of_pods_are_sentences(registry: Registry) -> None:
    """A pod's shares are reported when the kubelet names it, and when it gives them back.

    Shares that were held before the daemon's start are not reported as granted.
    """
    named = {each.id: BOB for each in SHARES[8:]}
    async with followed(registry) as recent:
        registry.apply(SharesClaimed(SHARES[:3], at=5))
        await becomes(lambda: recent._claimed)
        registry.apply(LeasesObserved({**named, **{other.id: ALICE for other in SHARES[:3]}}, at=6))
        granted = "GPUSharesGranted", "info", 0, f"team/alice has 3 shares of {METAGPU} on GPU 0"
        assert await said(recent, 1) == [granted]

        registry.apply(LeasesObserved({SHARES[8].id: BOB}, at=99))
        text = "{} has given back {} of " + METAGPU + " on GPU 0"
        assert await said(recent, 3) == [
            granted,
            ("GPUSharesFreed", "info", 0, text.format("team/bob", "1 share")),
            ("GPUSharesFreed", "info", 0, text.format("team/alice", "3 shares")),
        ]


async def test_faults_cordons_and_configurations_are_sentences(registry: Registry) -> None:
    """Reasons and sentences are those of the Kubernetes Events."""
    upgrade = CordonSource.DRIVER_UPGRADE
    async with followed(registry) as recent:
        registry.apply(GpuFaulted(A.id, "XID 79: fell off the bus", at=5))
        registry.apply(GpuCordoned(A.id, "fan", at=6))
        registry.apply(GpuCordoned(A.id, "driver upgrade", at=6, source=upgrade))
        registry.apply(GpuUncordoned(A.id, at=7))  # the upgrade still keeps pods away
        registry.apply(GpuUncordoned(A.id, at=8, source=upgrade))
        registry.events.publish(LayoutApplied())
        registry.events.publish(ConfigRejected("metagpu.yaml: 3: no such key", 9, LAST_GOOD))
        found = await said(recent, 6)

    assert found == [
        ("GPUUnhealthy", "error", 0, f"GPU {A}: XID 79: fell off the bus"),
        ("GPUCordoned", "info", 0, "GPU 0 accepts no new shares: fan"),
        ("GPUCordoned", "info", 0, "GPU 0 accepts no new shares: driver upgrade"),
        ("GPUUncordoned", "info", 0, "GPU 0 accepts new shares again"),
        ("ConfigApplied", "info", None, f"the configuration in force offers 10 {METAGPU}"),
        (
            *("ConfigRejected", "warning", None),
            "metagpu.yaml: 3: no such key; the last good configuration stays",
        ),
    ]


async def test_a_pod_gets_events_of_its_own_alone(registry: Registry) -> None:
    """A pod gets its grants, faults of its GPU and of its own MIG device, and no others' events."""
    other = gpu(1)
    registry.apply(GpusFound((A, other), at=2))
    async with followed(registry) as recent:
        registry.apply(SharesClaimed(SHARES[:1], at=5))
        await becomes(lambda: recent._claimed)
        held = {each.id: BOB for each in SHARES[8:]}
        registry.apply(LeasesObserved({**held, SHARES[0].id: ALICE}, at=6))
        await said(recent, 1)
        for device in ("MIG-alice", "MIG-bob"):
            registry.apply(InstanceFaulted(A.id, device, "XID 94", at=7))
        registry.apply(GpuFaulted(other.id, "XID 79", at=8))
        registry.apply(GpuFaulted(A.id, "XID 79", at=9))
        registry.events.publish(MemoryExceeded(A.id, BOB, "u", 3, 2, 1, False, at=9))  # noqa: FBT003
        registry.events.publish(LayoutApplied())
        await said(recent, 7)

    def of_pod(name: str, device: str) -> list[tuple[str, int | None]]:
        pod = RequestingPod("team", name, "uid")
        found = recent.report_for_pod(
            pod, [complete({"index": 0, "devices": [{"device": device}]}, UsedGpuReport)]
        )
        return [(report.reason, report.gpu) for report in reversed(found)]

    faults = [("MIGDeviceUnhealthy", 0), ("GPUUnhealthy", 0)]
    assert of_pod("alice", "MIG-alice") == [("GPUSharesGranted", 0), *faults]
    assert of_pod("bob", "MIG-bob") == [*faults, ("GPUMemoryExceeded", 0)]
    assert of_pod("carol", "MIG-2") == faults[1:]


async def test_no_pod_hides_a_fault_by_events_of_its_own(registry: Registry) -> None:
    """The events of pods are bounded apart from those of GPUs; what repeats is kept once."""
    async with followed(registry) as recent:
        registry.apply(GpuFaulted(A.id, "XID 79", at=5))
        for number in range(3 * KEPT):
            pod = Holder("evil", f"pod-{number}", "main")
            for _ in range(2):
                registry.events.publish(MemoryExceeded(A.id, pod, "u", 3, 2, 1, False, at=1))  # noqa: FBT003
        found = await said(recent, KEPT + 1)

    assert found[0][0] == "GPUUnhealthy"
    assert len(found) == len(set(found)) == KEPT + 1
    assert found[-1][3].startswith(f"evil/pod-{3 * KEPT - 1}: container main uses more memory")

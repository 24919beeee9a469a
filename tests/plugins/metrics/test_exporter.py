"""Time, shares and memory of namespaces."""

from collections.abc import Mapping

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.model.gpu import MIB
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.registry import Registry
from metagpu.plugins.metrics.exporter import KEPT, NamespaceMeter, namespace_samples
from tests.core.usage.test_report import A, B, node
from tests.plugins.metrics.rig import valued
from tests.rigs.build import METAGPU

SHARE_SECONDS = "metagpu_namespace_share_seconds_total", "team", METAGPU
GPU_SECONDS = "metagpu_namespace_gpu_seconds_total", "team"


def counted(meter: NamespaceMeter) -> Mapping[tuple[str, ...], float]:
    """Return the counters by name and labels."""
    return valued(meter.samples())


def test_time_counts_from_lease_to_lease() -> None:
    """Each second counts once for each share held in it, and in parts of a whole GPU."""
    snapshot, _ = node()
    shares = sum(len(state.leases) for state in snapshot.gpus.values())
    meter = NamespaceMeter()
    meter.observe(snapshot, now=100.0)
    assert counted(meter) == {}
    meter.advance(105.0)
    assert counted(meter) == {SHARE_SECONDS: 0, GPU_SECONDS: 0}

    meter.advance(110.0)
    empty = {gpu.gpu.id: replace(gpu, leases={}) for gpu in snapshot.gpus.values()}
    meter.observe(replace(snapshot, gpus=empty), now=112.0)
    meter.advance(200.0)
    assert counted(meter)[SHARE_SECONDS] == shares * 12
    assert counted(meter)[GPU_SECONDS] == pytest.approx(shares * 12 / 10)


def test_a_pod_between_two_pages_counts_in_full() -> None:
    """The first value of a series is 0, as `increase` counts from the first one on."""
    snapshot, _ = node()
    shares = sum(len(state.leases) for state in snapshot.gpus.values())
    meter = NamespaceMeter()
    meter.observe(snapshot, now=100.0)
    meter.observe(replace(snapshot, gpus={}), now=120.0)
    meter.advance(130.0)
    first, second = counted(meter), counted(meter)
    assert (first[SHARE_SECONDS], second[SHARE_SECONDS]) == (0, shares * 20)
    assert first[GPU_SECONDS] == 0
    assert second[GPU_SECONDS] == pytest.approx(shares * 2)

    meter.advance(121.0 + KEPT)
    assert counted(meter) == {}
    meter.observe(snapshot, now=122.0 + KEPT)
    meter.advance(132.0 + KEPT)
    assert counted(meter)[SHARE_SECONDS] == 0


def test_a_namespace_of_the_past_is_forgotten() -> None:
    """A namespace without shares keeps its counters for an hour."""
    snapshot, _ = node()
    meter = NamespaceMeter()
    meter.observe(snapshot, now=0.0)
    meter.observe(replace(snapshot, gpus={}), now=5.0)
    meter.advance(5.0 + KEPT)
    assert SHARE_SECONDS in counted(meter)
    meter.advance(6.0 + KEPT)
    assert counted(meter) == {}


def test_what_a_namespace_holds_and_uses() -> None:
    """Held memory is that of the shares, used memory that of the containers' processes."""
    snapshot, usage = node()
    values = valued(namespace_samples(snapshot, usage))
    leases = [lease for state in snapshot.gpus.values() for lease in state.leases.values()]

    assert values["metagpu_namespace_shares", "team", METAGPU] == len(leases)
    held = values["metagpu_namespace_memory_held_bytes", "team"]
    assert held == sum(lease.share.memory for lease in leases)
    assert values["metagpu_namespace_memory_used_bytes", "team"] == 13000 * MIB

    unknown = replace(usage, failures={A.id: "hangs", B.id: "hangs"})
    names = {name[0] for name in valued(namespace_samples(snapshot, unknown))}
    assert "metagpu_namespace_memory_used_bytes" not in names


async def test_each_change_of_leases_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter takes over the leases of a new snapshot without a scrape."""
    snapshot, _ = node()
    registry, meter, seen = Registry(), NamespaceMeter(), anyio.Event()
    observe = NamespaceMeter.observe

    def noted(namespace_meter: NamespaceMeter, now_known: Snapshot, now: float) -> None:
        observe(namespace_meter, now_known, now)
        if now_known.gpus:
            seen.set()

    monkeypatch.setattr(NamespaceMeter, "observe", noted)
    async with anyio.create_task_group() as group:
        group.start_soon(meter.run, registry)
        await anyio.wait_all_tasks_blocked()
        registry.snapshot = snapshot
        for watcher in registry._watchers:
            watcher.notify(snapshot)
        with anyio.fail_after(30):
            await seen.wait()
        group.cancel_scope.cancel()
    meter.advance(anyio.current_time())
    assert {sample.labels[0] for sample in meter.samples()} == {"team"}

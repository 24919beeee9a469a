"""Pods hear what becomes of the GPU or MIG device that they hold, and no other pods do."""

from pathlib import Path
from types import MappingProxyType
from typing import Final

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import (
    CordonSource,
    Fault,
    HardwareDevice,
    Holder,
    ProvisionedState,
    ResourceClaimRef,
    ShareId,
)
from metagpu.core.state.facts import (
    BackendAttached,
    Fact,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    GpuUncordoned,
    InstanceFaulted,
    InstanceRecovered,
    LeasesObserved,
    PodsListed,
    ProvisioningReported,
    SharesReleased,
)
from metagpu.plugins.cluster import cluster, connection, event_recorder
from metagpu.plugins.cluster.event_recorder import EventData
from metagpu.plugins.cluster.held_gpus import gpu_events_between, troubles_of
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.node_status import holding_pods
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from tests.plugins.cluster.rig import cluster_at_work
from tests.rigs.build import after, gpu, layout_of
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes

FIRST, SECOND = gpu(0), gpu(1)
NODE: Final = after(GpusFound((FIRST, SECOND), at=0), layout_of(FIRST, SECOND).offer_fact)
SHARES: Final = [share for state in NODE.gpus.values() for share in state.shares]
FAULT: Final = GpuFaulted(FIRST.id, "XID 79: fallen off the bus", at=2, fault=Fault.XID)


def held(**holders: int) -> LeasesObserved:
    """Return the kubelet's list: each pod of `team` holds the share of that number."""
    return LeasesObserved(
        {SHARES[number].id: Holder("team", pod, "main") for pod, number in holders.items()}, at=1
    )


def written(*facts: Fact) -> list[EventData]:
    """Return the Events of a node where alice holds a part of a GPU and bob of another."""
    snapshot = after(held(alice=0, bob=10), since=NODE)
    found: list[EventData] = []
    for fact in facts:
        following = after(fact, since=snapshot)
        found += gpu_events_between(troubles_of(snapshot), troubles_of(following), following)
        snapshot = following
    return found


def test_the_pods_of_a_faulty_gpu_hear_of_it() -> None:
    """The pod that holds the GPU has reason and remedy; the pod of another GPU has nothing."""
    [event] = written(FAULT)

    assert (event.subject.kind, event.subject.namespace, event.subject.name) == (
        *("Pod", "team", "alice"),
    )
    assert (event.reason, event.warning) == ("GPUUnhealthy", True)
    assert event.note == (
        f"GPU {FIRST} is out of service: XID 79: fallen off the bus. Programs on it have probably "
        "failed, and the pod keeps it: create the pod again to get another GPU, and if the GPU has "
        "to be reset"
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault.MEMORY, "and if the GPU has to be reset"),
        (Fault.RECOVERY_ACTION, "The pod must be created again: nobody may use the GPU meanwhile"),
        (Fault.NO_ANSWER, "The pod must be created again, to get another GPU"),
        (Fault.NOT_LISTED, "The pod must be created again, to get another GPU"),
        (Fault.DRIVER, "The pod need not be created again: restart its containers"),
    ],
)
def test_each_fault_says_whether_the_pod_must_be_created_again(fault: Fault, words: str) -> None:
    """Each kind of fault has its own advice."""
    [event] = written(GpuFaulted(FIRST.id, "broken", at=2, fault=fault))
    assert words in event.note


def test_the_return_of_a_gpu_is_an_event_of_its_pods() -> None:
    """A pod that still holds the GPU hears of the return, with what remains to be done."""
    _, event = written(FAULT, GpuRecovered(FIRST.id, "quiet", at=3))

    assert (event.reason, event.warning) == ("GPURecovered", False)
    assert event.note == (
        f"GPU {FIRST} is in service again. The pod need not be created again; programs that failed "
        "must be started again, as by a restart of their container"
    )


def test_a_pod_that_came_after_hears_nothing() -> None:
    """The return is no Event of a pod that did not hold the GPU, or holds it no more."""
    events = written(
        FAULT,
        SharesReleased((SHARES[0],), at=3),
        GpuRecovered(FIRST.id, "quiet", at=4),
        held(carol=1),
    )
    assert [event.subject.name for event in events] == ["alice"]


def test_a_pod_in_admission_hears_once_its_name_is_known() -> None:
    """A fault between the grant and the kubelet's list is an Event as soon as there is a name."""
    events = written(FAULT, held(alice=0, bob=10, carol=1))
    assert [event.subject.name for event in events] == ["alice", "carol"]


def test_a_cordon_is_nothing_to_act_on() -> None:
    """A cordon and its end are normal Events: the pod keeps the GPU."""
    cordoned, ended = written(GpuCordoned(FIRST.id, "new fan", at=2), GpuUncordoned(FIRST.id, at=3))

    assert (cordoned.reason, cordoned.warning) == ("GPUCordoned", False)
    assert cordoned.unlimited
    assert cordoned.note == (
        f"GPU {FIRST} gets no new pods: new fan. The pod keeps it and need not be created again"
    )
    assert (ended.reason, ended.warning) == ("GPUUncordoned", False)


def test_every_pod_of_a_shared_claim_hears() -> None:
    """Pods that share a ResourceClaim hold its GPU together, also for a driver upgrade."""
    snapshot = after(held(alice=0), since=NODE)
    state = snapshot.gpus[FIRST.id]
    claim = ResourceClaimRef("team", "shared", "uid")
    bob = Holder("team", "bob", "main")
    leases = {
        i: replace(lease, sharers=(bob,), resource_claim=claim) for i, lease in state.leases.items()
    }
    state = replace(state, leases=MappingProxyType(leases))
    shared = replace(snapshot, gpus=MappingProxyType({**snapshot.gpus, FIRST.id: state}))
    broken = after(FAULT, since=shared)
    healed = after(GpuRecovered(FIRST.id, "quiet", at=3), since=broken)

    begun = gpu_events_between(troubles_of(shared), troubles_of(broken), broken)
    ended = gpu_events_between(troubles_of(broken), troubles_of(healed), healed)
    assert [event_data.subject.name for event_data in begun] == ["alice", "bob"]
    assert [event_data.subject.name for event_data in ended] == ["alice", "bob"]
    assert holding_pods(shared) == {"team/alice": False, "team/bob": False}


def mig_devices() -> tuple[Fact, ...]:
    """Return the facts of a backend that has created a device for each of two shares."""
    devices = {SHARES[number].id: HardwareDevice(f"MIG-{number}", number, 0) for number in (0, 1)}
    provisioned = ProvisionedState(MappingProxyType[ShareId, HardwareDevice](devices))
    return (
        BackendAttached(FIRST.id, "fraction", needs_setup=False, needs_cleanup=False, at=1),
        ProvisioningReported(FIRST.id, "fraction", provisioned, at=1),
    )


def test_a_reset_removes_the_devices_of_mig_pods() -> None:
    """The return of a GPU with MIG devices says that a reset has removed them."""
    _, event = written(*mig_devices(), FAULT, GpuRecovered(FIRST.id, "quiet", at=3))
    assert "If it was reset, the pod's MIG device is gone and the pod must be created" in event.note


def test_a_mig_device_concerns_its_own_pod() -> None:
    """A fault of a MIG device is an Event of its pod, not of the GPU's other pods."""
    fault, back = written(
        held(alice=0, bob=1),
        *mig_devices(),
        InstanceFaulted(FIRST.id, "MIG-0", "XID 94", at=2),
        InstanceRecovered(FIRST.id, "MIG-0", "acknowledged", at=3),
    )

    assert (fault.subject.name, fault.reason) == ("alice", "MIGDeviceUnhealthy")
    assert not fault.unlimited
    assert fault.note == (
        f"MIG device MIG-0 of GPU {FIRST} is out of service: XID 94. The pod must be created "
        "again: the device is made again once no pod holds it"
    )
    assert (back.subject.name, back.reason) == ("alice", "MIGDeviceRecovered")


@pytest.mark.parametrize("now", ["no device", "another device"])
def test_a_mig_device_that_is_gone_does_not_return(now: str) -> None:
    """The end of a removed device's fault is no return: its pod cannot use the device again."""
    another = {SHARES[0].id: HardwareDevice("MIG-5", 5, 0)} if now == "another device" else {}
    events = written(
        *mig_devices(),
        InstanceFaulted(FIRST.id, "MIG-0", "XID 94", at=2),
        ProvisioningReported(
            FIRST.id, "fraction", ProvisionedState(MappingProxyType(another)), at=3
        ),
        InstanceRecovered(FIRST.id, "MIG-0", "the MIG device no longer exists", at=4),
    )
    assert [event.reason for event in events] == ["MIGDeviceUnhealthy"]


def test_a_fault_of_the_gpu_follows_one_of_the_driver() -> None:
    """The advice to wait for the driver is revised once the GPU itself has a fault, once."""
    first, second = written(
        GpuFaulted(FIRST.id, "NVML cannot be used", at=2, fault=Fault.DRIVER),
        GpuFaulted(FIRST.id, "XID 79", at=3, fault=Fault.XID),
        GpuFaulted(FIRST.id, "no answer", at=4, fault=Fault.NO_ANSWER),
        GpuFaulted(FIRST.id, "NVML cannot be used", at=5, fault=Fault.DRIVER),
    )
    assert "need not be created again" in first.note
    assert "XID 79. Programs on it have probably failed" in second.note
    # A repeated Event keeps its first note, and has only a count.
    assert first.dedup_key != second.dedup_key


async def test_every_pod_of_a_gpu_hears(tmp_path: Path) -> None:
    """The limits that hold for what pods cause do not hide a fault from any of its pods."""
    many = event_recorder.BURST + 10
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS) as scene:
        text = f"""
version: metagpu/v1
pools: [{{name: all, backends: [{{backend: fraction, sharesPerGpu: {many}}}]}}]
"""
        scene.offer(text, count=1)
        await scene.server.watched(NODES)
        shares = scene.registry.snapshot.gpus[FIRST.id].shares
        holders = {each.id: Holder("team", f"p{each.number}", "main") for each in shares}
        pods = tuple(KnownPod(f"u{n}", "team", f"p{n}", "Running") for n in range(many))
        scene.registry.apply(PodsListed(pods))
        scene.registry.apply(LeasesObserved(holders, at=1))
        scene.registry.apply(FAULT)
        await scene.server.until(lambda: len(scene.server.events()) == many)

        assert {each["regarding"]["uid"] for each in scene.server.events()} == {p.uid for p in pods}
        scene.registry.apply(GpuRecovered(FIRST.id, "quiet", at=3))
        await scene.server.until(lambda: len(scene.server.events()) == 2 * many)
        assert scene.cluster.report().pod_events_dropped == 0


async def test_a_new_connection_repeats_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fault of the cluster's side a pod has no second Event of a GPU that is still out."""
    fault = anyio.Event()

    async def fail_once(*_: object) -> None:
        if not fault.is_set():
            await fault.wait()
            raise KeyError("unforeseen")
        await anyio.sleep_forever()

    monkeypatch.setattr(connection, "record_pod_events", fail_once)
    timing = ClusterTiming(restart_delay=0.01, reconcile_interval=0.0, count_interval=0.0)
    with capture_module_logs(cluster) as lines:
        async with cluster_at_work(tmp_path, Feature.POD_EVENTS, timing=timing) as scene:
            scene.offer()
            await scene.server.until(lambda: scene.cluster.report().connected)
            scene.registry.apply(held(alice=0, bob=10))
            scene.registry.apply(FAULT)
            await scene.server.until(scene.server.events)
            fault.set()
            await becomes(lambda: lines)
            scene.registry.apply(GpuFaulted(SECOND.id, "XID 79", at=3, fault=Fault.XID))
            await scene.server.until(lambda: "bob" in str(scene.server.events()))

    assert [each["regarding"]["name"] for each in scene.server.events()] == ["alice", "bob"]
    assert "series" not in scene.server.events()[0]


def test_an_upgrade_is_one_event_of_a_pod() -> None:
    """The driver is that of all GPUs that a pod holds, and no limit hides it."""
    alice, upgrade = Holder("team", "alice", "main"), CordonSource.DRIVER_UPGRADE
    both = after(LeasesObserved({SHARES[n].id: alice for n in (0, 10)}, at=1), since=NODE)
    facts = (GpuCordoned(each.id, "a new driver", 2, upgrade) for each in (FIRST, SECOND))
    now = after(*facts, since=both)
    [event] = gpu_events_between(troubles_of(both), troubles_of(now), now)
    assert (event.reason, event.unlimited) == ("GPUDriverUpgrade", True)

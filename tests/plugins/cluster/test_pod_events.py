"""A pod's Events about its GPU memory, in its namespace, with numbers."""

from pathlib import Path
from typing import Final

import pytest

from metagpu.core.model.gpu import MIB
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder
from metagpu.core.state.events import (
    AnnotationRejected,
    Event,
    MemoryExceeded,
    PreferenceNotMet,
    ProcessSignalled,
    UnauthorizedUseFound,
)
from metagpu.core.state.facts import GpuFaulted, GpusFound, PodsListed
from metagpu.plugins.cluster import event_recorder as events
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.pod_events import pod_event_of
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import cluster_at_work
from tests.rigs.build import after, gpu

ALICE: Final = Holder("team", "alice", "main")
GPU: Final = gpu(0)
SNAPSHOT: Final = after(GpusFound((GPU,), at=0))
FIGURES: Final = (
    "its share is 10240 MiB, its limit 10597 MiB, and all its processes together use 12287 MiB"
)
MORE: Final = f"container main uses more memory of GPU {GPU} than it may: {FIGURES}"
ENDED: Final = (
    f"process 4242 (on the node) of container main was sent SIGTERM: it had 6143 MiB of GPU {GPU},"
)
BYPASS: Final = (
    f"container main uses 300 MiB of GPU {GPU} and holds no share of it: Kubernetes did not "
    "allocate this GPU to it"
)
AMOUNTS: Final = {"used": 12287 * MIB, "share": 10240 * MIB, "limit": 10597 * MIB}


def exceeded(*, will_end: bool = True, used: int = 12287, at: float = 1) -> MemoryExceeded:
    """Return the event of alice's excess."""
    amounts = {**AMOUNTS, "used": used * MIB}
    return MemoryExceeded(GPU.id, ALICE, "u-1", **amounts, will_end=will_end, at=at)


def unauthorized_use(holder: Holder | None, memory: int | None = 300 * MIB) -> UnauthorizedUseFound:
    """Return the event of an unauthorized use."""
    return UnauthorizedUseFound(GPU.id, holder, "ab" * 32, "u-1", 7, memory, at=1)


@pytest.mark.parametrize(
    ("event", "reason", "note"),
    [
        (
            exceeded(),
            "GPUMemoryExceeded",
            f"{MORE}; its processes end if it stays so",
        ),
        (
            exceeded(will_end=False),
            "GPUMemoryExceeded",
            f"{MORE}; it keeps running",
        ),
        (
            ProcessSignalled(
                GPU.id, ALICE, "u-1", 4242, "SIGTERM", memory=6143 * MIB, **AMOUNTS, at=1
            ),
            "GPUProcessSignaled",
            f"{ENDED} and the container more than it may: {FIGURES}",
        ),
        (
            unauthorized_use(ALICE),
            "GPUUsedWithoutShare",
            BYPASS,
        ),
        (
            AnnotationRejected(KnownPod("u-1", "team", "alice"), "gpu-mem-limit.x: no", at=1),
            "GPUMemoryAnnotationRejected",
            "gpu-mem-limit.x: no",
        ),
        (
            PreferenceNotMet(KnownPod("u-1", "team", "alice"), "main", "container main: no", at=1),
            "GPUPreferenceNotMet",
            "container main: no",
        ),
    ],
)
def test_each_event_has_its_numbers(event: Event, reason: str, note: str) -> None:
    """Reason and sentence are about the very pod, as a warning."""
    written = pod_event_of(event, SNAPSHOT)

    assert written is not None
    assert (written.reason, written.note, written.warning) == (reason, note, True)
    subject = written.subject
    assert (subject.kind, subject.namespace, subject.name, subject.uid) == (
        ("Pod", "team", "alice", "u-1")
    )


def test_an_unauthorized_pod_without_a_name_is_found_by_its_uid() -> None:
    """A container without a name is found by its pod's uid."""
    assert pod_event_of(unauthorized_use(None), SNAPSHOT) is None

    snapshot = after(PodsListed((KnownPod("u-1", "team", "mallory"),)), since=SNAPSHOT)
    written = pod_event_of(unauthorized_use(None, None), snapshot)
    assert written is not None
    assert written.subject.name == "mallory"
    assert written.note.startswith(f"container {'ab' * 6} uses some memory of GPU")


def test_events_of_the_node_are_not_a_pods() -> None:
    """Events of the node are not a pod's."""
    assert pod_event_of(GpusFound((GPU,), at=0), SNAPSHOT) is None


async def test_events_stand_in_the_pods_namespace(tmp_path: Path) -> None:
    """`kubectl describe pod` shows a warning of the pod."""
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.watched(NODES)
        it.registry.events.publish(exceeded())
        await it.server.until(it.server.events)

    [event] = it.server.events()
    assert event["metadata"]["namespace"] == "team"
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "alice",
        "uid": "u-1",
        "namespace": "team",
    }
    assert (event["reason"], event["type"]) == ("GPUMemoryExceeded", "Warning")


async def test_the_same_excess_again_is_a_count(tmp_path: Path) -> None:
    """Repeated excesses of a container, with other numbers each, have one Event."""
    timing = ClusterTiming(count_interval=0.0)
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS, timing=timing) as it:
        await it.server.watched(NODES)
        for used in (12287, 12300, 12400):
            it.registry.events.publish(exceeded(used=used))
        await it.server.until(
            lambda: [e.get("series", {}).get("count") for e in it.server.events()] == [3]
        )


async def test_pods_that_misbehave_do_not_silence_the_node(tmp_path: Path) -> None:
    """A flood of pods' Events leaves the node's own rate untouched."""
    async with cluster_at_work(tmp_path, Feature.EVENTS, Feature.POD_EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.watched(NODES)
        for number in range(2 * events.BURST):
            it.registry.events.publish(unauthorized_use(Holder("team", f"pod-{number}", "main")))
        await it.server.until(lambda: len(it.server.events()) >= events.BURST // 2)
        it.registry.apply(GpuFaulted(GPU.id, "XID 79", at=1))
        await it.server.until(lambda: "GPUUnhealthy" in reasons(it.server))


async def test_an_unauthorized_use_of_an_unknown_pod_is_an_event_of_the_node(
    tmp_path: Path,
) -> None:
    """The uid of an unknown pod is in an Event of the node."""
    async with cluster_at_work(tmp_path, Feature.EVENTS, Feature.POD_EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.watched(NODES)
        it.registry.events.publish(unauthorized_use(None))
        await it.server.until(it.server.events)

    [event] = it.server.events()
    assert event["regarding"]["kind"] == "Node"
    assert event["note"].startswith(f"container {'ab' * 6} uses 300 MiB of GPU {GPU}")
    assert event["note"].endswith("; its pod has the uid u-1")


def reasons(server: SimApiServer) -> list[str]:
    """Return the reasons of all Events."""
    return [each["reason"] for each in server.events()]


async def test_without_the_feature_pods_get_no_events(tmp_path: Path) -> None:
    """Without the feature `pod-events` no Event is written into pods' namespaces."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.watched(NODES)
        it.registry.events.publish(exceeded())
        it.registry.apply(GpuFaulted(GPU.id, "XID 79", at=1))
        await it.server.until(it.server.events)

    assert reasons(it.server) == ["GPUUnhealthy"]

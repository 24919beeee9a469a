"""Events about the node's GPUs and about pods: one for each problem, with its numbers."""

from pathlib import Path
from typing import Final

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.model.gpu import MIB
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import CordonSource, Holder, ResourceName
from metagpu.core.model.snapshot import Versions
from metagpu.core.state.events import (
    AnnotationRejected,
    ConfigRejected,
    ContainerAbsent,
    DaemonNotReady,
    DevicesLost,
    Event,
    MemoryExceeded,
    MixedRequestFound,
    PreferenceNotMet,
    ProcessSignalled,
    TimeExceeded,
    UnauthorizedUseFound,
)
from metagpu.core.state.facts import (
    BackendSuspended,
    CompetingPluginFound,
    DriverRead,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    GpuUncordoned,
    GpuUnheard,
    InstanceFaulted,
    InstanceRecovered,
    PodsListed,
    RegistrationProblemFound,
    UnreadableGpusFound,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster import event_recorder as events
from metagpu.plugins.cluster.event_recorder import EventRecorder, ObjectReference
from metagpu.plugins.cluster.events import (
    NODE_EVENT_KINDS,
    POD_EVENT_KINDS,
    NodeEvents,
    node_event_of,
    pod_event_of,
    record_empty_resources,
    standing_problems,
)
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import cluster_at_work
from tests.rigs.build import after, gpu, layout_of

A: Final = gpu(0)
NODE: Final = ObjectReference("Node", "gpu-1", "u")
SNAPSHOT: Final = after(GpusFound((A,), at=0))
RESET: Final = BackendSuspended(A.id, "mig", "MIG waits for a reset", at=1, until_reset=True)


@pytest.mark.parametrize(
    ("event", "reason", "note", "warning"),
    [
        (GpuFaulted(A.id, "XID 79", 1), "GPUUnhealthy", f"GPU {A}: XID 79", True),
        (GpuRecovered(A.id, "quiet", 1), "GPURecovered", f"GPU {A}: quiet", False),
        (
            InstanceFaulted(A.id, "MIG-1", "XID 43", 1),
            "MIGDeviceUnhealthy",
            f"GPU {A}: MIG device MIG-1 alone: XID 43",
            True,
        ),
        (
            InstanceRecovered(A.id, "MIG-1", "it is gone", 1),
            "MIGDeviceRecovered",
            f"GPU {A}: MIG device MIG-1: it is gone",
            False,
        ),
        (
            GpuUnheard(A.id, "refused", 1),
            "GPUEventsUnavailable",
            f"GPU {A}: NVML does not report its XIDs: refused",
            True,
        ),
        (GpuCordoned(A.id, "fans", 1), "GPUCordoned", f"GPU {A}: fans", False),
        (GpuUncordoned(A.id, 1), "GPUUncordoned", f"GPU {A}: accepts new shares again", False),
        (ConfigRejected("bad", 1, "it stays"), "ConfigRejected", "bad; it stays", True),
        (DaemonNotReady("no driver"), "DaemonNotReady", "no driver", True),
        (RESET, "GPUResetNeeded", f"GPU {A}: MIG waits for a reset", True),
        (
            UnreadableGpusFound({1: "GPU 1: it hangs"}, at=1),
            "GPUUnreadable",
            "NVML counts GPUs that cannot be read: GPU 1: it hangs",
            True,
        ),
        (
            CompetingPluginFound(ResourceName("nvidia.com/gpu"), "x.sock"),
            "CompetingDevicePlugin",
            "nvidia.com/gpu is served by another device plugin on x.sock, not by metagpu",
            True,
        ),
        (
            RegistrationProblemFound(ResourceName("nvidia.com/gpu"), "the kubelet counts 0"),
            "RegistrationProblem",
            "nvidia.com/gpu: the kubelet counts 0",
            True,
        ),
    ],
)
def test_each_event_is_one_sentence_about_the_node(
    event: Event,
    reason: str,
    note: str,
    warning: bool,  # noqa: FBT001 - a case
) -> None:
    """Each event has a reason, a sentence, and a type."""
    written = node_event_of(event, SNAPSHOT, NODE)

    assert isinstance(event, NODE_EVENT_KINDS)
    assert written is not None
    assert (written.subject, written.reason, written.note, written.warning) == (
        NODE,
        reason,
        note,
        warning,
    )


@pytest.mark.parametrize(
    "event",
    [
        BackendSuspended(A.id, "mps", "it starts", at=1),
        DriverRead(Versions("1")),
        GpuCordoned(A.id, "a new driver", 1, CordonSource.DRIVER_UPGRADE),
        GpuUncordoned(A.id, 1, CordonSource.DRIVER_UPGRADE),
    ],
)
def test_temporary_states_are_no_events(event: Event) -> None:
    """A backend that is not ready yet, or a version, makes no Event."""
    assert node_event_of(event, SNAPSHOT, NODE) is None


def test_gpus_that_wait_for_a_reset_already_are_reported() -> None:
    """A fault from before the subscription is found in the snapshot."""
    unreadable = UnreadableGpusFound({1: "GPU 1: it hangs"}, at=1)
    waiting = after(RESET, unreadable, since=SNAPSHOT)

    found = [event.reason for event in standing_problems(waiting, NODE)]
    assert found == ["GPUUnreadable", "GPUResetNeeded"]
    assert standing_problems(SNAPSHOT, NODE) == []


ALICE: Final = Holder("team", "alice", "main")
FIGURES: Final = (
    "its share is 10240 MiB, its limit 10597 MiB, and all its processes together use 12287 MiB"
)
LENT: Final = (
    f"container main uses more memory of GPU {A} than its share, and others need it: it has "
    f"borrowed 2047 MiB, {FIGURES}"
)
MORE: Final = f"container main uses more memory of GPU {A} than it may: {FIGURES}"
ENDED: Final = (
    f"process 4242 (on the node) of container main was sent SIGTERM: it had 6143 MiB of GPU {A},"
)
BYPASS: Final = (
    f"container main uses 300 MiB of GPU {A} and holds no share of it: Kubernetes did not "
    "allocate this GPU to it"
)
AMOUNTS: Final = {"used": 12287 * MIB, "share": 10240 * MIB, "limit": 10597 * MIB}


def exceeded(*, will_end: bool = True, used: int = 12287, at: float = 1) -> MemoryExceeded:
    """Return the event of alice's excess."""
    amounts = {**AMOUNTS, "used": used * MIB}
    return MemoryExceeded(A.id, ALICE, "u-1", **amounts, will_end=will_end, at=at)


def unauthorized_use(holder: Holder | None, memory: int | None = 300 * MIB) -> UnauthorizedUseFound:
    """Return the event of an unauthorized use."""
    return UnauthorizedUseFound(A.id, holder, "ab" * 32, "u-1", 7, memory, at=1)


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
                A.id, ALICE, "u-1", 4242, "SIGTERM", memory=6143 * MIB, **AMOUNTS, at=1
            ),
            "GPUProcessSignaled",
            f"{ENDED} and the container more than it may: {FIGURES}",
        ),
        (
            replace(exceeded(), borrowed=2047 * MIB),
            "GPUMemoryNeeded",
            f"{LENT}; its processes end if it stays so",
        ),
        (
            ProcessSignalled(
                A.id, ALICE, "u-1", 4242, "SIGTERM", 6143 * MIB, **AMOUNTS, at=1, borrowed=MIB
            ),
            "GPUProcessSignaled",
            f"{ENDED} and others need it: it has borrowed 1 MiB, {FIGURES}",
        ),
        (
            TimeExceeded(A.id, ALICE, "u-1", used=75, given=50, seconds=330, at=1),
            "GPUTimeExceeded",
            (
                f"container main has taken 75 % of the time of GPU 0 ({A.id}) for 330 s: its "
                "shares give 50 % while other containers want more"
            ),
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

    assert isinstance(event, POD_EVENT_KINDS)
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
    assert pod_event_of(GpusFound((A,), at=0), SNAPSHOT) is None


async def test_events_stand_in_the_pods_namespace(tmp_path: Path) -> None:
    """`kubectl describe pod` shows a warning of the pod."""
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS) as scene:
        scene.registry.apply(GpusFound((A,), at=0))
        await scene.server.watched(NODES)
        scene.registry.events.publish(exceeded())
        await scene.server.until(scene.server.events)

    [event] = scene.server.events()
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
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS, timing=timing) as scene:
        await scene.server.watched(NODES)
        for used in (12287, 12300, 12400):
            scene.registry.events.publish(exceeded(used=used))
        await scene.server.until(
            lambda: [e.get("series", {}).get("count") for e in scene.server.events()] == [3]
        )


async def test_pods_that_misbehave_do_not_silence_the_node(tmp_path: Path) -> None:
    """A flood of pods' Events leaves the node's own rate untouched."""
    async with cluster_at_work(tmp_path, Feature.EVENTS, Feature.POD_EVENTS) as scene:
        scene.registry.apply(GpusFound((A,), at=0))
        await scene.server.watched(NODES)
        for number in range(2 * events.BURST):
            scene.registry.events.publish(unauthorized_use(Holder("team", f"pod-{number}", "main")))
        await scene.server.until(lambda: len(scene.server.events()) >= events.BURST // 2)
        scene.registry.apply(GpuFaulted(A.id, "XID 79", at=1))
        await scene.server.until(lambda: "GPUUnhealthy" in reasons(scene.server))


async def test_an_unauthorized_use_of_an_unknown_pod_is_an_event_of_the_node(
    tmp_path: Path,
) -> None:
    """The uid of an unknown pod is in an Event of the node."""
    async with cluster_at_work(tmp_path, Feature.EVENTS, Feature.POD_EVENTS) as scene:
        scene.registry.apply(GpusFound((A,), at=0))
        await scene.server.watched(NODES)
        scene.registry.events.publish(unauthorized_use(None))
        await scene.server.until(scene.server.events)

    [event] = scene.server.events()
    assert event["regarding"]["kind"] == "Node"
    assert event["note"].startswith(f"container {'ab' * 6} uses 300 MiB of GPU {A}")
    assert event["note"].endswith("; its pod has the uid u-1")


def reasons(server: SimApiServer) -> list[str]:
    """Return the reasons of all Events."""
    return [each["reason"] for each in server.events()]


async def test_without_the_feature_pods_get_no_events(tmp_path: Path) -> None:
    """Without the feature `pod-events` no Event is written into pods' namespaces."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as scene:
        scene.registry.apply(GpusFound((A,), at=0))
        await scene.server.watched(NODES)
        scene.registry.events.publish(exceeded())
        scene.registry.apply(GpuFaulted(A.id, "XID 79", at=1))
        await scene.server.until(scene.server.events)

    assert reasons(scene.server) == ["GPUUnhealthy"]


def test_a_loss_is_written_before_what_pods_cause() -> None:
    """A pod cannot lose its devices at will, as it can leave a container or ask for both."""
    absent = ContainerAbsent(ALICE, "u-1", {A.id: 2}, seconds=600, at=1)
    mixed = MixedRequestFound(ALICE, "u-1", {ResourceName("a.b/c"): "GPU 0"}, at=1)
    lost = DevicesLost(ALICE, "u-1", ("MIG-1",), "kubectl delete pod", at=1)
    written = [pod_event_of(event, SNAPSHOT) for event in (absent, mixed, lost)]
    assert [(data.reason, data.minor, data.key) for data in written if data] == [
        ("GPUShareWithoutContainer", True, "main"),
        ("GPUNotVisible", True, "main"),
        ("GPUDeviceLost", False, "main"),
    ]
    assert all(isinstance(event, POD_EVENT_KINDS) for event in (absent, mixed, lost))


async def test_a_reset_that_was_needed_before_the_start_is_an_event(tmp_path: Path) -> None:
    """A start of the daemon may enable MIG mode before it reaches the API server."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as scene:
        scene.registry.apply(GpusFound((A,), at=0))
        scene.registry.apply(replace(RESET, backend="mps", reason="it starts", until_reset=False))
        scene.registry.apply(RESET)
        await scene.server.until(scene.server.events)
    assert [each["note"] for each in scene.server.events()] == [f"GPU {A}: MIG waits for a reset"]


async def test_a_resource_that_no_gpu_provides_is_an_event_each_time() -> None:
    """The amount 0 has a reason; one that stays, or has shares, is no news."""
    a, b = (ResourceName(f"nvidia.com/mig-{name}") for name in ("1g.5gb", "7g.80gb"))
    registry, recorder = Registry(), EventRecorder("metagpu-x", ClusterTiming())
    offer = layout_of(A).offer_fact
    registry.apply(GpusFound((A,), at=0))
    async with anyio.create_task_group() as group:
        group.start_soon(record_empty_resources, registry, NodeEvents("n", recorder, enabled=True))
        for empty in ((a,), (a, b), (), (a,)):
            registry.apply(replace(offer, resources=(*offer.resources, *empty)))
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert [data.key for data in recorder._queue] == [a, b, a]
    assert recorder._queue[0].note.startswith(f"{a} has the amount 0")


async def test_without_the_feature_nothing_is_queued_for_the_node() -> None:
    """An Event that nobody writes would count as dropped."""
    recorder = EventRecorder("metagpu-x", ClusterTiming())
    NodeEvents("n", recorder, enabled=False).record(events.EventReason.CONFIG_APPLIED, "a", "b")
    assert not recorder._queue

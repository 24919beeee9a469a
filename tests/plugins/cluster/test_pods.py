"""This node's Pods in the registry."""

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from metagpu.core.model.pods import KnownPod, PodIndex, Rejection
from metagpu.core.model.shares import ResourceName
from metagpu.core.reports.schema.daemon import ClusterReport
from metagpu.core.state.events import PodEnded, PodListRequested
from metagpu.core.state.facts import CompetingPluginFound, PodsListed, SharesOffered
from metagpu.core.state.registry import Registry
from metagpu.display.status import cluster_problems
from metagpu.host.programs import run_command
from metagpu.plugins.cluster import watch
from metagpu.plugins.cluster.client import KubeClient
from metagpu.plugins.cluster.pods import (
    EARLY,
    LIST_PERIOD,
    MIRROR,
    PODS,
    SOON,
    STOPPING,
    CompetingPod,
    CompetingPodWatch,
    DeletedPod,
    PodInformer,
    describe_competing_pod,
    find_competing_pods,
    known_pod,
    requests_by_container,
)
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, Scene, client_of, cluster_at_work
from tests.rigs.build import METAGPU, after
from tests.rigs.waiting import becomes, skip, stop_clock

KEY = "gpu-mem-limit.cnvrg.io/metagpu"


@asynccontextmanager
async def followed(server: SimApiServer, tmp_path: Path) -> AsyncIterator[Registry]:
    """Apply a server's pods to a registry until the block ends."""
    registry = Registry()
    async with client_of(server, tmp_path) as client, anyio.create_task_group() as group:
        group.start_soon(PodInformer(client, NODE, registry).run)
        yield registry
        group.cancel_scope.cancel()


async def knows(registry: Registry, seen: Callable[[PodIndex], bool]) -> None:
    """Wait until the registry knows pods that are so."""
    with anyio.fail_after(30):
        async for pods in registry.watch(lambda now: now.pods):
            if seen(pods):
                return


def phases(pods: PodIndex) -> dict[str, str]:
    """Return the phase of each pod."""
    return {str(pod): pod.phase for pod in pods.by_uid.values()}


@pytest.mark.parametrize(
    ("grace", "changes"),
    [
        (60, [(3, False, False), (58, False, True), (59.5, True, True), (62, True, False)]),
        (4, [(2, True, True), (3, False, True), (3.5, True, True), (6, True, False)]),
        (3, [(1.5, True, True), (2.5, True, True), (3, True, True), (5, True, False)]),
        (0, [(2, True, False), (3, True, False)]),
    ],
)
def test_each_change_of_a_deleted_pod_has_its_time(
    grace: float, changes: list[tuple[float, bool, bool]]
) -> None:
    """A pod may end soon and after its grace, and is stopping around the end of its grace."""
    pod, now, seen = DeletedPod(100, grace), 100.0, []
    for _ in changes:
        now = pod.next_change(now)
        seen.append((now - 100, pod.is_ending(now), pod.is_stopping(now)))
    assert seen == changes
    assert pod.next_change(now) == math.inf


async def test_pods_of_this_node_are_known_and_no_others(tmp_path: Path) -> None:
    """The pods of one node in all namespaces are known, with every change."""
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, uid="a")
    server.add_pod("team", "elsewhere", "gpu-2")

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: phases(pods) == {"team/alice": "Running"})
        with registry.events.subscribe(PodEnded) as events:
            server.add_pod("other", "bob", NODE, uid="b", phase="Pending")
            server.add_pod("other", "carol", "gpu-2")
            await knows(registry, lambda pods: phases(pods).get("other/bob") == "Pending")
            server.add_pod("other", "bob", NODE, uid="b", phase="Succeeded")
            await knows(registry, lambda pods: phases(pods).get("other/bob") == "Succeeded")
            server.delete_pod("other", "bob")
            server.delete_pod("team", "alice")
            await knows(registry, lambda pods: not pods.by_uid)
            with anyio.fail_after(30):
                ended = [await anext(aiter(events)) for _ in range(2)]

    assert [
        str(claim_refusal_ended.pod)
        for claim_refusal_ended in ended
        if isinstance(claim_refusal_ended, PodEnded)
    ] == ["other/bob", "team/alice"]


async def test_a_pod_deleted_during_an_outage_has_ended(tmp_path: Path) -> None:
    """After an expired version the list shows which pods have ended."""
    server = SimApiServer()
    server.add_pod("team", "alice", NODE)

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: len(pods.by_uid) == 1)
        server.delete_pod("team", "alice")
        server.store.compact()
        server.end_watches()
        await knows(registry, lambda pods: not pods.by_uid)


def _names(name: str, pods: PodIndex) -> bool:
    return f"team/{name}" in phases(pods)


async def test_one_complete_list_answers_all_requests_of_before(tmp_path: Path) -> None:
    """The API server is asked once for many requests, and again for one that comes later."""
    server = SimApiServer()

    def lists() -> int:
        return sum(request.target == PODS for request in server.requests)

    async with followed(server, tmp_path) as registry:
        await server.watched(PODS)
        for _ in range(5):
            registry.events.publish(PodListRequested(anyio.current_time()))
        skip(LIST_PERIOD)
        await server.watched(PODS, times=2)
        for name in ("alice", "bob", "carol"):
            skip(LIST_PERIOD)
            server.add_pod("team", name, NODE)
            await knows(registry, partial(_names, name))
        assert lists() == 2

        registry.events.publish(PodListRequested(anyio.current_time()))
        await server.watched(PODS, times=3)
    assert lists() == 3


async def test_a_change_of_another_field_is_no_event(tmp_path: Path) -> None:
    """A change of a field that we do not keep is no event."""
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, uid="a")

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: "a" in pods.by_uid)
        before = registry.snapshot
        server.add_pod("team", "alice", NODE, {"unrelated": "x"}, uid="a")
        server.add_pod("team", "bob", NODE, uid="b")
        await knows(registry, lambda pods: "b" in pods.by_uid)

    assert registry.snapshot.pods.by_uid["a"] is before.pods.by_uid["a"]


async def test_a_pod_that_claims_to_mirror_another_takes_nothing_from_it(tmp_path: Path) -> None:
    """Anybody may create a Pod with the uid of another in the annotation of static pods' mirrors.

    The kubelet deletes such a Pod a moment later. The other one stays known, with its annotations.
    """
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, {KEY: "50"}, uid="a")

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: "a" in pods.by_uid)
        server.add_pod("team", "mallory", NODE, {MIRROR: "a"}, uid="b", phase="Failed")
        server.add_pod("team", "static", NODE, {MIRROR: "hash"}, uid="c")
        await knows(registry, lambda pods: "hash" in pods.by_uid)
        assert registry.snapshot.pods.by_uid["a"].memory_annotations == {KEY: "50"}

        server.delete_pod("team", "mallory")
        server.delete_pod("team", "static")
        await knows(registry, lambda pods: "hash" not in pods.by_uid)
        assert phases(registry.snapshot.pods) == {"team/alice": "Running"}


def test_of_a_pod_we_keep_what_we_use() -> None:
    """A pod's record has names, phase, owner, and its annotations about GPU memory."""
    owners = [{"kind": "Node", "name": "n"}, {"kind": "Job", "name": "j", "controller": True}]
    metadata = {
        "uid": "u",
        "namespace": "team",
        "name": "alice",
        "annotations": {KEY: "50", "metagpu.io/memory-policy": "warn", "other": "x"},
        "ownerReferences": owners,
    }

    assert known_pod(
        {"metadata": metadata, "spec": {"much": 1}, "status": {"phase": "Failed"}}
    ) == (
        KnownPod(
            "u", "team", "alice", "Failed", "Job/j", {KEY: "50", "metagpu.io/memory-policy": "warn"}
        )
    )
    bare = {"uid": "u", "namespace": "team", "name": "alice"}
    assert known_pod({"metadata": bare}) == KnownPod("u", "team", "alice")


REJECTED_ITEM: Final[dict[str, Any]] = {
    "metadata": {
        "uid": "u",
        "namespace": "team",
        "name": "alice",
        "resourceVersion": "7",
        "ownerReferences": [
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "name": "r",
                "uid": "o",
                "controller": True,
            }
        ],
    },
    "spec": {
        "containers": [{"resources": {"limits": {"cnvrg.io/metagpu": "5", "cpu": "1"}}}, {}],
        "initContainers": [{"resources": {"limits": {"example.com/nic": "1"}}}],
    },
    "status": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "m"},
}


def test_of_a_rejected_pod_we_keep_why_and_whose_it_is() -> None:
    """A pod that the kubelet rejected has its message, its resources, version and controller."""
    resources = frozenset(("cnvrg.io/metagpu", "example.com/nic"))

    pod = known_pod(REJECTED_ITEM)
    assert pod.rejection == Rejection("m", resources, "7")
    assert (pod.owner, pod.owner_uid, pod.owner_api) == ("ReplicaSet/r", "o", "apps/v1")
    evicted = {**REJECTED_ITEM, "status": {"phase": "Failed", "reason": "Evicted"}}
    assert known_pod(evicted).rejection is None


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("metadata", {"deletionTimestamp": "now"}),
        ("metadata", {"annotations": {"kubernetes.io/config.mirror": "hash"}}),
        ("metadata", {"ownerReferences": [{"kind": "Node", "name": "n", "controller": True}]}),
        ("status", {"containerStatuses": [{"name": "main", "state": {"running": {}}}]}),
        ("status", {"initContainerStatuses": [{"name": "init", "state": {"running": {}}}]}),
        ("status", {"ephemeralContainerStatuses": [{"name": "sh", "state": {"running": {}}}]}),
    ],
    ids=["being-deleted", "mirror", "of-a-node", "running", "init-container-running", "debugged"],
)
def test_a_rejected_pod_that_nobody_may_delete_has_no_version(
    part: str, change: dict[str, Any]
) -> None:
    """A mirror of a static pod and a pod of which a container runs have no version to delete by."""
    pod = known_pod({**REJECTED_ITEM, part: {**REJECTED_ITEM[part], **change}})
    assert pod.rejection is not None
    assert pod.rejection.version == ""


def test_containers_that_wait_or_have_ended_hold_up_no_deletion() -> None:
    """A rejected pod of which no container runs has its version."""
    statuses = [{"state": {"waiting": {"reason": "PodInitializing"}}}, {"state": {}}, {}]
    status = {**REJECTED_ITEM["status"], "containerStatuses": statuses}
    pod = known_pod({**REJECTED_ITEM, "status": status})
    assert pod.rejection is not None
    assert pod.rejection.version == "7"


async def test_a_right_that_is_missing_is_named(tmp_path: Path) -> None:
    """Without the right to list Pods the report names it, until the next good answer."""
    server = SimApiServer()
    server.denied.append(("GET", "/pods"))

    async with cluster_at_work(tmp_path, Feature.PODS, server=server) as scene:
        with anyio.fail_after(30):
            while not (why := scene.cluster.report().features["pods"]):  # noqa: ASYNC110 - no event
                await anyio.sleep(0.005)
        assert why == (
            'the API server does not allow it: User "sim" cannot get /api/v1/pods; '
            "docs/permissions.md has the rule to add, or remove the feature from --cluster"
        )


ALICE: Final = ("pods", "team", "alice")


def delete(
    server: SimApiServer, grace: float, ago: float = 0, key: tuple[str, str, str] = ALICE
) -> None:
    """Delete a pod, some seconds ago."""
    end = datetime.now(UTC) + timedelta(seconds=grace - ago)
    metadata = {"deletionTimestamp": end.isoformat(), "deletionGracePeriodSeconds": grace}
    server.store.merge(key, {"metadata": metadata}, status=False, manager="kubectl")


async def test_a_deleted_pod_may_end_soon_or_when_its_grace_is_over(tmp_path: Path) -> None:
    """Between these times a pod that terminates for minutes lowers no number.

    Two seconds before the kubelet kills its containers the pod is stopping.
    """
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, uid="a")

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: pods.listed and not pods.terminating)
        stop_clock()
        delete(server, 60)
        await knows(registry, lambda pods: pods.terminating == {("team", "alice")})
        skip(SOON)
        await knows(registry, lambda pods: not pods.terminating)
        skip(60 - SOON - STOPPING)
        await knows(registry, lambda pods: pods.stopping == {"a"})
        skip(STOPPING)
        await knows(registry, lambda pods: bool(pods.terminating))
        skip(STOPPING)
        await knows(registry, lambda pods: bool(pods.terminating) and not pods.stopping)


@pytest.mark.parametrize("deleted", ["before", "after"])
async def test_the_deletion_of_a_mirror_stops_nothing(tmp_path: Path, deleted: str) -> None:
    """The kubelet makes the mirror of a static pod again, and kills no container.

    Anybody may create a Pod that claims to mirror another one, and the list may have it first.
    """
    server = SimApiServer()
    server.add_pod("team", "static", NODE, {MIRROR: "hash"}, uid="a")
    server.add_pod("team", "bob", NODE, uid="b")
    server.add_pod("aaa", "alice", NODE, {MIRROR: "b"}, uid="c")
    keys = ("pods", "aaa", "alice"), ("pods", "team", "static")

    async with AsyncExitStack() as stack:
        if deleted == "before":
            for key in keys:
                delete(server, 60, ago=59, key=key)
        registry = await stack.enter_async_context(followed(server, tmp_path))
        await knows(registry, lambda pods: "b" in pods.by_uid)
        if deleted == "after":
            for key in keys:
                delete(server, 60, ago=59, key=key)
        server.add_pod("team", "last", NODE, uid="d")
        await knows(registry, lambda pods: "d" in pods.by_uid)
        assert not registry.snapshot.pods.stopping
        assert not registry.snapshot.pods.terminating


def test_a_deleted_pod_is_stopping_before_it_ends() -> None:
    """By a clock that stands still, which no machine delays."""
    pod = DeletedPod(seen=100, grace=60)
    times = (100, 100 + SOON, 160 - STOPPING, 160 - EARLY, 160 + STOPPING)
    assert [(pod.is_ending(at), pod.is_stopping(at)) for at in times] == [
        *((True, False), (False, False), (False, True), (True, True), (True, False)),
    ]


async def test_a_shorter_grace_period_replaces_the_first(tmp_path: Path) -> None:
    """A second deletion, with less patience, is in force from then on."""
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, uid="a")

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: pods.listed)
        delete(server, 600)
        await knows(registry, lambda pods: bool(pods.terminating))
        delete(server, 0)
        await knows(registry, lambda pods: pods.stopping == {"a"})


async def test_a_pod_that_was_deleted_before_the_start_has_the_rest_of_its_grace(
    tmp_path: Path,
) -> None:
    """The first list shows when the kubelet kills the containers."""
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, uid="a")
    delete(server, 60, ago=59)

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: pods.stopping == {"a"})


async def test_a_pod_that_was_deleted_while_nobody_watched_has_the_rest_of_its_grace(
    tmp_path: Path,
) -> None:
    """A restarting API server ends watches: its clients end before the kubelet kills them."""
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, uid="a")

    async with followed(server, tmp_path) as registry:
        await server.until(lambda: any(each.target == f"{PODS}?watch" for each in server.requests))
        server.end_watches()
        delete(server, 60, ago=59)
        await knows(registry, lambda pods: pods.stopping == {"a"})


async def test_a_nodes_clock_shortens_no_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that is deleted at the first list has its time where the clock of the node is ahead."""
    server = SimApiServer()
    server.add_pod("team", "alice", NODE, uid="a")
    delete(server, 60)
    monkeypatch.setattr("metagpu.plugins.cluster.pods.time", lambda: time.time() + 3600)

    async with followed(server, tmp_path) as registry:
        await knows(registry, lambda pods: pods.listed)
        assert not registry.snapshot.pods.stopping


def test_a_pod_arrives_until_the_kubelet_has_admitted_it() -> None:
    """The kubelet reports the time of a pod's start once it has admitted the pod."""
    limits = {"resources": {"limits": {"cnvrg.io/metagpu": "30", "memory": "1Gi"}}}

    def listed(phase: str, **status: str) -> PodIndex:
        metadata = {"uid": "a", "namespace": "team", "name": "alice"}
        item = {"metadata": metadata, "status": {"phase": phase, **status}}
        return PodIndex.from_pods([known_pod({**item, "spec": {"containers": [limits, limits]}})])

    sixty = {"cnvrg.io/metagpu": 60}
    assert listed("Pending").arriving == listed("Pending").requested == sixty
    assert listed("Pending", startTime="2026-11-21T12:00:00Z").arriving == {}
    assert listed("Running").arriving == listed("Succeeded").requested == {}
    assert listed("Running").requested == sixty


@pytest.mark.parametrize(
    ("init", "amount"),
    [
        ([], 3),
        ([(5, "")], 5),
        ([(2, ""), (1, "")], 3),
        ([(1, "Always")], 4),
        ([(1, "Always"), (5, "")], 6),
        ([(5, ""), (1, "Always")], 5),
    ],
)
def test_a_pods_requests_are_the_schedulers_sum(init: list[tuple[int, str]], amount: int) -> None:
    """Containers run together, sidecars beside them, and init containers before them."""

    def container(count: int, policy: str = "") -> dict[str, Any]:
        return {"resources": {"limits": {"a.b/c": str(count)}}, "restartPolicy": policy}

    item = {
        "metadata": {"uid": "a", "namespace": "team", "name": "alice"},
        "spec": {
            "initContainers": [container(*pair) for pair in init],
            "containers": [container(1), container(2)],
        },
    }
    assert known_pod(item).requests == {"a.b/c": amount}


def test_a_sidecar_does_not_hand_its_shares_on() -> None:
    """An ordinary init container leaves room for the largest container, or for all of them."""
    limits = {"resources": {"limits": {"a.b/c": "2"}}}
    init = [{"name": "prepare"} | limits, {"name": "side", "restartPolicy": "Always"} | limits]
    main = {"name": "main", "resources": {"limits": {"a.b/c": "5"}}}
    item = {
        "metadata": {"uid": "a", "namespace": "team", "name": "alice"},
        "spec": {"initContainers": [*init, {"name": "other"}], "containers": [main]},
    }
    pod = known_pod(item)
    assert pod.handing_on == {"prepare"}
    assert [pod.rooms(name, "a.b/c") for name in ("prepare", "side", "main")] == [(7, 5), (), ()]


@pytest.mark.parametrize(
    ("policy", "states", "ends"),
    [
        ("Never", [{"terminated": {"exitCode": 1}}, {"terminated": {"exitCode": 0}}], True),
        ("Never", [{"terminated": {"exitCode": 0}}, {"running": {}}], False),
        ("Never", [{"terminated": {"exitCode": 0}}], False),
        ("OnFailure", [{"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 0}}], True),
        ("OnFailure", [{"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 1}}], False),
        ("Always", [{"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 0}}], False),
    ],
)
def test_a_pod_ends_when_no_container_starts_again(
    policy: str, states: list[dict[str, Any]], *, ends: bool
) -> None:
    """The kubelet reports the end of containers before the pod's phase, which ends the request."""
    item = {
        "metadata": {"uid": "a", "namespace": "team", "name": "alice"},
        "spec": {"restartPolicy": policy, "containers": [{"name": "main"}, {"name": "log"}]},
        "status": {"phase": "Running", "containerStatuses": [{"state": state} for state in states]},
    }
    pods = PodIndex.from_pods([known_pod(item)])
    assert pods.terminating == ({("team", "alice")} if ends else frozenset())


def test_a_first_list_of_no_pods_is_news() -> None:
    """The first answer of the API server is known on a node without pods too."""
    assert after(PodsListed(())).pods.listed


WHOLE = "version: metagpu/v1\npools: [{name: a, backends: [{backend: whole}]}]"
GPU = ResourceName("nvidia.com/gpu")


USES = (Feature.COMPETING_PLUGINS, Feature.PODS, Feature.EVENTS)


def pod(owner: str, name: str = "p", *, phase: str = "Running") -> KnownPod:
    """Return a pod of kube-system."""
    return KnownPod(f"uid-{name}", "kube-system", name, phase, owner)


@pytest.mark.parametrize(
    ("owner", "program"),
    [
        ("DaemonSet/hami-device-plugin", "HAMi's device plugin"),
        ("DaemonSet/my-hami-device-plugin", "HAMi's device plugin"),
        ("DaemonSet/nvidia-device-plugin-daemonset", "NVIDIA's device plugin"),
        ("DaemonSet/nvdp-nvidia-device-plugin", "NVIDIA's device plugin"),
        ("DaemonSet/nvidia-gpu-device-plugin-small-cos", "GKE's device plugin"),
        ("DaemonSet/metagpu-device-plugin", "cnvrg's MetaGPU"),
        ("DaemonSet/nvdp-nvidia-device-plugin-gpu-feature-discovery", None),
        ("DaemonSet/nvdp-nvidia-device-plugin-mps-control-daemon", None),
        ("DaemonSet/metagpu", None),
        ("ReplicaSet/hami-device-plugin", None),
        ("", None),
    ],
)
def test_programs_are_known_by_their_daemon_sets(owner: str, program: str | None) -> None:
    """DaemonSets have the names of charts and manifests; others beside them do not count."""
    found = [competing_pod.program for competing_pod in find_competing_pods([pod(owner)])]
    assert found == ([] if program is None else [program])


def test_a_pod_that_has_ended_does_not_compete() -> None:
    """An ended pod that is still listed serves nothing."""
    assert find_competing_pods([pod("DaemonSet/hami-device-plugin", phase="Succeeded")]) == ()


def test_a_plugin_competes_for_names_with_its_prefix() -> None:
    """The report names our resources with the plugin's prefix, or that there are none."""
    [plugin] = find_competing_pods([pod("DaemonSet/hami-device-plugin", "hami-x")])

    assert describe_competing_pod(plugin, [METAGPU, GPU, "nvidia.com/mig-1g.5gb"]) == (
        "HAMi's device plugin (pod kube-system/hami-x) runs on this node; it may serve "
        "nvidia.com/gpu, nvidia.com/mig-1g.5gb as we do, and metagpu does not register what it "
        "serves. Remove it from this node, or give our resource another name"
    )
    assert describe_competing_pod(plugin, [METAGPU]) == (
        "HAMi's device plugin (pod kube-system/hami-x) runs on this node and allocates its GPUs "
        "under other names than ours; metagpu leaves its containers alone. Remove it from this node"
    )


async def reports(scene: Scene, seen: Callable[[ClusterReport], object]) -> ClusterReport:
    """Wait until the cluster plugin reports so; return the report."""
    await becomes(lambda: seen(scene.cluster.report()))
    return scene.cluster.report()


async def test_competing_plugins_of_this_node_are_reported(tmp_path: Path) -> None:
    """A plugin's pod on this node is in an Event and the status; one of another node is not."""
    server = SimApiServer()
    daemon_set = ("DaemonSet", "hami-device-plugin")
    server.add_pod("kube-system", "hami-here", NODE, owner=daemon_set)
    server.add_pod("kube-system", "hami-there", "gpu-2", owner=daemon_set)
    server.add_pod("default", "job", NODE)

    async with cluster_at_work(tmp_path, *USES, server=server) as scene:
        report = await reports(scene, lambda now: now.competing_plugins)
        assert [plugin.pod for plugin in report.competing_plugins] == ["kube-system/hami-here"]
        assert server.events() == []  # its resources are not known yet

        scene.offer(WHOLE)
        await server.until(server.events)
        [event] = server.events()
        assert (event["reason"], event["type"]) == ("CompetingDevicePlugin", "Warning")
        assert "; it may serve nvidia.com/gpu as we do, " in event["note"]
        report = await reports(scene, lambda now: now.competing_plugins[0].contested)
        assert list(cluster_problems(report)) == [
            (
                "HAMi's device plugin runs on this node: pod kube-system/hami-here; it may serve "
                "nvidia.com/gpu too"
            )
        ]


async def test_a_resource_that_is_taken_names_who_took_it(tmp_path: Path) -> None:
    """The Event about a resource's socket names the pod that may hold it."""
    server = SimApiServer()
    owner = ("DaemonSet", "nvidia-device-plugin-daemonset")
    server.add_pod("gpu-operator", "nvidia-x", NODE, owner=owner)

    async with cluster_at_work(tmp_path, *USES, server=server) as scene:
        scene.offer(WHOLE)
        await server.until(server.events)
        scene.registry.apply(CompetingPluginFound(METAGPU, "a.sock"))
        scene.registry.apply(CompetingPluginFound(GPU, "nvidia-gpu.sock"))
        await server.until(lambda: len(server.events()) == 3)

        assert [each["note"] for each in server.events()[1:]] == [
            "cnvrg.io/metagpu is served by another device plugin on a.sock, not by metagpu",
            (
                "nvidia.com/gpu is served by NVIDIA's device plugin (pod gpu-operator/nvidia-x) on "
                "nvidia-gpu.sock, not by metagpu"
            ),
        ]


async def test_pod_after_pod_of_one_program_is_one_event(tmp_path: Path) -> None:
    """A DaemonSet that replaces its pods all the time has one Event."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, *USES, server=server) as scene:
        scene.offer(WHOLE)
        for number in range(3):
            owner = ("DaemonSet", "my-hami-device-plugin")
            server.add_pod("a", f"hami-{number}", NODE, uid=f"uid-{number}", owner=owner)
            await reports(scene, lambda now, most=number: len(now.competing_plugins) > most)  # type: ignore[misc] # of a loop
        server.add_pod("b", "x", NODE, owner=("DaemonSet", "nvidia-device-plugin"))
        await server.until(lambda: any("NVIDIA" in each["note"] for each in server.events()))

        assert [each["note"].partition(" (")[0] for each in server.events()] == [
            "HAMi's device plugin",
            "NVIDIA's device plugin",
        ]


async def test_competing_plugins_come_and_go(tmp_path: Path) -> None:
    """The status names the present plugins, and no others."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, *USES, server=server) as scene:
        server.add_pod("a", "b", NODE, owner=("DaemonSet", "metagpu-device-plugin"))
        await reports(scene, lambda now: now.competing_plugins)
        server.delete_pod("a", "b")
        await reports(scene, lambda now: not now.competing_plugins)


async def test_without_the_feature_no_plugin_is_reported(tmp_path: Path) -> None:
    """Without the feature `competing-plugins` pods are watched, and no plugin is reported."""
    server = SimApiServer()
    server.add_pod("a", "b", NODE, owner=("DaemonSet", "metagpu-device-plugin"))

    async with cluster_at_work(tmp_path, Feature.PODS, Feature.EVENTS, server=server) as scene:
        scene.offer(WHOLE)
        with anyio.fail_after(30):
            async for pods in scene.registry.watch(lambda now: now.pods):
                if pods.by_uid:
                    break
        await anyio.wait_all_tasks_blocked()

        assert scene.cluster.report().competing_plugins == []
        assert server.events() == []


def test_the_claims_of_a_container_are_named_by_their_objects() -> None:
    """A claim made for the pod is in its status, as is the one of extended resources."""
    requests = ({"name": "own", "request": "one"}, {"name": "made"}, {"name": "unmade"})
    names = [{"name": "own", "resourceClaimName": "a"}, {"name": "made"}, {"name": "unmade"}]
    spec = {
        "resourceClaims": names,
        "initContainers": [{"name": "init", "resources": {"claims": [*requests]}}],
        "containers": [{"name": "main", "resources": {"claims": [{"name": "made"}]}}],
    }
    made = {"resourceClaimStatuses": [{"name": "made", "resourceClaimName": "b"}]}
    mapped = {"containerName": "main", "requestName": "r"}
    extended = {
        "extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": [mapped]}
    }
    named = {"init": {("a", "one"), ("b", "")}, "main": {("b", "")}}
    both = {**named, "main": {("b", ""), ("c", "r")}}
    assert requests_by_container({"spec": spec, "status": made}) == named
    assert requests_by_container({"spec": spec, "status": {**made, **extended}}) == both
    assert requests_by_container({"spec": {}, "status": extended}) == {"main": {("c", "r")}}
    assert requests_by_container({"spec": {}}) == {}


async def test_a_lost_watch_of_pods_begins_again_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pod's end, and its arrival, wait no longer than five seconds for the watch."""
    longest = set[float]()

    def shortest(low: float, high: float) -> float:
        longest.add(high)
        return low

    monkeypatch.setattr(watch, "random_between", shortest)
    server = SimApiServer()
    registry, timing = Registry(), ClusterTiming(spread=600.0)
    async with client_of(server, tmp_path, timing) as client, anyio.create_task_group() as group:
        group.start_soon(PodInformer(client, NODE, registry).run)
        await server.watched(PODS)
        server.end_watches()
        await server.watched(PODS, times=2)
        group.cancel_scope.cancel()
    assert longest == {watch.WATCH_TIMEOUT[1], 5.0}


def test_all_plugins_that_may_have_a_resource_are_named() -> None:
    """Two of them may run on one node."""
    watcher = CompetingPodWatch(Registry(), lambda _: None)
    watcher.found = find_competing_pods(
        [pod("DaemonSet/hami-device-plugin", "a"), pod("DaemonSet/nvidia-device-plugin", "b")]
    )
    assert watcher.name_competitor(GPU) == (
        "HAMi's device plugin (pod kube-system/a) or NVIDIA's device plugin (pod kube-system/b)"
    )
    assert watcher.name_competitor(METAGPU) == "another device plugin"


async def test_a_pod_that_is_deleted_without_grace_is_stopping_at_once() -> None:
    """The kubelet kills its containers now: nobody may wait for half a second more."""
    registry = Registry()
    informer = PodInformer(KubeClient(None, run_command, ClusterTiming()), NODE, registry)
    ahead = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()  # of a server's clock
    metadata = {"uid": "a", "namespace": "team", "name": "alice", "resourceVersion": "1"}
    informer.on_list([{"metadata": metadata, "status": {"phase": "Running"}}])
    ended = {**metadata, "deletionTimestamp": ahead, "deletionGracePeriodSeconds": 0}
    informer.on_update({"metadata": ended, "status": {"phase": "Running"}})
    assert registry.snapshot.pods.stopping == {"a"}


async def test_a_plugin_is_found_once() -> None:
    """The change of another pod does not log it again."""
    registry, found = Registry(), list[CompetingPod]()
    plugin = pod("DaemonSet/hami-device-plugin", "hami")
    async with anyio.create_task_group() as group:
        group.start_soon(CompetingPodWatch(registry, found.append).run)
        registry.apply(SharesOffered((METAGPU,), ()))
        for others in ((), (pod("", "a"),), (pod("", "b"),)):
            registry.apply(PodsListed((plugin, *others)))
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert [each.pod for each in found] == ["kube-system/hami"]

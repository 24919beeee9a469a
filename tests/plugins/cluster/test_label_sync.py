"""Labels of the Node, at a simulated API server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from msgspec.structs import replace

from metagpu.core.config.config import MigStrategy
from metagpu.core.reports.schema.daemon import ClusterReport
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.facts import (
    GpuFaulted,
    GpusFound,
    SharesClaimed,
    SharesOffered,
    SharesReleased,
)
from metagpu.plugins.cluster import reconciler
from metagpu.plugins.cluster.label_sync import RETRY_PERIOD
from metagpu.plugins.cluster.node_object import MERGE_PATCH, NODES
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.objects import ApiError
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, QUICK, SIDE_BY_SIDE, Scene, cluster_at_work
from tests.rigs.build import gpu
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip


async def test_labels_are_written_and_follow_what_is_on_offer(tmp_path: Path) -> None:
    """The node's labels describe its GPUs and shares, also after a change."""
    async with cluster_at_work(tmp_path, Feature.LABELS) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2", nvidia_com__gpu_sharing_strategy=None)
        labels = scene.server.labels(NODE)

        assert labels["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
        assert labels["metagpu.io/cnvrg.io_metagpu.replicas"] == "10"
        assert labels["kubernetes.io/hostname"] == NODE

        scene.offer(SIDE_BY_SIDE, count=3)
        await scene.has_labels(nvidia_com__gpu_count="3")
        assert scene.server.labels(NODE)["nvidia.com/gpu.sharing-strategy"] == "time-slicing"


async def test_a_strategy_of_a_new_configuration_is_written(tmp_path: Path) -> None:
    """A configuration that changes the MIG strategy alone changes its label."""
    async with cluster_at_work(tmp_path, Feature.LABELS, timing=QUICK) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        await anyio.wait_all_tasks_blocked()  # nothing else triggers
        scene.label_settings = replace(scene.label_settings, mig_strategy=MigStrategy.MIXED)
        scene.registry.events.publish(LayoutApplied())
        await scene.has_labels(nvidia_com__mig_strategy="mixed")


async def test_the_largest_request_is_a_label_where_it_is_wanted(tmp_path: Path) -> None:
    """With `free-labels` a label has what one pod can get now; without, there is none."""
    name = "metagpu.io/cnvrg.io_metagpu.largest-request"
    quick = ClusterTiming(free_labels_interval=0.02)
    async with cluster_at_work(
        tmp_path, Feature.LABELS, Feature.FREE_LABELS, timing=quick
    ) as scene:
        scene.offer()
        await scene.server.until(lambda: scene.server.labels(NODE).get(name) == "20")
        for gpu_state, count in zip(scene.registry.snapshot.gpus.values(), (3, 7), strict=True):
            scene.registry.apply(SharesClaimed(gpu_state.shares[:count], 0))
        await scene.server.until(lambda: scene.server.labels(NODE).get(name) == "7")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=scene.server) as scene:
        scene.offer()
        await scene.server.until(lambda: name not in scene.server.labels(NODE))


async def test_labels_that_are_true_are_not_written_again(tmp_path: Path) -> None:
    """A node with the right labels is not written, whatever else changes on it."""
    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        await scene.server.until(lambda: scene.server.node(NODE)["status"].get("conditions"))
        await scene.reads_node()  # what is true is known
        before = [each for each in scene.server.requests if each.method == "PATCH"]
        scene.server.label(NODE, {"team": "vision"})
        scene.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=5))
        await scene.server.until(
            lambda: scene.server.node(NODE)["status"]["conditions"][0]["status"] == "True"
        )

        after = [each for each in scene.server.requests if each.method == "PATCH"]
        assert [each.target for each in after[len(before) :]] == [f"/api/v1/nodes/{NODE}/status"]


async def test_labels_outlive_a_restart_and_end_with_the_offer(tmp_path: Path) -> None:
    """A starting daemon removes no label before its first offer; then it does."""
    server = SimApiServer()
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as cluster:
        cluster.offer()
        await cluster.has_labels(nvidia_com__gpu_count="2")

    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION, server=server) as scene:
        scene.registry.apply(GpusFound((gpu(0),), at=0))
        await server.until(lambda: server.node(NODE)["status"].get("conditions"))
        assert server.labels(NODE)["nvidia.com/gpu.count"] == "2"

        scene.offer(count=1)
        await scene.has_labels(nvidia_com__gpu_count="1")
        scene.registry.apply(SharesOffered((), ()))
        await scene.has_labels(nvidia_com__gpu_count=None)


async def test_labels_are_left_to_gpu_feature_discovery(tmp_path: Path) -> None:
    """Labels of GPU Feature Discovery stay its own on a node that it labels."""
    server = SimApiServer()
    server.add_node(NODE)
    server.label(NODE, {"nvidia.com/gfd.timestamp": "1", "nvidia.com/gpu.count": "9"}, "nfd-master")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer()
        await scene.server.until(
            lambda: "metagpu.io/cnvrg.io_metagpu.replicas" in scene.server.labels(NODE)
        )
        labels = scene.server.labels(NODE)

        assert labels["nvidia.com/gpu.count"] == "9"
        assert "nvidia.com/gpu.product" not in labels

        server.label(NODE, {"nvidia.com/gfd.timestamp": None, "nvidia.com/gpu.count": None})
        await scene.has_labels(nvidia_com__gpu_count="2")


async def test_a_label_of_another_manager_stays_theirs(tmp_path: Path) -> None:
    """A conflict over one label costs that label alone."""
    server = SimApiServer()
    server.add_node(NODE)
    server.label(NODE, {"nvidia.com/gpu.family": "mine"}, by="person")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")

        assert server.labels(NODE)["nvidia.com/gpu.family"] == "mine"
        assert scene.cluster.report().features["labels"] == ""


async def test_labels_and_condition_leave_only_if_that_is_wanted(tmp_path: Path) -> None:
    """Labels and condition stay behind the daemon, unless an option removes them."""
    for remove in (False, True):
        async with cluster_at_work(
            tmp_path, Feature.LABELS, Feature.CONDITION, remove_labels=remove
        ) as scene:
            scene.offer()
            await scene.has_labels(nvidia_com__gpu_count="2")
            await scene.server.until(lambda: scene.server.node(NODE)["status"].get("conditions"))

        assert ("nvidia.com/gpu.count" in scene.server.labels(NODE)) is not remove
        assert bool(scene.server.node(NODE)["status"]["conditions"]) is not remove
        assert scene.server.labels(NODE)["kubernetes.io/hostname"] == NODE


BOTH = (Feature.LABELS, Feature.NODE_FEATURE)
COUNT = "nvidia.com/gpu.count"
OBJECT = ("nodefeatures", "kube-system", f"metagpu-{NODE}")


def with_nfd(**said: Any) -> SimApiServer:  # noqa: ANN401 - as of `install_nfd`
    """Return an API server with a Node and NFD."""
    server = SimApiServer()
    server.add_node(NODE, {"kubernetes.io/hostname": NODE})
    server.install_nfd(**said)
    return server


def owned(server: SimApiServer) -> set[str]:
    """Return the names of the labels that are applied in our name."""
    return {
        name.removeprefix("f:")
        for entry in server.node(NODE)["metadata"].get("managedFields", ())
        if entry["manager"] == "metagpu" and not entry.get("subresource")
        for name in entry["fieldsV1"]["f:metadata"]["f:labels"]
    }


def carried(server: SimApiServer) -> dict[str, str]:
    """Return the labels of our object."""
    [document] = [each for each in server.node_features() if each["metadata"]["name"] == OBJECT[2]]
    labels: dict[str, str] = document["spec"]["labels"]
    return labels


def written(server: SimApiServer) -> list[str]:
    """Return the writes, in order."""
    return [
        f"{request.method} {request.target}"
        for request in server.requests
        if request.method != "GET"
    ]


async def reports(scene: Scene, seen: Callable[[ClusterReport], object]) -> ClusterReport:
    """Wait until the cluster plugin reports so; return the report."""
    await becomes(lambda: seen(scene.cluster.report()))
    return scene.cluster.report()


def carries(report: ClusterReport) -> bool:
    """Return whether the object is known to have the labels."""
    return bool(report.node_feature == f"kube-system/{OBJECT[2]}")


def trouble(report: ClusterReport) -> str:
    """Return the problem of the feature."""
    found: str = report.features["nodefeature"]
    return found


async def test_labels_go_by_the_object_where_nfd_is(tmp_path: Path) -> None:
    """The object has the labels, its owner is the Node, and we do not write the Node."""
    async with cluster_at_work(tmp_path, *BOTH, server=with_nfd()) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        [made] = scene.server.node_features()
        uid = scene.server.node(NODE)["metadata"]["uid"]

        assert made["metadata"]["name"] == OBJECT[2]
        assert made["metadata"]["namespace"] == "kube-system"
        assert made["metadata"]["labels"]["nfd.node.kubernetes.io/node-name"] == NODE
        assert made["metadata"]["ownerReferences"] == [
            {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid}
        ]
        assert owned(scene.server) == set()
        await reports(scene, carries)

        scene.offer(count=3)
        await scene.has_labels(nvidia_com__gpu_count="3")
        scene.registry.apply(SharesOffered((), ()))
        await scene.has_labels(nvidia_com__gpu_count=None)
        assert not [each for each in written(scene.server) if "/nodes/" in each]


async def test_without_nfd_labels_are_patched(tmp_path: Path) -> None:
    """Without NFD's kinds the Node is patched, and no problem is reported."""
    async with cluster_at_work(tmp_path, *BOTH) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")

        assert COUNT in owned(scene.server)
        assert scene.cluster.report().features == {"labels": "", "nodefeature": ""}
        assert scene.cluster.report().node_feature is None


@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_without_the_right_labels_are_patched(tmp_path: Path, method: str) -> None:
    """Without the right to write the object the Node is patched; a report names the right."""
    server = with_nfd()
    server.denied.append((method, "/nodefeatures"))

    async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")

        assert scene.cluster.report().features["labels"] == ""
        assert scene.cluster.report().features["nodefeature"] == (
            f'the API server does not allow it: User "sim" cannot {method.lower()} '
            f"/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/kube-system/nodefeatures/metagpu-{NODE}; "
            "docs/permissions.md has the rule to add, or remove the feature from --cluster; labels "
            "are patched"
        )


async def test_an_nfd_that_refuses_the_object_costs_no_label(tmp_path: Path) -> None:
    """With an unknown kind the Node is patched, and a report says so."""
    server = with_nfd()
    server.rejected.append("/nodefeatures")

    async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")

        assert trouble(scene.cluster.report()).startswith("the API server answers 422 to PATCH ")
        assert trouble(scene.cluster.report()).endswith(
            "status: Required value; labels are patched"
        )


async def test_patched_labels_are_handed_over_without_a_gap(tmp_path: Path) -> None:
    """A new NFD keeps the patched labels: no label is ever missing."""
    server = SimApiServer()
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as cluster:
        cluster.offer()
        await cluster.has_labels(nvidia_com__gpu_count="2")
    assert COUNT in owned(server)

    server.install_nfd()
    begun = server.store.version
    async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
        scene.offer()
        await server.until(lambda: not owned(server))
        scene.offer(count=3)
        await scene.has_labels(nvidia_com__gpu_count="3")

    seen = [
        node["metadata"]["labels"].get(COUNT)
        for version, _, key, node in server.store.history
        if version > begun and key == ("nodes", "", NODE)
    ]
    assert None not in seen
    assert seen[-1] == "3"


async def test_a_restart_writes_nothing(tmp_path: Path) -> None:
    """A daemon that finds the right object does not write it."""
    server = with_nfd()
    async with cluster_at_work(tmp_path, *BOTH, server=server) as cluster:
        cluster.offer()
        await cluster.has_labels(nvidia_com__gpu_count="2")
    before = written(server)

    async with cluster_at_work(tmp_path, *BOTH, Feature.CONDITION, server=server) as scene:
        scene.offer()
        await server.until(lambda: server.node(NODE)["status"].get("conditions"))
        await reports(scene, carries)
        scene.offer(count=3)
        await scene.has_labels(nvidia_com__gpu_count="3")

    after = [each for each in written(server)[len(before) :] if "/status" not in each]
    group = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/kube-system/nodefeatures"
    assert after == [f"PATCH {group}/{OBJECT[2]}"]


@pytest.mark.parametrize(
    ("arranged", "late"),
    [
        (lambda server: server.nfd.denied.add("nvidia.com"), "nvidia.com/gpu.count"),
        (lambda server: setattr(server, "nfd_active", False), "metagpu.io/gpu.nvlink"),
    ],
    ids=["denied", "not running"],
)
async def test_what_nfd_does_not_put_on_the_node_is_patched(
    tmp_path: Path,
    arranged: Callable[[SimApiServer], None],
    late: str,
) -> None:
    """Labels that NFD does not apply in time are patched, and a report says so."""
    timing = ClusterTiming(nfd_timeout=0.05)
    server = with_nfd()
    arranged(server)

    async with cluster_at_work(tmp_path, *BOTH, server=server, timing=timing) as scene:
        scene.offer()
        await server.until(lambda: late in owned(server))
        report = await reports(
            scene, lambda now: trouble(now) and late in (now.missing_labels or ())
        )

        assert server.labels(NODE)[COUNT] == "2"
        assert trouble(report).startswith("nfd-master has not put ")
        assert trouble(report).endswith(
            " …); metagpu patches them. Check that nfd-master runs, and its denyLabelNs, "
            "labelWhiteList and restrictions"
        )

        server.nfd_active = True
        assert server.nfd is not None
        server.nfd.denied.clear()
        scene.offer(count=3)
        await server.until(lambda: not owned(server))
        await reports(scene, lambda report: not trouble(report))


async def test_labels_that_change_all_the_time_are_patched_too(tmp_path: Path) -> None:
    """A value that changes with each pod does not begin NFD's time again."""
    timing = ClusterTiming(nfd_timeout=0.5, free_labels_interval=0.02)
    features = (*BOTH, Feature.FREE_LABELS)
    server = with_nfd(works=False)

    async with cluster_at_work(tmp_path, *features, server=server, timing=timing) as scene:
        scene.offer()
        shares = next(iter(scene.registry.snapshot.gpus.values())).shares[:1]
        with anyio.fail_after(30):
            while COUNT not in owned(server):
                scene.registry.apply(SharesClaimed(shares, 0))
                await anyio.sleep(0.05)
                scene.registry.apply(SharesReleased(shares, 0))
                await anyio.sleep(0.05)
        await reports(scene, trouble)


async def test_a_deleted_object_is_written_again(tmp_path: Path) -> None:
    """The labels of a deleted object come back."""
    timing = ClusterTiming(nfd_timeout=0.05)
    server = with_nfd()

    async with cluster_at_work(tmp_path, *BOTH, server=server, timing=timing) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        server.store.delete(OBJECT)
        assert server.nfd is not None
        server.nfd.work()
        await server.until(lambda: OBJECT in server.store.objects)
        await scene.has_labels(nvidia_com__gpu_count="2")


async def test_nfd_that_goes_leaves_the_labels(tmp_path: Path) -> None:
    """Labels are patched again after the removal of NFD's kinds."""
    server = with_nfd()
    async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        await reports(scene, carries)
        await scene.reads_node()  # NFD's labels are known as NFD's
        server.nfd = None
        scene.offer(count=3)
        await server.until(lambda: COUNT in owned(server))

        assert server.labels(NODE)[COUNT] == "3"
        assert scene.cluster.report().features["nodefeature"] == ""


async def test_the_object_goes_with_the_labels_if_that_is_wanted(tmp_path: Path) -> None:
    """The object stays behind the daemon, unless an option removes the labels."""
    for remove in (False, True):
        server = with_nfd()
        async with cluster_at_work(tmp_path, *BOTH, server=server, remove_labels=remove) as scene:
            scene.offer()
            await scene.has_labels(nvidia_com__gpu_count="2")

        assert bool(server.node_features()) is not remove
        assert (COUNT in server.labels(NODE)) is not remove
        assert server.labels(NODE)["kubernetes.io/hostname"] == NODE


async def test_without_the_feature_an_earlier_object_is_deleted(tmp_path: Path) -> None:
    """Without the feature labels are patched, and the old object is deleted."""
    server = with_nfd()
    async with cluster_at_work(tmp_path, *BOTH, server=server) as cluster:
        cluster.offer()
        await cluster.has_labels(nvidia_com__gpu_count="2")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer()
        await server.until(lambda: not server.node_features())
        await scene.has_labels(nvidia_com__gpu_count="2")
        await server.until(lambda: COUNT in owned(server))


async def test_an_earlier_object_is_deleted_though_the_first_try_fails(tmp_path: Path) -> None:
    """A failed deletion is repeated: the object has outdated labels."""
    server = with_nfd()
    async with cluster_at_work(tmp_path, *BOTH, server=server) as cluster:
        cluster.offer()
        await cluster.has_labels(nvidia_com__gpu_count="2")

    server.failing.append(("DELETE", "/nodefeatures/"))
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as scene:
        scene.offer()
        await server.until(lambda: any(line.startswith("DELETE") for line in written(server)))
        assert server.node_features()
        server.failing.clear()
        await server.until(lambda: not server.node_features())


async def test_an_object_leaves_labels_to_gpu_feature_discovery(tmp_path: Path) -> None:
    """Our object has no name of GPU Feature Discovery while it labels the node."""
    server = with_nfd()
    async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        server.label(NODE, {"nvidia.com/gfd.timestamp": "1"}, "nfd-master")
        await server.until(lambda: COUNT not in carried(server))
        assert "metagpu.io/cnvrg.io_metagpu.replicas" in carried(server)

        server.label(NODE, {"nvidia.com/gfd.timestamp": None})
        await server.until(lambda: COUNT in carried(server))


async def test_a_label_that_another_manager_has_set_stays_theirs(tmp_path: Path) -> None:
    """A label of another manager is not in the object: NFD would overwrite it."""
    server = with_nfd()
    server.label(NODE, {"nvidia.com/gpu.family": "mine"}, by="person")

    async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")

        assert server.labels(NODE)["nvidia.com/gpu.family"] == "mine"
        assert "nvidia.com/gpu.family" not in carried(server)


async def test_mig_managers_answer_is_patched(tmp_path: Path) -> None:
    """The answer to mig-manager is patched, not given to NFD: mig-manager may write it too."""
    server = with_nfd()
    server.label(NODE, {"nvidia.com/mig.config": "all-1g.5gb"})

    async with cluster_at_work(tmp_path, *BOTH, Feature.CONFIG, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__mig_config_state="success")
        await scene.has_labels(nvidia_com__gpu_count="2")
        await server.until(lambda: owned(server) == {"nvidia.com/mig.config.state"})

        assert "nvidia.com/mig.config.state" not in carried(server)


async def test_an_api_server_in_trouble_changes_nothing(tmp_path: Path) -> None:
    """Errors that say nothing about NFD are retried, and labels stay where they are."""
    server = with_nfd()
    async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
        await server.watched(NODES)
        server.fail(503, times=2)
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")

        assert owned(server) == set()


async def test_an_nfd_that_comes_later_gets_the_labels(tmp_path: Path) -> None:
    """The kinds of NFD are looked for every ten minutes, and not at each change."""
    async with cluster_at_work(tmp_path, *BOTH) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        scene.server.install_nfd()
        scene.offer(count=3)
        await scene.has_labels(nvidia_com__gpu_count="3")
        assert not scene.server.node_features()
        skip(RETRY_PERIOD)
        scene.offer(count=4)
        await scene.has_labels(nvidia_com__gpu_count="4")
        await scene.server.until(lambda: not owned(scene.server))


async def test_labels_outlive_a_restart_that_answers_mig_manager(tmp_path: Path) -> None:
    """The answer is written before the first offer, and takes no label of before."""
    server = SimApiServer()
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as first:
        first.offer()
        await first.has_labels(nvidia_com__gpu_count="2")
    server.label(NODE, {"nvidia.com/mig.config": "all-1g.5gb"})
    async with cluster_at_work(tmp_path, Feature.CONFIG, Feature.LABELS, server=server) as scene:
        await scene.has_labels(nvidia_com__mig_config_state="pending")
        assert server.labels(NODE)[COUNT] == "2"


@pytest.mark.parametrize(("runs", "state"), [("true", "failed"), ("false", "success")])
async def test_the_answer_of_a_mig_manager_that_runs_stays(
    tmp_path: Path, runs: str, state: str
) -> None:
    """One that has gone left its answer behind, which is not in force any more."""
    server = SimApiServer()
    labels = {"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/gpu.deploy.mig-manager": runs}
    server.add_node(NODE, labels)
    server.label(NODE, {"nvidia.com/mig.config.state": "failed"}, by="mig-manager")
    async with cluster_at_work(tmp_path, Feature.CONFIG, Feature.LABELS, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2", nvidia_com__mig_config_state=state)


async def test_no_object_is_removed_that_was_never_written(tmp_path: Path) -> None:
    """Without NFD the end of the daemon asks for none."""
    async with cluster_at_work(tmp_path, *BOTH, remove_labels=True) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
    assert COUNT not in scene.server.labels(NODE)
    assert not any(line.startswith("DELETE") for line in written(scene.server))


class _Hurried(SimApiServer):
    """An API server at which another client was faster than the first merge."""

    is_faster = True

    def _check(self, request: web.Request) -> None:
        super()._check(request)
        if request.content_type == MERGE_PATCH and self.is_faster:
            self.is_faster = False
            raise ApiError(409, "Conflict", "the object has been modified")


async def test_a_node_that_changes_while_labels_are_handed_over_is_read_again(
    tmp_path: Path,
) -> None:
    """The list of managed fields replaces the version that was read alone: that is no problem."""
    server = _Hurried()
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as first:
        first.offer()
        await first.has_labels(nvidia_com__gpu_count="2")
    server.install_nfd()
    with capture_module_logs(reconciler) as lines:
        async with cluster_at_work(tmp_path, *BOTH, server=server) as scene:
            scene.offer()
            await server.until(lambda: not server.is_faster)
            server.label(NODE, {"team": "vision"})
            await server.until(lambda: not owned(server))
    assert lines == []

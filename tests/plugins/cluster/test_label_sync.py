"""Labels of the Node, at a simulated API server."""

from pathlib import Path

from metagpu.core.state.facts import GpuFaulted, GpusFound, SharesClaimed, SharesOffered
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, SIDE_BY_SIDE, cluster_at_work
from tests.rigs.build import gpu


async def test_labels_are_written_and_follow_what_is_on_offer(tmp_path: Path) -> None:
    """The node's labels describe its GPUs and shares, also after a change."""
    async with cluster_at_work(tmp_path, Feature.LABELS) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2", nvidia_com__gpu_sharing_strategy=None)
        labels = it.server.labels(NODE)

        assert labels["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
        assert labels["metagpu.io/cnvrg.io_metagpu.replicas"] == "10"
        assert labels["kubernetes.io/hostname"] == NODE

        it.offer(SIDE_BY_SIDE, count=3)
        await it.has_labels(nvidia_com__gpu_count="3")
        assert it.server.labels(NODE)["nvidia.com/gpu.sharing-strategy"] == "time-slicing"


async def test_the_largest_request_is_a_label_where_it_is_wanted(tmp_path: Path) -> None:
    """With `free-labels` a label has what one pod can get now; without, there is none."""
    name = "metagpu.io/cnvrg.io_metagpu.largest-request"
    quick = ClusterTiming(free_labels_interval=0.02)
    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.FREE_LABELS, timing=quick) as it:
        it.offer()
        await it.server.until(lambda: it.server.labels(NODE).get(name) == "20")
        for gpu_state, count in zip(it.registry.snapshot.gpus.values(), (3, 7), strict=True):
            it.registry.apply(SharesClaimed(gpu_state.shares[:count], 0))
        await it.server.until(lambda: it.server.labels(NODE).get(name) == "7")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=it.server) as it:
        it.offer()
        await it.server.until(lambda: name not in it.server.labels(NODE))


async def test_labels_that_are_true_are_not_written_again(tmp_path: Path) -> None:
    """A node with the right labels is not written, whatever else changes on it."""
    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        await it.server.until(lambda: it.server.node(NODE)["status"].get("conditions"))
        before = [each for each in it.server.requests if each.method == "PATCH"]
        it.server.label(NODE, {"team": "vision"})
        it.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=5))
        await it.server.until(
            lambda: it.server.node(NODE)["status"]["conditions"][0]["status"] == "True"
        )

        after = [each for each in it.server.requests if each.method == "PATCH"]
        assert [each.target for each in after[len(before) :]] == [f"/api/v1/nodes/{NODE}/status"]


async def test_labels_outlive_a_restart_and_end_with_the_offer(tmp_path: Path) -> None:
    """A starting daemon removes no label before its first offer; then it does."""
    server = SimApiServer()
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")

    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION, server=server) as it:
        it.registry.apply(GpusFound((gpu(0),), at=0))
        await server.until(lambda: server.node(NODE)["status"].get("conditions"))
        assert server.labels(NODE)["nvidia.com/gpu.count"] == "2"

        it.offer(count=1)
        await it.has_labels(nvidia_com__gpu_count="1")
        it.registry.apply(SharesOffered((), ()))
        await it.has_labels(nvidia_com__gpu_count=None)


async def test_labels_are_left_to_gpu_feature_discovery(tmp_path: Path) -> None:
    """Labels of GPU Feature Discovery stay its own on a node that it labels."""
    server = SimApiServer()
    server.add_node(NODE)
    server.label(NODE, {"nvidia.com/gfd.timestamp": "1", "nvidia.com/gpu.count": "9"}, "nfd-master")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
        it.offer()
        await it.server.until(
            lambda: "metagpu.io/cnvrg.io_metagpu.replicas" in it.server.labels(NODE)
        )
        labels = it.server.labels(NODE)

        assert labels["nvidia.com/gpu.count"] == "9"
        assert "nvidia.com/gpu.product" not in labels

        server.label(NODE, {"nvidia.com/gfd.timestamp": None, "nvidia.com/gpu.count": None})
        await it.has_labels(nvidia_com__gpu_count="2")


async def test_a_label_of_another_manager_stays_theirs(tmp_path: Path) -> None:
    """A conflict over one label costs that label alone."""
    server = SimApiServer()
    server.add_node(NODE)
    server.label(NODE, {"nvidia.com/gpu.family": "mine"}, by="person")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")

        assert server.labels(NODE)["nvidia.com/gpu.family"] == "mine"
        assert it.cluster.report()["features"]["labels"] == ""


async def test_labels_and_condition_leave_only_if_that_is_wanted(tmp_path: Path) -> None:
    """Labels and condition stay behind the daemon, unless an option removes them."""
    for remove in (False, True):
        async with cluster_at_work(
            tmp_path, Feature.LABELS, Feature.CONDITION, remove_labels=remove
        ) as it:
            it.offer()
            await it.has_labels(nvidia_com__gpu_count="2")
            await it.server.until(lambda: it.server.node(NODE)["status"].get("conditions"))

        assert ("nvidia.com/gpu.count" in it.server.labels(NODE)) is not remove
        assert bool(it.server.node(NODE)["status"]["conditions"]) is not remove
        assert it.server.labels(NODE)["kubernetes.io/hostname"] == NODE

"""A simulated cluster of one node, with a device plugin of its own in place of metagpu."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskGroup
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.sim.cluster import kubelet_sync, single_node
from metagpu.sim.cluster.kubelet_sync import READMIT_AFTER
from metagpu.sim.cluster.pod_manifest import PodManifest
from metagpu.sim.cluster.single_node import SingleNodeCluster
from metagpu.sim.cluster.views import PodView
from metagpu.sim.kubelet.kubelet import AdmissionError
from metagpu.sim.machine.gpu import SimError
from metagpu.sim.machine.spec import build_node
from tests.rigs.waiting import skip
from tests.sim.kubelet.rig import GPU, FakePlugin, device, devices

INSUFFICIENT = f"0/1 nodes are available: 1 Insufficient {GPU}."


@asynccontextmanager
async def cluster_of(tmp_path: Path, plugin: FakePlugin) -> AsyncIterator[SingleNodeCluster]:
    """Run a cluster whose Node has the plugin's devices, until the block ends."""
    made = SingleNodeCluster(build_node("t4:1"), tmp_path)
    async with made.running() as cluster, plugin.registered(cluster.kubelet):
        await cluster.api.until(lambda: GPU in cluster.node().resources)
        yield cluster


def four() -> FakePlugin:
    """Return a plugin of four devices."""
    return FakePlugin(GPU, devices("a b c d"))


async def add(
    cluster: SingleNodeCluster, name: str, count: int, seconds: float | None = None
) -> PodView:
    """Create a pod that requests devices."""
    [pod] = await cluster.add_pods([PodManifest(name, {GPU: count}, seconds=seconds)])
    return pod


def phases(cluster: SingleNodeCluster) -> dict[str, str]:
    """Return each pod's phase."""
    return {pod.name: pod.phase for pod in cluster.pods()}


async def test_a_pod_waits_until_another_ends(tmp_path: Path) -> None:
    """A pod without room is Pending for the scheduler's reason, and runs when there is room."""
    async with cluster_of(tmp_path, four()) as cluster:
        assert (await add(cluster, "first", 3)).phase == "Running"
        second = await add(cluster, "second", 2)
        assert (second.phase, second.reason, second.message) == (
            "Pending",
            "Unschedulable",
            INSUFFICIENT,
        )
        assert await cluster.end_pod("first", "default")
        await cluster.api.until(lambda: phases(cluster) == {"second": "Running"})
        assert len(cluster.pods()[0].devices[GPU]) == 2
        assert [(event.reason, event.count) for event in cluster.events()] == [
            ("FailedScheduling", 1)
        ]


async def test_users_begin_once_there_are_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands wait for the first list of shares, but not for one that does not come."""
    monkeypatch.setattr(single_node, "_OFFERED_WITHIN", 600)
    async with SingleNodeCluster(build_node("t4:1"), tmp_path).running() as cluster:
        await anyio.sleep(0.2)
        assert not cluster.started.is_set()
        async with four().registered(cluster.kubelet):
            with anyio.fail_after(30):
                await cluster.started.wait()

    monkeypatch.setattr(single_node, "_OFFERED_WITHIN", 0.1)
    async with SingleNodeCluster(build_node("t4:1"), tmp_path / "none").running() as cluster:
        with anyio.fail_after(30):
            await cluster.started.wait()


async def test_the_scheduler_reads_the_node_and_not_the_kubelet(tmp_path: Path) -> None:
    """While the Node has an old number, a pod is bound by it, and the kubelet rejects the pod."""
    plugin = four()
    async with cluster_of(tmp_path, plugin) as cluster:
        plugin.send(*(device(name, health="Unhealthy") for name in "abcd"))
        await cluster.kubelet.wait_for(lambda: cluster.kubelet.allocatable()[GPU] == 0)
        pod = await add(cluster, "late", 1)

        assert (pod.phase, pod.reason) == ("Failed", "UnexpectedAdmissionError")
        assert pod.message.startswith("Pod was rejected: Allocate failed due to no healthy devices")
        assert cluster.node().resources[GPU].requested == 0


async def test_a_refusal_is_the_pods_message(tmp_path: Path) -> None:
    """The plugin's own words reach the pod, and its Event."""
    plugin = four()
    async with cluster_of(tmp_path, plugin) as cluster:
        plugin.refusal = GRPCError(Status.FAILED_PRECONDITION, "not today")
        pod = await add(cluster, "train", 1)

        assert "code = FailedPrecondition desc = not today" in pod.message
        [event] = cluster.events()
        assert (event.reason, event.object) == ("UnexpectedAdmissionError", "Pod/default/train")


async def test_a_pod_ends_by_itself(tmp_path: Path) -> None:
    """After its time a pod has succeeded, counts no longer, and stays in the list."""
    async with cluster_of(tmp_path, four()) as cluster:
        await add(cluster, "job", 4, seconds=3600)
        await anyio.wait_all_tasks_blocked()
        assert phases(cluster) == {"job": "Running"}
        skip(3600)
        await cluster.api.until(lambda: phases(cluster) == {"job": "Succeeded"})

        assert (await add(cluster, "next", 4)).phase == "Running"


async def test_a_stopped_kubelet_ends_and_admits_nothing(tmp_path: Path) -> None:
    """Without a kubelet a deleted pod stays, and a new one waits; both are settled by its start."""
    async with cluster_of(tmp_path, four()) as cluster:
        await add(cluster, "old", 3)
        await cluster.stop_kubelet()
        assert not await cluster.end_pod("old", "default")
        assert [(pod.name, pod.reason) for pod in cluster.pods()] == [("old", "Terminating")]

        await cluster.restart_kubelet()
        await cluster.api.until(lambda: phases(cluster) == {})


async def test_a_restart_keeps_the_devices(tmp_path: Path) -> None:
    """After a restart of the kubelet its pods run with the devices that they had."""
    async with cluster_of(tmp_path, four()) as cluster:
        held = (await add(cluster, "train", 2)).devices
        await cluster.restart_kubelet()

        assert [(pod.phase, pod.devices) for pod in cluster.pods()] == [("Running", held)]


async def test_a_reboot_needs_the_devices_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot a pod needs healthy devices; without a plugin it has failed."""
    monkeypatch.setattr(kubelet_sync, "PLUGINS_WITHIN", 0.1)
    async with cluster_of(tmp_path, four()) as cluster:
        await add(cluster, "train", 2)
        await cluster.restart_kubelet(reboot=True)

        [pod] = cluster.pods()
        assert (pod.phase, pod.reason) == ("Failed", "UnexpectedAdmissionError")


@pytest.mark.parametrize("how", ["forget", "reboot"])
async def test_a_slow_plugin_saves_the_pods(tmp_path: Path, how: str) -> None:
    """A kubelet that needs a pod's devices again waits for a plugin that a busy machine delays."""
    async with cluster_of(tmp_path, four()) as cluster, anyio.create_task_group() as group:
        await add(cluster, "train", 2)
        restarted = anyio.Event()

        async def restart() -> None:
            await cluster.restart_kubelet(**{how: True})
            restarted.set()

        group.start_soon(restart)
        await cluster.kubelet.wait_for(lambda: not cluster.kubelet.is_up)
        await cluster.kubelet.wait_for(lambda: cluster.kubelet.is_up)
        await anyio.sleep(3 * READMIT_AFTER)
        async with four().registered(cluster.kubelet):
            await restarted.wait()
            assert phases(cluster) == {"train": "Running"}


async def test_a_burst_is_decided_at_once(tmp_path: Path) -> None:
    """Every pod of a burst runs or waits; with a seed, the sizes are the same again."""
    async with cluster_of(tmp_path, four()) as cluster:
        first = await cluster.burst(10, GPU, (1, 2), "default", seed=7)
        second = await cluster.burst(10, GPU, (1, 2), "default", seed=7)

        assert [pod.resources for pod in first] == [pod.resources for pod in second]
        assert {pod.phase for pod in first} == {"Running", "Pending"}
        assert {pod.phase for pod in second} == {"Pending"}
        assert cluster.node().resources[GPU].requested == 4


async def test_a_second_plugin_of_the_name(tmp_path: Path) -> None:
    """Another plugin takes a resource over with devices of its own; only one at a time."""
    async with cluster_of(tmp_path, four()) as cluster:
        await cluster.start_plugin(GPU, ["x"])
        await cluster.kubelet.wait_for(lambda: cluster.kubelet.capacity()[GPU] == 1)
        with pytest.raises(SimError, match="runs already"):
            await cluster.start_plugin(GPU, ["y"])
        await cluster.end_plugin()
        with pytest.raises(SimError, match="no second plugin runs"):
            await cluster.end_plugin()


async def test_a_pod_whose_time_is_over_waits_for_the_kubelet_at_rest(tmp_path: Path) -> None:
    """While the kubelet is stopped nothing runs in circles; the pod ends once it is back."""
    async with cluster_of(tmp_path, four()) as cluster:
        await add(cluster, "short", 1, seconds=60)
        await cluster.stop_kubelet()
        await anyio.wait_all_tasks_blocked()
        rounds, sync = 0, cluster._sync._sync

        async def counted(group: TaskGroup) -> None:
            nonlocal rounds
            rounds += 1
            await sync(group)

        cluster._sync._sync = counted  # type: ignore[method-assign]
        skip(61)
        await anyio.sleep(0.2)
        assert rounds <= 2

        await cluster.restart_kubelet()
        await cluster.api.until(lambda: phases(cluster)["short"] in {"Succeeded", "Failed"})


async def test_a_kubelet_may_be_stopped_as_soon_as_it_has_started(tmp_path: Path) -> None:
    """The next kubelet admits the earlier pods."""
    async with SingleNodeCluster(build_node("t4:1"), tmp_path).running() as cluster:
        await cluster.stop_kubelet()
        await anyio.sleep(2 * READMIT_AFTER)
        await cluster.restart_kubelet()
        assert cluster.kubelet.is_up


async def test_a_pod_that_is_deleted_while_it_is_rejected_needs_no_status(tmp_path: Path) -> None:
    """The cluster goes on."""
    async with cluster_of(tmp_path, four()) as cluster:
        await add(cluster, "gone", 1)
        [pod] = cluster.kubelet.pods
        cluster.api.store.delete(("pods", pod.namespace, pod.name))
        await cluster._sync._reject(pod, AdmissionError("UnexpectedAdmissionError", "too late"))

        assert cluster.events() == []
        assert (await add(cluster, "next", 1)).phase == "Running"


async def test_the_last_change_is_saved(tmp_path: Path) -> None:
    """A change just before the cluster ends is there in the next cluster."""
    node = build_node("t4:1")
    async with SingleNodeCluster(node, tmp_path).running() as cluster:
        cluster.label_node({"team": "vision"})

    async with SingleNodeCluster(node, tmp_path).running() as cluster:
        assert cluster.api.labels(cluster.name)["team"] == "vision"

"""Competing device plugins, found by their DaemonSets' pods, and named."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import ResourceName
from metagpu.core.reports.schema import ClusterReport
from metagpu.core.state.facts import CompetingPluginFound
from metagpu.display.status import cluster_problems
from metagpu.plugins.cluster.competing_pods import describe_competing_pod, find_competing_pods
from metagpu.plugins.cluster.settings import Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, Scene, cluster_at_work
from tests.rigs.build import METAGPU

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
    found = [it.program for it in find_competing_pods([pod(owner)])]
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


async def reports(it: Scene, seen: Callable[[ClusterReport], object]) -> ClusterReport:
    """Wait until the cluster plugin reports so; return the report."""
    with anyio.fail_after(30):
        while not seen(it.cluster.report()):  # noqa: ASYNC110 - a report has no event
            await anyio.sleep(0.005)
    return it.cluster.report()


async def test_competing_plugins_of_this_node_are_reported(tmp_path: Path) -> None:
    """A plugin's pod on this node is in an Event and the status; one of another node is not."""
    server = SimApiServer()
    daemon_set = ("DaemonSet", "hami-device-plugin")
    server.add_pod("kube-system", "hami-here", NODE, owner=daemon_set)
    server.add_pod("kube-system", "hami-there", "gpu-2", owner=daemon_set)
    server.add_pod("default", "job", NODE)

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        report = await reports(it, lambda now: now.competing_plugins)
        assert [it.pod for it in report.competing_plugins] == ["kube-system/hami-here"]
        assert server.events() == []  # its resources are not known yet

        it.offer(WHOLE)
        await server.until(server.events)
        [event] = server.events()
        assert (event["reason"], event["type"]) == ("CompetingDevicePlugin", "Warning")
        assert "; it may serve nvidia.com/gpu as we do, " in event["note"]
        report = await reports(it, lambda now: now.competing_plugins[0].contested)
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

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        it.offer(WHOLE)
        await server.until(server.events)
        it.registry.apply(CompetingPluginFound(METAGPU, "a.sock"))
        it.registry.apply(CompetingPluginFound(GPU, "nvidia-gpu.sock"))
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

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        it.offer(WHOLE)
        for number in range(3):
            owner = ("DaemonSet", "my-hami-device-plugin")
            server.add_pod("a", f"hami-{number}", NODE, uid=f"uid-{number}", owner=owner)
            await reports(it, lambda now, most=number: len(now.competing_plugins) > most)  # type: ignore[misc] # of a loop
        server.add_pod("b", "x", NODE, owner=("DaemonSet", "nvidia-device-plugin"))
        await server.until(lambda: any("NVIDIA" in each["note"] for each in server.events()))

        assert [each["note"].partition(" (")[0] for each in server.events()] == [
            "HAMi's device plugin",
            "NVIDIA's device plugin",
        ]


async def test_competing_plugins_come_and_go(tmp_path: Path) -> None:
    """The status names the present plugins, and no others."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        server.add_pod("a", "b", NODE, owner=("DaemonSet", "metagpu-device-plugin"))
        await reports(it, lambda now: now.competing_plugins)
        server.delete_pod("a", "b")
        await reports(it, lambda now: not now.competing_plugins)


async def test_without_the_feature_no_plugin_is_reported(tmp_path: Path) -> None:
    """Without the feature `competing-plugins` pods are watched, and no plugin is reported."""
    server = SimApiServer()
    server.add_pod("a", "b", NODE, owner=("DaemonSet", "metagpu-device-plugin"))

    async with cluster_at_work(tmp_path, Feature.PODS, Feature.EVENTS, server=server) as it:
        it.offer(WHOLE)
        with anyio.fail_after(30):
            async for pods in it.registry.watch(lambda now: now.pods):
                if pods.by_uid:
                    break
        await anyio.wait_all_tasks_blocked()

        assert it.cluster.report().competing_plugins == []
        assert server.events() == []

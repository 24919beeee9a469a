"""Other device plugins by their pods: found by their DaemonSets, and named."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu.core.facts import RivalMet
from metagpu.core.model import ResourceName
from metagpu.core.pods import KnownPod
from metagpu.plugins.cluster.rival_pods import note_of, rivals_among
from metagpu.plugins.cluster.settings import Feature
from metagpu.sim.apiserver import SimApiServer
from metagpu.tables import cluster_lines
from tests.build import METAGPU
from tests.plugins.cluster.rig import NODE, Scene, cluster_at_work

WHOLE = "version: metagpu/v1\npools: [{name: a, backends: [{backend: whole}]}]"
GPU = ResourceName("nvidia.com/gpu")


USES = (Feature.RIVALS, Feature.PODS, Feature.EVENTS)


def pod(owner: str, name: str = "p", *, phase: str = "Running") -> KnownPod:
    """Make a pod of kube-system."""
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
    """As their charts and manifests call them; what stands beside them is none."""
    found = [it.program for it in rivals_among([pod(owner)])]
    assert found == ([] if program is None else [program])


def test_a_pod_that_has_ended_is_no_rival() -> None:
    """A pod that is left behind serves nothing."""
    assert rivals_among([pod("DaemonSet/hami-device-plugin", phase="Succeeded")]) == ()


def test_a_rival_contests_names_that_begin_as_its_own() -> None:
    """What is said of it names our resources that it may serve, or that there are none."""
    [rival] = rivals_among([pod("DaemonSet/hami-device-plugin", "hami-x")])

    assert note_of(rival, [METAGPU, GPU, "nvidia.com/mig-1g.5gb"]) == (
        "HAMi's device plugin (pod kube-system/hami-x) runs on this node; it may serve "
        "nvidia.com/gpu, nvidia.com/mig-1g.5gb as we do, and what it serves is left to it. Take it "
        "off this node, or give our resource another name"
    )
    assert note_of(rival, [METAGPU]) == (
        "HAMi's device plugin (pod kube-system/hami-x) runs on this node and gives out its GPUs "
        "under other names than we do; what it has given is left alone. Take it off this node"
    )


async def reports(it: Scene, seen: Callable[[Mapping[str, Any]], object]) -> Mapping[str, Any]:
    """Wait until the cluster's side reports so; give what it reports."""
    with anyio.fail_after(30):
        while not seen(it.cluster.report()):  # noqa: ASYNC110 - a report has no event
            await anyio.sleep(0.005)
    return it.cluster.report()


async def test_rivals_of_this_node_are_told(tmp_path: Path) -> None:
    """A plugin's pod on this node is an Event and in the status; one elsewhere is neither."""
    server = SimApiServer()
    daemon_set = ("DaemonSet", "hami-device-plugin")
    server.add_pod("kube-system", "hami-here", NODE, owner=daemon_set)
    server.add_pod("kube-system", "hami-there", "gpu-2", owner=daemon_set)
    server.add_pod("default", "job", NODE)

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        report = await reports(it, lambda now: now["rivalPods"])
        assert [rival["pod"] for rival in report["rivalPods"]] == ["kube-system/hami-here"]
        assert server.events() == []  # nobody knows yet what it competes for

        it.offer(WHOLE)
        await server.until(server.events)
        [told] = server.events()
        assert (told["reason"], told["type"]) == ("RivalPlugin", "Warning")
        assert "; it may serve nvidia.com/gpu as we do, " in told["note"]
        report = await reports(it, lambda now: now["rivalPods"][0]["contested"])
        assert cluster_lines(report) == [
            (
                "HAMi's device plugin runs on this node: pod kube-system/hami-here; it may serve "
                "nvidia.com/gpu too"
            )
        ]


async def test_a_resource_that_is_taken_names_who_took_it(tmp_path: Path) -> None:
    """Where a pod is known that may be it, the Event about a resource's socket says so."""
    server = SimApiServer()
    owner = ("DaemonSet", "nvidia-device-plugin-daemonset")
    server.add_pod("gpu-operator", "nvidia-x", NODE, owner=owner)

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        it.offer(WHOLE)
        await server.until(server.events)
        it.registry.apply(RivalMet(METAGPU, "a.sock"))
        it.registry.apply(RivalMet(GPU, "nvidia-gpu.sock"))
        await server.until(lambda: len(server.events()) == 3)

        assert [each["note"] for each in server.events()[1:]] == [
            "cnvrg.io/metagpu is served by another device plugin on a.sock, not by us",
            (
                "nvidia.com/gpu is served by NVIDIA's device plugin (pod gpu-operator/nvidia-x) on "
                "nvidia-gpu.sock, not by us"
            ),
        ]


async def test_pod_after_pod_of_one_program_is_one_event(tmp_path: Path) -> None:
    """Anybody may call a DaemonSet so: who makes its pods anew all the time has one Event."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        it.offer(WHOLE)
        for number in range(3):
            owner = ("DaemonSet", "my-hami-device-plugin")
            server.add_pod("a", f"hami-{number}", NODE, uid=f"uid-{number}", owner=owner)
            await reports(it, lambda now, most=number: len(now["rivalPods"]) > most)  # type: ignore[misc] # of a loop
        server.add_pod("b", "x", NODE, owner=("DaemonSet", "nvidia-device-plugin"))
        await server.until(lambda: any("NVIDIA" in each["note"] for each in server.events()))

        assert [each["note"].partition(" (")[0] for each in server.events()] == [
            "HAMi's device plugin",
            "NVIDIA's device plugin",
        ]


async def test_rivals_that_come_and_go_are_seen(tmp_path: Path) -> None:
    """The status names those that are there, and no others."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, *USES, server=server) as it:
        server.add_pod("a", "b", NODE, owner=("DaemonSet", "metagpu-device-plugin"))
        await reports(it, lambda now: now["rivalPods"])
        server.delete_pod("a", "b")
        await reports(it, lambda now: not now["rivalPods"])


async def test_without_the_use_nobody_looks(tmp_path: Path) -> None:
    """Who does not want it hears of pods what else there is to hear, and nothing of rivals."""
    server = SimApiServer()
    server.add_pod("a", "b", NODE, owner=("DaemonSet", "metagpu-device-plugin"))

    async with cluster_at_work(tmp_path, Feature.PODS, Feature.EVENTS, server=server) as it:
        it.offer(WHOLE)
        with anyio.fail_after(30):
            async for pods in it.registry.watch(lambda now: now.pods):
                if pods.by_uid:
                    break
        await anyio.wait_all_tasks_blocked()

        assert it.cluster.report()["rivalPods"] == []
        assert server.events() == []

"""Layouts of MIG instances that mig-manager's label chooses, with and without a file of them."""

from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from metagpu.agent.config_source import ConfigSource
from metagpu.compat.contract import ConversionContext
from metagpu.core.model.shares import ResourceName
from metagpu.plugins.cluster.settings import ClusterSettings
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.mig import a_node, hurry
from tests.rigs.waiting import becomes

NODE = "gpu-1"
LABEL = "nvidia.com/mig.config"
STATE = "nvidia.com/mig.config.state"
SLICES = """
version: v1
flags: {migStrategy: mixed}
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
"""
HALVES = """
version: v1
mig-configs:
  halves: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]
"""


class Cluster:
    """An API server with one Node, whose label people change."""

    def __init__(self, tmp_path: Path, **labels: str) -> None:
        self.server = SimApiServer()
        named = {name.replace("__", "."): value for name, value in labels.items()}
        self.server.add_node(NODE, {f"nvidia.com/{name}": text for name, text in named.items()})
        self.folder = tmp_path

    def settings(self) -> ClusterSettings:
        """Return the settings of a daemon that follows the Node."""
        return ClusterSettings(NODE, self.server.kubeconfig(self.folder), choice_timeout=5.0)

    def choose(self, layout: str | None) -> None:
        """Set or remove mig-manager's label."""
        self.server.label(NODE, {LABEL: layout})

    async def answers(self, state: str | None) -> None:
        """Wait for the answer to the label."""
        await self.server.until(lambda: self.server.labels(NODE).get(STATE) == state)

    def notes(self, reason: str) -> list[str]:
        """Return the notes of the Node's Events of one kind."""
        return [event["note"] for event in self.server.events() if event["reason"] == reason]


async def source_of(tmp_path: Path, *texts: str, **environment: str) -> ConfigSource:
    """Return a source with these files."""
    paths = [tmp_path / f"{number}.yaml" for number, _ in enumerate(texts)]
    for path, text in zip(paths, texts, strict=True):
        await anyio.Path(path).write_text(text)
    return ConfigSource(tuple(paths), context=ConversionContext(environment=environment))


async def configuration(scene: Scene) -> dict[str, Any]:
    """Return the part of `metagpu status` about the configuration."""
    status = await scene.status()
    assert isinstance(status, dict)
    found: dict[str, Any] = status["configuration"]
    return found


def mig(profile: str) -> ResourceName:
    """Return the resource of a profile."""
    return ResourceName(f"nvidia.com/mig-{profile}")


async def test_a_label_chooses_among_the_layouts_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any file, the label divides the GPUs as mig-manager does, and back."""
    hurry(monkeypatch)
    cluster = Cluster(tmp_path)
    node = await a_node(tmp_path, "{model: h100-80gb, mig: true}, {model: t4}")

    async with (
        cluster.server.running(),
        agent_at_work(
            tmp_path, node, source=ConfigSource(), cluster_settings=cluster.settings()
        ) as scene,
    ):
        await scene.until(100, 100, METAGPU)  # the T4 alone: the other GPU is in MIG mode
        cluster.choose("all-1g.10gb")
        await scene.until(7, 7, mig("1g.10gb"))
        await scene.until(100, 100, METAGPU)
        await cluster.answers("success")
        assert (await configuration(scene))["migLayout"] == "all-1g.10gb"

        cluster.choose("all-balanced")
        await scene.until(2, 2, mig("1g.10gb"))
        await scene.until(1, 1, mig("2g.20gb"))
        await scene.until(1, 1, mig("3g.40gb"))
        await cluster.answers("success")

        cluster.choose("all-1g.5gb")
        await cluster.answers("failed")
        await cluster.server.until(lambda: cluster.notes("ConfigRejected") != [])
        assert cluster.notes("ConfigRejected") == [
            (
                "there is no layout 'all-1g.5gb' (label nvidia.com/mig.config); there are: "
                "all-disabled, all-enabled, all-balanced, all-1g.10gb, all-1g.10gb.me, "
                "all-1g.20gb, all-2g.20gb, all-3g.40gb, all-4g.40gb, all-7g.80gb; "
                "the GPUs stay as they are"
            )
        ]
        await scene.until(1, 1, mig("3g.40gb"))
        assert (await configuration(scene))["migLayout"] == "all-balanced"

        cluster.choose("all-disabled")
        await becomes(lambda: not scene.node.gpus[0].mig.enabled)
        await scene.agent.health.survey()
        await scene.until(200, 200, METAGPU)
        await cluster.answers("success")
        cluster.choose(None)
        await cluster.answers(None)


async def test_the_plugins_file_names_and_shares_what_the_label_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NVIDIA's plugin's file alone, its names and replicas hold beside the layout."""
    hurry(monkeypatch)
    cluster = Cluster(tmp_path, mig__config="all-3g.40gb")
    node = await a_node(tmp_path, "{model: h100-80gb, mig: true}, {model: t4}")
    source = await source_of(tmp_path, SLICES)

    async with (
        cluster.server.running(),
        agent_at_work(tmp_path, node, source=source, cluster_settings=cluster.settings()) as scene,
    ):
        await scene.until(2, 2, mig("3g.40gb"))
        await scene.until(4, 4, ResourceName("nvidia.com/gpu"))
        await cluster.answers("success")


async def test_a_wrong_label_at_start_leaves_the_rest_on_offer(tmp_path: Path) -> None:
    """A label that names no layout fails alone: the plugin's file decides."""
    cluster = Cluster(tmp_path, mig__config="all-of-it")
    node = await a_node(tmp_path, "{model: h100-80gb}, {model: t4}")
    source = await source_of(tmp_path, SLICES)

    async with (
        cluster.server.running(),
        agent_at_work(tmp_path, node, source=source, cluster_settings=cluster.settings()) as scene,
    ):
        await scene.until(8, 8, ResourceName("nvidia.com/gpu"))
        await cluster.answers("failed")
        status = await scene.status()
        assert isinstance(status, dict)
        assert "there is no layout 'all-of-it'" in status["cluster"]["refusal"]


@pytest.mark.parametrize("layouts", [[HALVES], []])
async def test_a_node_without_the_label_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layouts: list[str]
) -> None:
    """Without the label the plugin's file decides, and instances of before stay on offer."""
    hurry(monkeypatch)
    wanted = "halves" if layouts else "all-3g.40gb"
    cluster = Cluster(tmp_path)
    node = await a_node(tmp_path, "{model: h100-80gb}, {model: t4}")
    source = await source_of(tmp_path, SLICES, *layouts)
    settings = cluster.settings

    async with cluster.server.running():
        async with agent_at_work(
            tmp_path, node, source=source, cluster_settings=settings()
        ) as agent:
            await agent.until(8, 8, ResourceName("nvidia.com/gpu"))
            cluster.choose(wanted)
            await agent.until(2, 2, mig("3g.40gb"))
            await cluster.answers("success")
            offers = agent.agent.registry.snapshot.offers
            cluster.choose(None)
            await cluster.answers(None)
            assert agent.agent.registry.snapshot.offers == offers
        async with agent_at_work(
            tmp_path, node, source=source, cluster_settings=settings()
        ) as scene:
            await scene.until(2, 2, mig("3g.40gb"))
            await scene.until(4, 4, ResourceName("nvidia.com/gpu"))


async def test_a_label_that_is_not_read_yet_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the API server is away, GPUs are not offered whole that a label may divide."""
    hurry(monkeypatch)
    cluster = Cluster(tmp_path, mig__config="halves")
    node = await a_node(tmp_path, "{model: h100-80gb}")
    source = await source_of(tmp_path, SLICES, HALVES)
    async with cluster.server.running():
        settings = replace(cluster.settings(), choice_timeout=0.05)

    async with agent_at_work(tmp_path, node, source=source, cluster_settings=settings) as agent:
        wanted = "which layout the label nvidia.com/mig.config chooses"
        await becomes(lambda: (agent.agent.config_loader.error or "").endswith(wanted))
        await agent.wait_snapshot(lambda now: bool(now.gpus))
        await anyio.sleep(0.5)
        assert not agent.agent.registry.snapshot.offers
        assert (await configuration(agent))["error"] == agent.agent.config_loader.error
        async with cluster.server.running():
            await agent.until(2, 2, mig("3g.40gb"))
            await cluster.answers("success")


async def test_a_pod_delays_the_layout_of_a_label_that_is_read_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout of the GPUs has no file that says so: a silent API server leaves them whole."""
    hurry(monkeypatch)
    cluster = Cluster(tmp_path, mig__config="all-1g.10gb")
    node = await a_node(tmp_path, "{model: h100-80gb, count: 2}")
    async with cluster.server.running():
        settings = replace(cluster.settings(), choice_timeout=0.05)

    async with agent_at_work(
        tmp_path, node, source=ConfigSource(), cluster_settings=settings
    ) as scene:
        await scene.until(200, 200, METAGPU)
        whole = SimPod.single("whole", {METAGPU: 100})
        await scene.kubelet.admit(whole)
        async with cluster.server.running():
            await scene.until(14, 7, mig("1g.10gb"))
            await cluster.answers("pending")
            await scene.kubelet.delete(whole)
            await scene.until(14, 14, mig("1g.10gb"))
            await cluster.answers("success")


async def test_the_option_chooses_among_the_layouts_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--mig-config` needs no file and no API server; the strategy `single` names as usual."""
    hurry(monkeypatch)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    environment = {"MIG_STRATEGY": "single"}
    context = ConversionContext(mig_config="all-2g.10gb", environment=environment)

    async with agent_at_work(tmp_path, node, source=ConfigSource(context=context)) as scene:
        await scene.until(3, 3, ResourceName("nvidia.com/gpu"))


async def test_a_node_of_mig_manager_is_left_to_it(tmp_path: Path) -> None:
    """The GPU operator's MIG manager has the label: metagpu neither divides nor answers."""
    cluster = Cluster(tmp_path, mig__config="all-1g.10gb")
    cluster.server.label(NODE, {"nvidia.com/gpu.deploy.mig-manager": "true"})
    node = await a_node(tmp_path, "{model: h100-80gb}, {model: t4}")
    source = await source_of(tmp_path, SLICES)

    async with (
        cluster.server.running(),
        agent_at_work(tmp_path, node, source=source, cluster_settings=cluster.settings()) as scene,
    ):
        await scene.until(8, 8, ResourceName("nvidia.com/gpu"))
        assert STATE not in cluster.server.labels(NODE)
        assert (await configuration(scene))["notes"] == [
            (
                "label: nvidia.com/mig.config: is left to NVIDIA's MIG manager, which "
                "nvidia.com/gpu.deploy.mig-manager=true runs on this node; with false, metagpu "
                "makes the layout"
            )
        ]
        cluster.server.label(NODE, {"nvidia.com/gpu.deploy.mig-manager": "false"})
        await scene.until(7, 7, mig("1g.10gb"))
        await cluster.answers("success")


@pytest.mark.parametrize(
    ("layout", "options", "state"),
    [
        ("all-1g.10gb", "profiles: [1g.10gb], enableMig: true", "failed"),
        ("all-1g.10gb", "existing: true", None),
        ("all-disabled", "disableMig: true", None),
    ],
)
async def test_a_file_of_our_own_decides(
    tmp_path: Path, layout: str, options: str, state: str | None
) -> None:
    """A label that a file of our own contradicts has failed; instances of others are theirs."""
    cluster = Cluster(tmp_path, mig__config=layout)
    node = await a_node(tmp_path, "{model: h100-80gb}, {model: t4}")
    pools = (
        f"version: metagpu/v1\npools:\n- {{name: a, gpus: {{index: 0}}, backends: [{{backend: mig, "
        f"{options}}}]}}\n- {{name: b, backends: [{{backend: whole}}]}}\n"
    )

    async with (
        cluster.server.running(),
        agent_at_work(tmp_path, node, pools, cluster_settings=cluster.settings()) as scene,
    ):
        await scene.until(1, 1, ResourceName("nvidia.com/gpu"))
        await cluster.answers(state)
        if state == "failed":
            await cluster.server.until(lambda: cluster.notes("ConfigRejected") != [])
            assert "says which MIG instances there are" in cluster.notes("ConfigRejected")[0]


async def test_an_answer_of_mig_manager_is_replaced_once_that_has_gone(tmp_path: Path) -> None:
    """The answer of a MIG manager that runs no more says nothing about the present layout."""
    cluster = Cluster(tmp_path, mig__config="all-disabled")
    cluster.server.label(NODE, {STATE: "pending"}, by="nvidia-mig-manager")
    node = await a_node(tmp_path, "{model: h100-80gb}")

    async with (
        cluster.server.running(),
        agent_at_work(tmp_path, node, source=ConfigSource(), cluster_settings=cluster.settings()),
    ):
        await cluster.answers("success")


async def test_the_answer_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that the file gets later is a success, and an error after it changes nothing."""
    hurry(monkeypatch)
    cluster = Cluster(tmp_path, mig__config="whole")
    node = await a_node(tmp_path, "{model: h100-80gb, mig: true}")
    source, file = await source_of(tmp_path, HALVES), anyio.Path(tmp_path / "0.yaml")

    async with (
        cluster.server.running(),
        agent_at_work(tmp_path, node, source=source, cluster_settings=cluster.settings()) as scene,
    ):
        await cluster.answers("failed")
        await file.write_text(HALVES.replace("halves", "whole").replace("3g.40gb: 2", "7g.80gb: 1"))
        await scene.agent.reload()
        await scene.until(1, 1, mig("7g.80gb"))
        await cluster.answers("success")

        await file.write_text("mig-configs: 7")
        await scene.agent.reload()
        status = await scene.status()
        assert isinstance(status, dict)
        assert "mig-configs" in status["configuration"]["error"]
        assert (status["configuration"]["migLayout"], status["cluster"]["refusal"]) == (
            "whole",
            None,
        )
        await cluster.answers("success")


async def test_compute_instances_are_refused_where_they_are_chosen(tmp_path: Path) -> None:
    """A layout that divides GPU instances further has failed; the others of the file are had."""
    layouts = """
version: v1
mig-configs:
  parts:
  - {devices: [0], mig-enabled: true, mig-devices: {1c.3g.40gb: 4}}
  - {devices: [1], mig-enabled: true, mig-devices: {7c.7g.80gb: 1}}
  halves: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]
"""
    cluster = Cluster(tmp_path, mig__config="parts")
    node = await a_node(tmp_path, "{model: h100-80gb, mig: true, count: 2}")
    source = await source_of(tmp_path, layouts)

    async with (
        cluster.server.running(),
        agent_at_work(tmp_path, node, source=source, cluster_settings=cluster.settings()) as scene,
    ):
        await scene.until(1, 1, mig("7g.80gb"))
        await cluster.answers("failed")
        await cluster.server.until(lambda: cluster.notes("MIGLayoutRejected") != [])
        assert cluster.notes("MIGLayoutRejected") == [
            (
                "1c.3g.40gb divides a GPU instance between compute instances, which metagpu does "
                "not create; write the profile of the GPU instance, such as 2g.10gb"
            )
        ]
        cluster.choose("halves")
        await scene.until(4, 4, mig("3g.40gb"))
        await cluster.answers("success")

"""docs/autoscaling.md and its files: names that exist here, and the right numbers."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from metagpu.core.model.snapshot import Snapshot, Versions
from metagpu.core.state.facts import DriverRead, GpusFound
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.config_follower import CONFIG_LABEL
from metagpu.plugins.cluster.gpu_labels import LabelSettings, node_labels
from metagpu.plugins.cluster.node_object import TAINTS, capacity_of
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.rigs.build import STRATEGIES, after, layout_of

ROOT: Final = Path(__file__).parents[1]
FILES: Final = sorted((ROOT / "deploy" / "autoscaling").iterdir())
PAGE: Final = (ROOT / "docs" / "autoscaling.md").read_text(encoding="utf-8")
DOC: Final = "\n".join((PAGE, *(f"```yaml\n{file.read_text('utf-8')}```" for file in FILES)))
BLOCKS: Final = [
    manifest
    for text in re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    for manifest in yaml.safe_load_all(text)
]
CONFIG: Final = next(text for text in re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL))
TEMPLATE: Final = "k8s.io/cluster-autoscaler/node-template/"


def manifest(kind: str) -> Mapping[str, Any]:
    """Return the one manifest of a kind."""
    [found] = [block for block in BLOCKS if block.get("kind") == kind]
    return dict(found)


async def promised() -> Snapshot:
    """Return the layout and snapshot of the node that the examples describe."""
    nvml = NvmlDriver(SimLibrary(build_node("a100-40gb:8")))
    async with nvml.session():
        gpus = (await nvml.survey()).gpus
    layout = layout_of(*gpus, text=CONFIG)
    return after(GpusFound(gpus, at=0), DriverRead(Versions("580.1")), layout.offer_fact)


def tags() -> Mapping[str, str]:
    """Return the tags of the Auto Scaling group."""
    [group] = manifest("ClusterConfig")["nodeGroups"]
    return dict(group["tags"])


def tagged(what: str) -> Mapping[str, str]:
    """Return the Auto Scaling group's tags for resources, labels or taints."""
    prefix = f"{TEMPLATE}{what}/"
    return {name.removeprefix(prefix): v for name, v in tags().items() if name.startswith(prefix)}


async def test_the_numbers_are_those_that_the_node_reports() -> None:
    """Tags and overlay have for each resource the number that the configuration offers."""
    offered = {name: str(count) for name, count in capacity_of(await promised()).items()}
    overlay = manifest("NodeOverlay")["spec"]["capacity"]

    assert tagged("resources") == offered
    assert overlay == {name: count for name, count in offered.items() if name in overlay}
    assert offered.keys() - overlay.keys() == {"nvidia.com/gpu"}  # which Karpenter knows
    [reported] = re.findall(r"^\{.*\}$", PAGE, re.MULTILINE)
    assert {name: str(count) for name, count in yaml.safe_load(reported).items()} == offered


async def test_labels_are_those_that_the_node_has() -> None:
    """Labels of selectors and tags are those that metagpu writes or reads."""
    written = node_labels(await promised(), LabelSettings(STRATEGIES))
    promises = {**tagged("label"), **manifest("Pod")["spec"]["nodeSelector"]}

    assert promises.pop(CONFIG_LABEL) == "default"
    assert promises == {name: written[name] for name in promises}
    for name in ("nvidia.com/gpu.product", "nvidia.com/gpu.family"):
        assert name in promises


def taints() -> Iterator[Mapping[str, str]]:
    """Return all startup taints of the manifests."""
    yield from manifest("NodePool")["spec"]["template"]["spec"]["startupTaints"]
    yield from manifest("ClusterConfig")["nodeGroups"][0]["taints"]


def test_taints_are_those_that_are_lifted() -> None:
    """Every taint of the examples is removed by metagpu, and no manifest has it as permanent."""
    assert {taint["key"] for taint in taints()} <= TAINTS
    assert {taint["effect"] for taint in taints()} == {"NoSchedule"}
    assert not tagged("taint")
    [container] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    flags = [value for value in container["command"] if value.startswith("--startup-taint=")]
    assert [flag.partition("=")[2] for flag in flags] == ["metagpu.io/starting"]
    for key in re.findall(
        r"(?:[a-z.-]*startup-taint[a-z.-]*/|metagpu\.io/)(?:metagpu|starting)", DOC
    ):
        assert key in TAINTS


@pytest.mark.parametrize("kind", ["ClusterConfig", "NodePool"])
def test_the_profile_of_the_nodes_is_chosen_by_a_label(kind: str) -> None:
    """New nodes have the label that chooses their configuration."""
    document = manifest(kind)
    own = (
        document["nodeGroups"][0]["labels"]
        if kind == "ClusterConfig"
        else document["spec"]["template"]["metadata"]["labels"]
    )
    assert own == {CONFIG_LABEL: "default"}


def test_a_pod_asks_for_what_is_offered() -> None:
    """The example's pod requests a resource that the tags promise, of one GPU at most."""
    [container] = manifest("Pod")["spec"]["containers"]
    [(resource, count)] = container["resources"]["limits"].items()

    assert resource in tagged("resources")
    assert 0 < count <= 100

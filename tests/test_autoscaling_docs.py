"""docs/autoscaling.md: its manifests parse, and name what exists here, in the right numbers."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from metagpu.core.facts import DriverRead, GpusFound
from metagpu.core.snapshot import Snapshot, Versions
from metagpu.nvml import Nvml
from metagpu.plugins.cluster.choice import OUR_LABEL
from metagpu.plugins.cluster.labels import labels
from metagpu.plugins.cluster.node import TAINTS, capacity_of
from metagpu.sim.library import Library
from metagpu.sim.spec import simulated
from tests.build import after, laid_out

DOC: Final = (Path(__file__).parents[1] / "docs" / "autoscaling.md").read_text(encoding="utf-8")
BLOCKS: Final = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)]
CONFIG: Final = next(text for text in re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL))
TEMPLATE: Final = "k8s.io/cluster-autoscaler/node-template/"


def manifest(kind: str) -> Mapping[str, Any]:
    """Give the one manifest of a kind."""
    [found] = [block for block in BLOCKS if block.get("kind") == kind]
    return dict(found)


async def promised() -> Snapshot:
    """Say what is known of the node that the examples are about."""
    nvml = Nvml(Library(simulated("a100-40gb:8")))
    async with nvml.session():
        gpus = (await nvml.survey()).gpus
    layout = laid_out(*gpus, text=CONFIG)
    return after(GpusFound(gpus, at=0), DriverRead(Versions("580.1")), layout.offered)


def tags() -> Mapping[str, str]:
    """Give the tags of the Auto Scaling group."""
    [group] = manifest("ClusterConfig")["nodeGroups"]
    return dict(group["tags"])


def tagged(what: str) -> Mapping[str, str]:
    """Give what the tags of the Auto Scaling group say of resources, labels or taints."""
    prefix = f"{TEMPLATE}{what}/"
    return {it.removeprefix(prefix): v for it, v in tags().items() if it.startswith(prefix)}


async def test_the_numbers_are_those_that_the_node_tells() -> None:
    """Tags and overlay say of each resource what the configuration makes of such a machine."""
    offered = {name: str(count) for name, count in capacity_of(await promised()).items()}
    overlay = manifest("NodeOverlay")["spec"]["capacity"]

    assert tagged("resources") == offered
    assert overlay == {name: count for name, count in offered.items() if name in overlay}
    assert offered.keys() - overlay.keys() == {"nvidia.com/gpu"}  # which Karpenter knows
    [told] = re.findall(r"^\{.*\}$", DOC, re.MULTILINE)
    assert {name: str(count) for name, count in yaml.safe_load(told).items()} == offered


async def test_labels_are_those_that_the_node_has() -> None:
    """What pods select by, and what tags promise, is what metagpu writes or is asked by."""
    written = labels(await promised())
    promises = {**tagged("label"), **manifest("Pod")["spec"]["nodeSelector"]}

    assert promises.pop(OUR_LABEL) == "default"
    assert promises == {name: written[name] for name in promises}
    for name in ("nvidia.com/gpu.product", "nvidia.com/gpu.family"):
        assert name in promises


def taints() -> Iterator[Mapping[str, str]]:
    """Give all startup taints of the manifests."""
    yield from manifest("NodePool")["spec"]["template"]["spec"]["startupTaints"]
    yield from manifest("ClusterConfig")["nodeGroups"][0]["taints"]


def test_taints_are_those_that_are_lifted() -> None:
    """Every taint of the examples is taken away by metagpu, and none is told to be permanent."""
    assert {taint["key"] for taint in taints()} <= TAINTS
    assert {taint["effect"] for taint in taints()} == {"NoSchedule"}
    assert not tagged("taint")
    [container] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    flags = [it for it in container["command"] if it.startswith("--startup-taint=")]
    assert [flag.partition("=")[2] for flag in flags] == ["metagpu.io/starting"]
    for key in re.findall(
        r"(?:[a-z.-]*startup-taint[a-z.-]*/|metagpu\.io/)(?:metagpu|starting)", DOC
    ):
        assert key in TAINTS


@pytest.mark.parametrize("kind", ["ClusterConfig", "NodePool"])
def test_the_profile_of_the_nodes_is_chosen_by_a_label(kind: str) -> None:
    """Nodes that are made come with the label that chooses their configuration."""
    it = manifest(kind)
    own = (
        it["nodeGroups"][0]["labels"]
        if kind == "ClusterConfig"
        else it["spec"]["template"]["metadata"]["labels"]
    )
    assert own == {OUR_LABEL: "default"}


def test_a_pod_asks_for_what_is_offered() -> None:
    """The example's pod asks for a resource that the tags promise, and for no more than one GPU."""
    [container] = manifest("Pod")["spec"]["containers"]
    [(resource, count)] = container["resources"]["limits"].items()

    assert resource in tagged("resources")
    assert 0 < count <= 100

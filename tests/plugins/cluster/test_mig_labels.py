"""MIG instances as labels: those of GPU Feature Discovery, under its two strategies and ours."""

from collections.abc import Mapping

import pytest

from metagpu.core.state.facts import GpusFound
from metagpu.plugins.cluster.gpu_labels import node_labels
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import STRATEGIES, after, gpu, layout_of

A100 = "NVIDIA-A100-SXM4-40GB"
POOL = "version: metagpu/v1\npools:\n  - name: all\n    backends: [{{backend: mig, {}}}]\n"


def labels_of(options: str, count: int = 2, text: str = "") -> Mapping[str, str]:
    """Return the labels about GPUs and instances of a node of A100s with this configuration."""
    gpus = [mig_gpu(index) for index in range(count)]
    layout = layout_of(*gpus, text=text or POOL.format(options))
    found = node_labels(after(GpusFound(tuple(gpus), at=0), layout.offer_fact), STRATEGIES)
    return {
        name: value
        for name, value in found.items()
        if name.startswith(("nvidia.com/mig", "nvidia.com/gpu"))
    }


def of_profile(name: str, found: Mapping[str, str]) -> Mapping[str, str]:
    """Return the labels of one profile, without its name."""
    prefix = f"nvidia.com/mig-{name}."
    return {key.removeprefix(prefix): it for key, it in found.items() if key.startswith(prefix)}


def test_a_layout_is_labelled_by_profile() -> None:
    """Under mixed each profile has its labels, and whole GPUs are not offered."""
    found = labels_of("layout: {2g.10gb: 2, 1g.5gb: 3}")

    assert of_profile("2g.10gb", found) == {
        "product": f"{A100}-MIG-2g.10gb",
        "count": "4",
        "replicas": "1",
        "sharing-strategy": "none",
        "memory": "9856",
        "multiprocessors": "28",
        "slices.gi": "2",
        "slices.ci": "2",
        "engines.copy": "2",
        "engines.decoder": "1",
        "engines.encoder": "0",
        "engines.jpeg": "0",
        "engines.ofa": "0",
    }
    assert of_profile("1g.5gb", found)["count"] == "6"
    assert found["nvidia.com/mig.strategy"] == "mixed"
    assert found["nvidia.com/mig.capable"] == "true"
    assert found["nvidia.com/gpu.product"] == A100
    assert found["nvidia.com/gpu.count"] == "2"
    assert found["nvidia.com/gpu.replicas"] == "0"


def test_single_takes_the_place_of_the_gpus() -> None:
    """Under single, instances are nvidia.com/gpu, and labels of GPUs describe them."""
    found = labels_of("layout: {1g.5gb: 7}, resource: nvidia.com/gpu")

    assert found["nvidia.com/mig.strategy"] == "single"
    assert found["nvidia.com/gpu.product"] == f"{A100}-MIG-1g.5gb"
    assert found["nvidia.com/gpu.count"] == "14"
    assert found["nvidia.com/gpu.replicas"] == "1"
    assert found["nvidia.com/gpu.memory"] == "4864"
    assert found["nvidia.com/gpu.multiprocessors"] == "14"
    assert found["nvidia.com/gpu.slices.gi"] == "1"
    assert found["nvidia.com/gpu.engines.copy"] == "1"
    assert found["nvidia.com/gpu.family"] == "undefined"  # what is the GPU's own stays
    assert not [name for name in found if name.startswith("nvidia.com/mig-")]


def test_single_beside_whole_gpus_is_mixed() -> None:
    """Beside whole GPUs, instances do not take the GPUs' labels."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: mig, layout: {1g.5gb: 7}, "
        "resource: nvidia.com/gpu}]}\n"
        "  - {name: b, backends: [{backend: fraction}]}\n"
    )
    partitioned, whole = mig_gpu(0), gpu(1)
    layout = layout_of(partitioned, whole, text=text)
    found = node_labels(after(GpusFound((partitioned, whole), at=0), layout.offer_fact), STRATEGIES)

    assert found["nvidia.com/mig.strategy"] == "mixed"
    assert found["nvidia.com/gpu.product"] == A100
    assert found["nvidia.com/gpu.replicas"] == "1"
    assert of_profile("1g.5gb", found)["count"] == "7"


def test_instances_on_demand_are_counted_as_there_could_be() -> None:
    """Each profile counts as many instances as fit on the GPUs at once."""
    found = labels_of("profiles: [1g.5gb, 1g.5gb+me, 2g.10gb, 3g.20gb, 7g.40gb]")
    counts = {
        name: of_profile(name, found)["count"]
        for name in ("1g.5gb", "1g.5gb.me", "2g.10gb", "3g.20gb", "7g.40gb")
    }

    assert counts == {
        "1g.5gb": "14",
        "1g.5gb.me": "2",
        "2g.10gb": "6",
        "3g.20gb": "4",
        "7g.40gb": "2",
    }
    assert of_profile("1g.5gb.me", found)["product"] == f"{A100}-MIG-1g.5gb.me"


@pytest.mark.parametrize(
    ("named", "product"),
    [("", "MIG-1g.5gb"), (", resource: nvidia.com/mig-1g.5gb", "MIG-1g.5gb-SHARED")],
)
def test_replicas_of_instances_have_labels(named: str, product: str) -> None:
    """Instances are counted once; the product's name warns of sharing."""
    found = of_profile("1g.5gb", labels_of(f"layout: {{1g.5gb: 7}}, replicas: 4{named}"))

    assert found["product"] == f"{A100}-{product}"
    assert (found["count"], found["replicas"]) == ("14", "4")
    assert found["sharing-strategy"] == "time-slicing"


def test_instances_under_mps_have_labels() -> None:
    """The sharing strategy of instances under MPS is mps."""
    found = of_profile("1g.5gb", labels_of("layout: {1g.5gb: 7}, mps: {replicas: 4}"))

    assert (found["count"], found["replicas"]) == ("14", "4")
    assert found["sharing-strategy"] == "mps"


def test_without_instances_there_is_no_strategy() -> None:
    """A node without MIG instances has only the label of MIG capability."""
    layout = layout_of(gpu(0))
    found = node_labels(after(GpusFound((gpu(0),), at=0), layout.offer_fact), STRATEGIES)

    assert [name for name in found if "mig" in name] == ["nvidia.com/mig.capable"]

"""MIG instances as labels: those of GPU Feature Discovery, under its two strategies and ours."""

from collections.abc import Mapping

import pytest

from metagpu.core.facts import GpusFound
from metagpu.plugins.cluster.labels import labels
from tests.backends.mig.gpus import mig_gpu
from tests.build import after, gpu, laid_out

A100 = "NVIDIA-A100-SXM4-40GB"
POOL = "version: metagpu/v1\npools:\n  - name: all\n    backends: [{{backend: mig, {}}}]\n"


def told(options: str, count: int = 2, text: str = "") -> Mapping[str, str]:
    """Give the labels about GPUs and instances of a node of A100s that is cut so."""
    gpus = [mig_gpu(index) for index in range(count)]
    layout = laid_out(*gpus, text=text or POOL.format(options))
    found = labels(after(GpusFound(tuple(gpus), at=0), layout.offered))
    return {
        name: value
        for name, value in found.items()
        if name.startswith(("nvidia.com/mig", "nvidia.com/gpu"))
    }


def of_profile(name: str, found: Mapping[str, str]) -> Mapping[str, str]:
    """Pick the labels of one profile, without its name."""
    prefix = f"nvidia.com/mig-{name}."
    return {key.removeprefix(prefix): it for key, it in found.items() if key.startswith(prefix)}


def test_a_layout_is_told_by_profile() -> None:
    """Under mixed each profile has its labels, and GPUs as such are not to be had."""
    found = told("layout: {2g.10gb: 2, 1g.5gb: 3}")

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
    """Under single, instances are what nvidia.com/gpu is: labels of GPUs are theirs."""
    found = told("layout: {1g.5gb: 7}, resource: nvidia.com/gpu")

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
    """Where other GPUs of the node are no instances, their labels are not taken."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: mig, layout: {1g.5gb: 7}, "
        "resource: nvidia.com/gpu}]}\n"
        "  - {name: b, backends: [{backend: fraction}]}\n"
    )
    cut, plain = mig_gpu(0), gpu(1)
    layout = laid_out(cut, plain, text=text)
    found = labels(after(GpusFound((cut, plain), at=0), layout.offered))

    assert found["nvidia.com/mig.strategy"] == "mixed"
    assert found["nvidia.com/gpu.product"] == A100
    assert found["nvidia.com/gpu.replicas"] == "1"
    assert of_profile("1g.5gb", found)["count"] == "7"


def test_instances_on_demand_are_counted_as_there_could_be() -> None:
    """Of each profile as many as the GPUs have room for, however many places it may have."""
    found = told("profiles: [1g.5gb, 1g.5gb+me, 2g.10gb, 3g.20gb, 7g.40gb]")
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
def test_replicas_of_instances_are_told(named: str, product: str) -> None:
    """Instances are counted once; who asks under their own name is warned by the product's."""
    found = of_profile("1g.5gb", told(f"layout: {{1g.5gb: 7}}, replicas: 4{named}"))

    assert found["product"] == f"{A100}-{product}"
    assert (found["count"], found["replicas"]) == ("14", "4")
    assert found["sharing-strategy"] == "time-slicing"


def test_instances_under_mps_are_told() -> None:
    """Where containers share an instance through MPS, that is the strategy."""
    found = of_profile("1g.5gb", told("layout: {1g.5gb: 7}, mps: {replicas: 4}"))

    assert (found["count"], found["replicas"]) == ("14", "4")
    assert found["sharing-strategy"] == "mps"


def test_without_instances_there_is_no_strategy() -> None:
    """A node that cuts no GPU by MIG says nothing of it but whether it could."""
    layout = laid_out(gpu(0))
    found = labels(after(GpusFound((gpu(0),), at=0), layout.offered))

    assert [name for name in found if "mig" in name] == ["nvidia.com/mig.capable"]

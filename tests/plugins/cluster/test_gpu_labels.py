"""A node's GPUs as labels: names and values of GPU Feature Discovery, and ours."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.model.gpu import Connection, Gpu, Topology
from metagpu.core.model.snapshot import Versions
from metagpu.core.state.facts import DriverRead, GpusFound, TopologyRead
from metagpu.plugins.cluster.gpu_labels import family, node_labels
from metagpu.plugins.cluster.label_syntax import sanitize
from tests.rigs.build import STRATEGIES, after, gpu, layout_of

A100 = replace(
    gpu(0), compute_capability=(8, 0), architecture="ampere", ecc=True, mig_enabled=False
)


def labels_of(*gpus: Gpu, text: str = "", facts: tuple[object, ...] = ()) -> Mapping[str, str]:
    """Return the labels of a node with these GPUs."""
    layout = layout_of(*gpus, text=text)
    return node_labels(after(GpusFound(gpus, at=0), *facts, layout.offer_fact), STRATEGIES)  # type: ignore[arg-type]


def test_labels_of_a_node_with_fractions() -> None:
    """A plain node has labels of product, amounts, family, versions and shares."""
    versions = DriverRead(Versions("580.65.06", (13, 0)))

    assert labels_of(A100, replace(A100, id=gpu(1).id, index=1), facts=(versions,)) == {
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB",
        "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.memory": "40960",
        "nvidia.com/gpu.family": "ampere",
        "nvidia.com/gpu.compute.major": "8",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/cuda.driver-version.full": "580.65.06",
        "nvidia.com/cuda.driver-version.major": "580",
        "nvidia.com/cuda.driver-version.minor": "65",
        "nvidia.com/cuda.driver-version.revision": "06",
        "nvidia.com/cuda.driver.major": "580",
        "nvidia.com/cuda.driver.minor": "65",
        "nvidia.com/cuda.driver.rev": "06",
        "nvidia.com/cuda.runtime-version.full": "13.0",
        "nvidia.com/cuda.runtime-version.major": "13",
        "nvidia.com/cuda.runtime-version.minor": "0",
        "nvidia.com/cuda.runtime.major": "13",
        "nvidia.com/cuda.runtime.minor": "0",
        "metagpu.io/gpu.ecc": "true",
        "metagpu.io/gpu.nvlink": "false",
        "metagpu.io/gpu.nvswitch": "false",
        "metagpu.io/cnvrg.io_metagpu.backend": "fraction",
        "metagpu.io/cnvrg.io_metagpu.replicas": "10",
        "metagpu.io/cnvrg.io_metagpu.gpus": "2",
        "metagpu.io/cnvrg.io_metagpu.memory": "4096",
    }


SLICES = """
version: metagpu/v1
pools:
  - name: all
    backends: [{{backend: timeslice, replicas: 4, resource: {resource}}}]
"""


@pytest.mark.parametrize(
    ("resource", "product"),
    [
        ("nvidia.com/gpu", "NVIDIA-A100-SXM4-40GB-SHARED"),
        ("nvidia.com/gpu.shared", "NVIDIA-A100-SXM4-40GB"),
    ],
)
def test_product_says_shared_only_under_the_gpus_own_name(resource: str, product: str) -> None:
    """The product's name warns users who get a slice for nvidia.com/gpu."""
    found = labels_of(A100, text=SLICES.format(resource=resource))

    assert found["nvidia.com/gpu.product"] == product
    assert found["nvidia.com/gpu.replicas"] == "4"
    assert found["nvidia.com/gpu.sharing-strategy"] == "time-slicing"


def test_most_frequent_product_speaks_for_a_mixed_node() -> None:
    """Labels of a mixed node are those of the most frequent product."""
    small = [gpu(n, name="Tesla T4", memory_mib=15360) for n in (1, 2)]
    found = labels_of(A100, *small)

    assert found["nvidia.com/gpu.product"] == "Tesla-T4"
    assert found["nvidia.com/gpu.memory"] == "15360"
    assert found["nvidia.com/gpu.count"] == "3"
    assert found["nvidia.com/mig.capable"] == "false"


def test_links_and_numa_nodes_have_labels() -> None:
    """Labels of ours describe the connections between GPUs."""
    pair = gpu(0, numa_node=0), gpu(1, numa_node=1)
    link = Topology({frozenset(each.id for each in pair): Connection(nvlinks=12, switched=True)})
    found = labels_of(*pair, facts=(TopologyRead(link),))

    assert found["metagpu.io/gpu.nvlink"] == "true"
    assert found["metagpu.io/gpu.nvswitch"] == "true"
    assert found["metagpu.io/gpu.numa-nodes"] == "2"


def test_memory_of_a_share_is_that_of_the_smallest() -> None:
    """A translation rounds up to shares of the smallest GPU; time-slices have no memory."""
    small = gpu(1, name="Tesla T4", memory_mib=15360)

    assert labels_of(A100, small)["metagpu.io/cnvrg.io_metagpu.memory"] == "1536"
    slices = labels_of(A100, text=SLICES.format(resource="nvidia.com/gpu.shared"))
    assert slices["metagpu.io/nvidia.com_gpu.shared.gpus"] == "1"
    assert "metagpu.io/nvidia.com_gpu.shared.memory" not in slices


def test_no_labels_before_the_first_offer() -> None:
    """A starting daemon writes no incomplete labels."""
    assert node_labels(after(), STRATEGIES) == {}
    assert node_labels(after(GpusFound((A100,), at=0)), STRATEGIES) == {}


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (None, "undefined"),
        ((6, 1), "undefined"),
        ((7, 2), "volta"),
        ((7, 5), "turing"),
        ((8, 6), "ampere"),
        ((8, 9), "ada-lovelace"),
        ((9, 0), "hopper"),
        ((10, 3), "blackwell"),
        ((11, 0), "undefined"),
        ((12, 0), "blackwell"),
        ((13, 0), "rubin"),
    ],
)
def test_family_follows_from_the_compute_capability(
    capability: tuple[int, int] | None, name: str
) -> None:
    """Families are those of GPU Feature Discovery."""
    assert family(capability) == name


def test_product_is_sanitised_as_by_gpu_feature_discovery() -> None:
    """Invalid characters are dropped, and spaces become dashes."""
    assert sanitize("NVIDIA RTX (TM) 6000/Ada") == "NVIDIA-RTX-TM-6000Ada"


@given(name=st.text(max_size=80), driver=st.text(max_size=70))
def test_every_label_is_one_that_kubernetes_takes(name: str, driver: str) -> None:
    """An odd value of NVML costs its own label and no other."""
    found = labels_of(gpu(0, name=name), facts=(DriverRead(Versions(driver)),))

    for key, value in found.items():
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value)
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", key.split("/")[1])
    assert found["nvidia.com/gpu.count"] == "1"

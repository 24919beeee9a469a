"""A node's GPUs as labels: names and values of GPU Feature Discovery, and ours."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.config.config import MigStrategy
from metagpu.core.model.gpu import Connection, Gpu, Topology
from metagpu.core.model.snapshot import Versions
from metagpu.core.state.facts import DriverRead, GpusFound, TopologyRead
from metagpu.plugins.cluster.gpu_labels import LabelSettings, family, node_labels, sanitize
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import STRATEGIES, after, gpu, layout_of

A100 = replace(
    gpu(0), compute_capability=(8, 0), architecture="ampere", ecc=True, mig_enabled=False
)


SETTINGS = LabelSettings(STRATEGIES)


def labels_of(
    *gpus: Gpu,
    text: str = "",
    facts: tuple[object, ...] = (),
    settings: LabelSettings = SETTINGS,
) -> Mapping[str, str]:
    """Return the labels of a node with these GPUs."""
    layout = layout_of(*gpus, text=text)
    return node_labels(after(GpusFound(gpus, at=0), *facts, layout.offer_fact), settings)  # type: ignore[arg-type]


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
        "nvidia.com/gpu.mode": "unknown",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mps.capable": "false",
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


def test_labels_of_a_mixed_node_are_of_its_last_product() -> None:
    """One product has all labels, its own number too; any GPU makes the node capable of MIG."""
    small = [gpu(n, name="Tesla T4", memory_mib=15360) for n in (1, 2)]
    again = replace(A100, id=gpu(3).id, index=3)
    found = labels_of(A100, *small, again)

    assert found["nvidia.com/gpu.product"] == "Tesla-T4"
    assert found["nvidia.com/gpu.memory"] == "15360"
    assert found["nvidia.com/gpu.count"] == "2"
    assert found["nvidia.com/mig.capable"] == "true"


def test_a_gpu_that_is_not_in_mig_mode_has_the_labels() -> None:
    """Of two products the one with a whole GPU has the labels, though the other comes last."""
    split = replace(A100, id=gpu(1).id, index=1, mig_enabled=True)
    assert labels_of(gpu(0, name="Tesla T4"), split)["nvidia.com/gpu.product"] == "Tesla-T4"


def test_a_display_card_has_no_part_in_the_labels() -> None:
    """The display card of a DGX Station is not counted, and lends no value."""
    card = gpu(1, name="NVIDIA DGX Display", memory_mib=4096)
    found = labels_of(A100, card)
    assert found["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
    assert found["nvidia.com/gpu.count"] == "1"


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        ((0x0302, 0x0302), "compute"),
        ((0x0300, 0x0300), "graphics"),
        ((0x0302, 0x0300), "unknown"),
        ((0x0302, None), "unknown"),
    ],
)
def test_the_mode_is_the_pci_class_of_all_gpus(classes: tuple[int | None, ...], mode: str) -> None:
    """3D controllers compute and VGA controllers draw; of a mixture nothing is said."""
    gpus = [replace(gpu(index), pci_class=number) for index, number in enumerate(classes)]
    assert labels_of(*gpus)["nvidia.com/gpu.mode"] == mode


def test_what_few_machines_have_is_labelled_where_it_is_known() -> None:
    """NVLink domain, vGPU and machine have labels only where they are known, and for all GPUs."""
    names = {f"nvidia.com/{name}" for name in ("gpu.clique", "vgpu.present", "gpu.machine")}
    assert not names & labels_of(A100).keys()

    cluster = "c0ffee00-0000-0000-0000-000000000000.32766"
    gpus = [replace(gpu(index), clique=cluster, virtual=False) for index in (0, 1)]
    settings = LabelSettings(STRATEGIES, machine="DGX  Station (A100)")
    found = labels_of(*gpus, settings=settings)
    assert {name: found[name] for name in names} == {
        "nvidia.com/gpu.clique": cluster,
        "nvidia.com/vgpu.present": "false",
        "nvidia.com/gpu.machine": "DGX-Station-A100",
    }
    apart = [gpus[0], replace(gpus[1], clique="other.1")]
    assert "nvidia.com/gpu.clique" not in labels_of(*apart)


def test_the_configured_strategy_is_written() -> None:
    """`mig.strategy` is the configuration's, also on a node without MIG."""
    single = LabelSettings(STRATEGIES, MigStrategy.SINGLE)
    assert labels_of(gpu(0), settings=single)["nvidia.com/mig.strategy"] == "single"
    assert "nvidia.com/mig.strategy" not in labels_of(gpu(0))


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
    assert node_labels(after(), SETTINGS) == {}
    assert node_labels(after(GpusFound((A100,), at=0)), SETTINGS) == {}


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        ("undefined", [None, (2, 1), (11, 0), (11, 9), (14, 0)]),
        ("kepler", [(3, 0), (3, 7)]),
        ("maxwell", [(5, 0), (5, 3)]),
        ("pascal", [(6, 0), (6, 2)]),
        ("volta", [(7, 0), (7, 4)]),
        ("turing", [(7, 5)]),
        ("ampere", [(8, 0), (8, 8)]),
        ("ada-lovelace", [(8, 9)]),
        ("hopper", [(9, 0)]),
        ("blackwell", [(10, 0), (10, 3), (12, 0), (12, 1)]),
        ("rubin", [(13, 0)]),
    ],
)
def test_family_follows_from_the_compute_capability(
    name: str, capabilities: list[tuple[int, int] | None]
) -> None:
    """Families are those of GPU Feature Discovery, from the first capability to the last."""
    assert [family(each) for each in capabilities] == [name] * len(capabilities)


def test_product_is_sanitised_as_by_gpu_feature_discovery() -> None:
    """Invalid characters are dropped, and spaces become dashes."""
    assert sanitize("NVIDIA RTX (TM) 6000/Ada") == "NVIDIA-RTX-TM-6000Ada"


@given(name=st.text(max_size=80), driver=st.text(max_size=70))
def test_every_label_is_one_that_kubernetes_takes(name: str, driver: str) -> None:
    """An odd value of NVML costs its own label and no other."""
    found = labels_of(gpu(0, name=name), facts=(DriverRead(Versions(driver)),))

    for key, value in found.items():
        assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value)
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", key.split("/")[1])
    assert found["nvidia.com/gpu.count"] == "1"


A100_PRODUCT = "NVIDIA-A100-SXM4-40GB"
POOL = "version: metagpu/v1\npools:\n  - name: all\n    backends: [{{backend: mig, {}}}]\n"


def mig_labels_of(options: str, count: int = 2, text: str = "") -> Mapping[str, str]:
    """Return the labels about GPUs and instances of a node of A100s with this configuration."""
    gpus = [mig_gpu(index) for index in range(count)]
    layout = layout_of(*gpus, text=text or POOL.format(options))
    found = node_labels(after(GpusFound(tuple(gpus), at=0), layout.offer_fact), SETTINGS)
    return {
        name: value
        for name, value in found.items()
        if name.startswith(("nvidia.com/mig", "nvidia.com/gpu"))
    }


def of_profile(name: str, found: Mapping[str, str]) -> Mapping[str, str]:
    """Return the labels of one profile, without its name."""
    prefix = f"nvidia.com/mig-{name}."
    return {key.removeprefix(prefix): text for key, text in found.items() if key.startswith(prefix)}


def test_a_layout_is_labelled_by_profile() -> None:
    """Under mixed each profile has its labels, and whole GPUs are not offered."""
    found = mig_labels_of("layout: {2g.10gb: 2, 1g.5gb: 3}")

    assert of_profile("2g.10gb", found) == {
        "product": f"{A100_PRODUCT}-MIG-2g.10gb",
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
    assert found["nvidia.com/gpu.product"] == A100_PRODUCT
    assert found["nvidia.com/gpu.count"] == "2"
    assert found["nvidia.com/gpu.replicas"] == "0"


def test_single_takes_the_place_of_the_gpus() -> None:
    """Under single, instances are nvidia.com/gpu, and labels of GPUs describe them."""
    found = mig_labels_of("layout: {1g.5gb: 7}, resource: nvidia.com/gpu")

    assert found["nvidia.com/mig.strategy"] == "single"
    assert found["nvidia.com/gpu.product"] == f"{A100_PRODUCT}-MIG-1g.5gb"
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
    found = node_labels(after(GpusFound((partitioned, whole), at=0), layout.offer_fact), SETTINGS)

    assert found["nvidia.com/mig.strategy"] == "mixed"
    assert found["nvidia.com/gpu.product"] == A100_PRODUCT
    assert found["nvidia.com/gpu.replicas"] == "1"
    assert of_profile("1g.5gb", found)["count"] == "7"


def test_instances_on_demand_are_counted_as_there_could_be() -> None:
    """Each profile counts as many instances as fit on the GPUs at once."""
    found = mig_labels_of("profiles: [1g.5gb, 1g.5gb+me, 2g.10gb, 3g.20gb, 7g.40gb]")
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
    assert of_profile("1g.5gb.me", found)["product"] == f"{A100_PRODUCT}-MIG-1g.5gb.me"


@pytest.mark.parametrize(
    ("named", "product"),
    [("", "MIG-1g.5gb"), (", resource: nvidia.com/mig-1g.5gb", "MIG-1g.5gb-SHARED")],
)
def test_replicas_of_instances_have_labels(named: str, product: str) -> None:
    """Instances are counted once; the product's name warns of sharing."""
    found = of_profile("1g.5gb", mig_labels_of(f"layout: {{1g.5gb: 7}}, replicas: 4{named}"))

    assert found["product"] == f"{A100_PRODUCT}-{product}"
    assert (found["count"], found["replicas"]) == ("14", "4")
    assert found["sharing-strategy"] == "time-slicing"


def test_instances_under_mps_have_labels() -> None:
    """The sharing strategy of instances under MPS is mps."""
    found = of_profile("1g.5gb", mig_labels_of("layout: {1g.5gb: 7}, mps: {replicas: 4}"))

    assert (found["count"], found["replicas"]) == ("14", "4")
    assert found["sharing-strategy"] == "mps"


def test_without_instances_there_is_no_strategy() -> None:
    """A node without MIG instances has only the label of MIG capability."""
    layout = layout_of(gpu(0))
    found = node_labels(after(GpusFound((gpu(0),), at=0), layout.offer_fact), SETTINGS)

    assert [name for name in found if "mig" in name] == ["nvidia.com/mig.capable"]


@pytest.mark.parametrize(
    ("text", "capable"),
    [
        (POOL.format("layout: {1g.5gb: 7}, mps: {replicas: 4}"), "true"),
        (POOL.format("layout: {1g.5gb: 7}, replicas: 4"), "false"),
        ("version: metagpu/v1\npools: [{name: a, backends: [{backend: mps}]}]", "true"),
    ],
)
def test_a_node_with_mps_says_so(text: str, capable: str) -> None:
    """GPUs and instances that are shared through MPS make a node capable of it."""
    assert labels_of(mig_gpu(0), gpu(1), text=text)["nvidia.com/mps.capable"] == capable


def test_one_gpu_makes_a_label_of_all() -> None:
    """ECC is that of all GPUs, as is none of one; a virtual GPU or a link of one counts."""
    first, second, third = (gpu(index) for index in range(3))
    link = {frozenset((first.id, second.id)): Connection(nvlinks=12)}
    link[frozenset((first.id, third.id))] = Connection()
    found = labels_of(
        *(replace(first, ecc=True, virtual=True), replace(second, ecc=False, virtual=False), third),
        facts=(TopologyRead(Topology(link)),),
    )
    assert found["metagpu.io/gpu.ecc"] == "false"
    assert found["nvidia.com/vgpu.present"] == "true"
    assert (found["metagpu.io/gpu.nvlink"], found["metagpu.io/gpu.nvswitch"]) == ("true", "false")


def test_single_without_instances_is_invalid() -> None:
    """GPUs in MIG mode of which none has an instance have NVIDIA's label for that."""
    settings = LabelSettings(STRATEGIES, MigStrategy.SINGLE)
    found = labels_of(replace(A100, mig_enabled=True), settings=settings)
    assert found["nvidia.com/gpu.product"] == f"{A100_PRODUCT}-MIG-INVALID"
    assert [found[f"nvidia.com/gpu.{key}"] for key in ("count", "replicas", "memory")] == ["0"] * 3
    assert found["nvidia.com/gpu.sharing-strategy"] == ""
    whole = labels_of(A100, settings=settings)
    assert whole["nvidia.com/gpu.product"] == A100_PRODUCT


def test_two_profiles_under_one_name_are_mixed() -> None:
    """`single` is one profile on all GPUs."""
    names = "{1g.5gb: nvidia.com/gpu, 2g.10gb: nvidia.com/gpu.shared}"
    found = mig_labels_of(f"layout: {{1g.5gb: 2, 2g.10gb: 2}}, resource: {names}")
    assert found["nvidia.com/mig.strategy"] == "mixed"

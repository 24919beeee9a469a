"""HAMi's files: splitting, sizes and profiles, by the node's name."""

import pytest

from tests.build import gpu
from tests.compat.rig import FILES, converted, notes, offered, pools, refusal

SEED = (FILES / "hami-device-config.yaml").read_text(encoding="utf-8")
SECTION = "nvidia:\n  resourceCountName: nvidia.com/gpu\n"
NODES = """\
nodeconfig:
- name: nodeA
  operatingmode: hami-core
  devicesplitcount: 4
  filterdevices: {uuid: [], index: [1]}
- name: nodeB
  operatingmode: mps
"""


def test_node_a_is_divided_by_counts() -> None:
    """nodeA, hami-core, has HAMi's ten parts of each GPU."""
    assert offered(converted(SEED, node="nodeA"), gpu(0), gpu(1)) == {"nvidia.com/gpu": 20}


def test_node_b_is_cut_by_mig() -> None:
    """nodeB, mig, has the profiles that stand in the geometries of each model."""
    found = pools(SEED, node="nodeB")

    assert [pool["backends"] for pool in found] == [
        [{"backend": "mig", "profiles": profiles, "enableMig": True}]
        for profiles in (
            ["1g.6gb", "2g.12gb", "4g.24gb"],
            ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"],
            ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"],
        )
    ]
    assert found[1]["gpus"] == {
        "product": ["*A100-SXM4-40GB*", "*A100-40GB-PCIe*", "*A100-PCIE-40GB*"]
    }


def test_lines_are_those_of_the_config_map() -> None:
    """A note on a file in a ConfigMap names the line of the manifest."""
    assert notes(SEED, node="nodeB")[0] == (
        "f.yaml: 5: nvidia.resourceCountName: has no effect in MIG mode: instances have the names "
        "of their profiles"
    )


def test_of_geometries_the_profiles_count() -> None:
    """That any combination may be made, and not those of the list alone, is told."""
    assert notes(SEED, node="nodeB")[-1] == (
        "f.yaml: 8: nvidia.knownMigGeometries: its profiles are taken; it would also have kept "
        "each GPU to one of its combinations, and here all are possible that NVML allows"
    )
    assert "knownMigGeometries" not in "".join(notes(SEED, node="nodeA"))


def test_profiles_of_the_newer_kind() -> None:
    """`migProfileAllowlist` names the profiles of models, and wins over geometries."""
    text = SECTION + (
        "  migProfileAllowlist:\n  - {models: [H100], profiles: [1g.10gb, 3g.40gb]}\n"
        "  knownMigGeometries: []\nnodeconfig: [{name: n, operatingmode: mig}]\n"
    )
    [pool] = pools(text, node="n")

    assert (pool["gpus"], pool["backends"][0]["profiles"]) == (
        {"product": ["*H100*"]},
        ["1g.10gb", "3g.40gb"],
    )


def test_two_files_make_one_configuration() -> None:
    """The scheduler's file and the plugin's config.json go together; a node's own count wins."""
    section = SECTION + "  deviceSplitCount: 8\n"

    assert offered(converted(section, NODES, node="nodeA"), gpu(0)) == {"nvidia.com/gpu": 4}
    assert offered(converted(section, NODES, node="nodeC"), gpu(0)) == {"nvidia.com/gpu": 8}
    assert offered(converted(section), gpu(0)) == {"nvidia.com/gpu": 8}


def test_filtered_devices_are_left_alone() -> None:
    """GPUs that HAMi shall not touch are offered to nobody."""
    assert offered(converted(NODES, node="nodeA"), gpu(0), gpu(1)) == {"nvidia.com/gpu": 4}


def test_default_memory_is_the_size_of_a_part() -> None:
    """With `defaultMemory` a part is so large, and the count has a note."""
    text = SECTION + "  defaultMemory: 8000\n  deviceSplitCount: 3\n"

    assert offered(converted(text), gpu(0)) == {"nvidia.com/gpu": 5}
    assert notes(text) == [
        "f.yaml: 4: nvidia.deviceSplitCount: has no effect: defaultMemory makes parts of 8000 MiB"
    ]


def test_mps_is_more_than_a_word_here() -> None:
    """The mode mps, which HAMi names and does not have, is backend mps."""
    assert pools(NODES, node="nodeB")[0]["backends"] == [
        {"backend": "mps", "resource": "nvidia.com/gpu", "replicas": 10}
    ]
    assert offered(converted(NODES, node="nodeB"), gpu(0), gpu(1)) == {"nvidia.com/gpu": 20}


def test_what_has_no_place_here_is_told_once() -> None:
    """Second measures, oversubscription and other makers' devices have a note each."""
    text = SECTION + (
        "  resourceMemoryName: nvidia.com/gpumem\n  deviceMemoryScaling: 1.8\n  defaultCores: 0\n"
        "  deviceCoreScaling: 1\ncambricon: {resourceCountName: a.b/c}\nhygon: {}\nsome: 1\n"
    )

    assert notes(text) == [
        (
            "f.yaml: 3: nvidia.resourceMemoryName: has no effect here; it would have let a pod ask "
            "for a size beside the number of vGPUs; the kubelet counts one number of a resource, "
            "so ask for more shares"
        ),
        (
            "f.yaml: 4: nvidia.deviceMemoryScaling: has no effect here; it would have given out "
            "more than a GPU has; metagpu gives out what is there"
        ),
        "f.yaml: 7: cambricon: has no effect: devices that are not NVIDIA's: cambricon, hygon",
        "f.yaml: 9: some: unknown key, has no effect",
    ]


@pytest.mark.parametrize(
    ("texts", "node", "message"),
    [
        (
            [NODES],
            None,
            (
                "f.yaml: 1: nodeconfig: it goes by the node's name, which is not known; give "
                "--node-name"
            ),
        ),
        (
            [NODES.replace("mps", "vgpu")],
            "nodeB",
            (
                "f.yaml: 7: nodeconfig[1].operatingmode: 'vgpu' is not known here; allowed: "
                "hami-core, mig, mps"
            ),
        ),
        (
            [NODES.replace("mps", "mig")],
            "nodeB",
            (
                "f.yaml: 7: nodeconfig[1].operatingmode: operatingmode mig needs the profiles of "
                "each model; give migProfileAllowlist or knownMigGeometries"
            ),
        ),
        (
            [
                (
                    "nvidia: {migProfileAllowlist: [{models: [], profiles: [a]}]}\n"
                    "nodeconfig: [{name: n, operatingmode: mig}]"
                )
            ],
            "n",
            "f.yaml: 1: nvidia.migProfileAllowlist[0]: models and profiles have to be named",
        ),
        (
            [NODES.replace("4", "0")],
            "nodeA",
            "f.yaml: 4: nodeconfig[0].devicesplitcount: sharesPerGpu is 0; allowed: 1 to 100000",
        ),
        (
            [SECTION, SECTION],
            "n",
            "g.yaml: 1: nvidia: f.yaml has this section too; give one of them",
        ),
        (
            [SECTION + "  defaultMemory: many\n"],
            "n",
            "f.yaml: 3: nvidia.defaultMemory: expected a whole number, got a text",
        ),
    ],
)
def test_a_mistake_is_told_of_the_operators_own_line(
    texts: list[str], node: str | None, message: str
) -> None:
    """Each refusal names file, line and path in the file as the operator wrote it."""
    assert refusal(*texts, node=node) == message

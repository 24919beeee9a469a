"""HAMi's files: counts, sizes and profiles, by the node's name."""

from collections import Counter

import pytest
from msgspec.structs import replace

from tests.backends.mig.gpus import mig_gpu
from tests.compat.rig import FILES, converted, layout_of, notes, offered, pools, refusal
from tests.rigs.build import gpu

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


def test_node_b_is_partitioned_by_mig() -> None:
    """nodeB, mig, has the sizes of each model's geometries."""
    found = pools(SEED, node="nodeB")

    assert [pool["backends"] for pool in found] == [
        [{"backend": "mig", "profiles": profiles, "enableMig": True}]
        for profiles in (
            ["1g", "2g", "4g"],
            ["1g", "2g", "3g", "7g"],
            ["1g", "2g", "3g", "7g"],
        )
    ]
    assert found[0]["gpus"] == {"product": ["*A30*"]}


def test_lines_are_those_of_the_config_map() -> None:
    """A note on a file in a ConfigMap names the line of the manifest."""
    assert notes(SEED, node="nodeB")[0] == (
        "f.yaml: 5: nvidia.resourceCountName: has no effect in MIG mode: instances have the names "
        "of their profiles"
    )


def test_of_geometries_the_profiles_count() -> None:
    """A note reports that any combination of the listed profiles may be created."""
    assert notes(SEED, node="nodeB")[-1] == (
        "f.yaml: 8: nvidia.knownMigGeometries: its profiles are used; HAMi would also limit "
        "each GPU to one of its combinations, and metagpu allows every combination that NVML allows"
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
        ["1g", "3g"],
    )


def test_a_model_is_a_part_of_a_name_and_a_profile_a_size() -> None:
    """The row of H20 serves H200 and GH200, with their own profiles of the same sizes, as there."""
    text = SECTION + (
        "  migProfileAllowlist:\n  - {models: [H20], profiles: [1g.12gb, 7g.96gb]}\n"
        "  - {models: [H200], profiles: [2g.35gb]}\n"
        "nodeconfig: [{name: n, operatingmode: mig}]\n"
    )
    gpus = [mig_gpu(0, "h200"), replace(mig_gpu(1, "a100-40gb"), name="NVIDIA GH200 480GB")]
    layout = layout_of(converted(text, node="n"), *gpus)

    assert {assignment.pool for assignment in layout.pool_assignments} == {"H20"}
    assert Counter(share.resource for share in layout.shares) == {
        "nvidia.com/mig-1g.18gb": 7,
        "nvidia.com/mig-7g.141gb": 1,
        "nvidia.com/mig-1g.5gb": 7,
        "nvidia.com/mig-7g.40gb": 1,
    }


def test_two_files_make_one_configuration() -> None:
    """The scheduler's file and the plugin's config.json go together; a node's own count wins."""
    section = SECTION + "  deviceSplitCount: 8\n"

    assert offered(converted(section, NODES, node="nodeA"), gpu(0)) == {"nvidia.com/gpu": 4}
    assert offered(converted(section, NODES, node="nodeC"), gpu(0)) == {"nvidia.com/gpu": 8}
    assert offered(converted(section), gpu(0)) == {"nvidia.com/gpu": 8}


def test_filtered_devices_are_left_alone() -> None:
    """GPUs that HAMi's filter excludes have no shares."""
    assert offered(converted(NODES, node="nodeA"), gpu(0), gpu(1)) == {"nvidia.com/gpu": 4}


def test_default_memory_is_the_size_of_a_part() -> None:
    """`defaultMemory` gives the size of a share, and the count has a note."""
    text = SECTION + "  defaultMemory: 8000\n  deviceSplitCount: 3\n"

    assert offered(converted(text), gpu(0)) == {"nvidia.com/gpu": 5}
    assert notes(text) == [
        "f.yaml: 4: nvidia.deviceSplitCount: has no effect: defaultMemory makes parts of 8000 MiB"
    ]


def test_the_mode_mps_becomes_the_backend() -> None:
    """The mode mps, which HAMi names and does not have, becomes the backend mps."""
    assert pools(NODES, node="nodeB")[0]["backends"] == [
        {"backend": "mps", "resource": "nvidia.com/gpu", "replicas": 10}
    ]
    assert offered(converted(NODES, node="nodeB"), gpu(0), gpu(1)) == {"nvidia.com/gpu": 20}


def test_a_request_for_a_count_alone_means_less_than_in_hami() -> None:
    """Without `defaultMemory`, a note says that a part is not the whole memory of a GPU."""
    [note] = notes(f"{SECTION}  deviceSplitCount: 4\n")

    assert note == (
        "f.yaml: 3: nvidia.deviceSplitCount: a pod that asks for nvidia.com/gpu: 1 alone has a "
        "part of 1/4 here; in HAMi it has all memory of a GPU, unless it asks for less "
        "(defaultMemory: 0). Ask for 4 of one GPU, or set defaultMemory"
    )
    assert notes(f"{SECTION}  defaultMemory: 8000\n") == []


def test_unsupported_keys_have_one_note() -> None:
    """Second measures, oversubscription and other makers' devices have a note each."""
    text = SECTION + (
        "  resourceMemoryName: nvidia.com/gpumem\n  deviceMemoryScaling: 1.8\n  defaultCores: 0\n"
        "  deviceCoreScaling: 1\ncambricon: {resourceCountName: a.b/c}\nhygon: {}\nsome: 1\n"
    )

    assert notes(text)[1:] == [
        (
            "f.yaml: 3: nvidia.resourceMemoryName: has no effect here; it would have let a pod "
            "request a size in addition to the number of vGPUs; the kubelet counts one number of a "
            "resource, so ask for more shares"
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
                "f.yaml: 1: nodeconfig: the settings depend on the node's name, which is not "
                "known; give --node-name"
            ),
        ),
        (
            [NODES.replace("mps", "vgpu")],
            "nodeB",
            (
                "f.yaml: 7: nodeconfig[1].operatingmode: 'vgpu' is unknown; allowed: "
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
            (
                "f.yaml: 4: nodeconfig[0].devicesplitcount: devicesplitcount is 0; allowed: 1 to "
                "70000"
            ),
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
def test_a_mistake_is_refused_with_the_operators_own_line(
    texts: list[str], node: str | None, message: str
) -> None:
    """Each refusal names file, line and path in the file as the operator wrote it."""
    assert refusal(*texts, node=node) == message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("nvidia:\n  deviceSplitCount: 4\n  resourceCountName: gpu", "3: nvidia.resourceCountName"),
        ("nvidia:\n  deviceSplitCount: -5\n", "2: nvidia.deviceSplitCount"),
        ("nvidia:\n  overwriteEnv: false\n  deviceSplitCount: 0\n", "3: nvidia.deviceSplitCount"),
    ],
)
def test_an_error_is_at_the_key_that_causes_it(text: str, place: str) -> None:
    """A value that a backend refuses is reported at its own key, in the words of HAMi's file."""
    message = refusal(text)

    assert message.startswith(f"f.yaml: {place}: ")
    assert "sharesPerGpu" not in message

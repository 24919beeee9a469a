"""CDI's specification and names, held against the rules by which runtimes take them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig.board import board_of, share_id
from metagpu.core import cdi
from metagpu.core.cdi import Edits, device_name, edits_in, names_in, specification
from metagpu.core.grant import DeviceNode, Grant
from metagpu.sim.boards import BOARDS
from tests.backends.mig.gpus import mig_gpu
from tests.cdi_rig import CdiRefusedError, checked

GPU = "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
NODE = DeviceNode("/dev/nvidia0", "/dev/nvidia0")
CONTROL = DeviceNode("/dev/nvidiactl", "/dev/nvidiactl")
TOOLKIT: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-modeset"}],
        "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": ["x"]}],
        "mounts": [{"hostPath": "/usr/lib/libcuda.so.1", "containerPath": "/usr/lib/libcuda.so.1"}],
    },
}


@given(
    st.dictionaries(
        st.integers(0, 999).map(lambda n: f"MIG-{n:036}"),
        st.lists(
            st.builds(
                DeviceNode,
                st.integers(0, 9).map(lambda n: f"/dev/nvidia{n}"),
                st.integers(0, 9).map(lambda n: f"/root/dev/nvidia{n}"),
            ),
            min_size=1,
        ),
        min_size=1,
    ),
    st.sampled_from([Edits(), edits_in(json.dumps(TOOLKIT))]),
)
def test_a_runtime_takes_every_specification(
    devices: dict[str, list[DeviceNode]], edits: Edits
) -> None:
    """Whatever there is, the file keeps the rules, and has exactly these devices."""
    spec = checked(specification(devices, [CONTROL], edits))

    assert [device["name"] for device in spec["devices"]] == list(devices)
    assert spec["kind"] == cdi.KIND


def test_the_file_is_named_as_runtimes_look_for_it() -> None:
    """By vendor and class, with an ending that CDI reads, in a folder that it reads."""
    assert cdi.KIND.replace("/", "-") + ".json" == cdi.FILE_NAME
    assert str(cdi.DEFAULT_DIR) == "/var/run/cdi"


def test_a_device_has_its_nodes_and_what_all_have() -> None:
    """A GPU's own nodes are the device's; the driver's nodes and libraries belong to all."""
    spec = checked(specification({GPU: [NODE]}, [CONTROL], edits_in(json.dumps(TOOLKIT))))
    node = {"path": "/dev/nvidia0", "permissions": "rw"}

    assert spec["devices"] == [{"name": GPU, "containerEdits": {"deviceNodes": [node]}}]
    common = spec["containerEdits"]
    paths = [node["path"] for node in common["deviceNodes"]]
    assert paths == ["/dev/nvidiactl", "/dev/nvidia-modeset"]
    for part in ("env", "hooks", "mounts"):
        assert common[part] == TOOLKIT["containerEdits"][part]


@pytest.mark.parametrize(
    ("host", "toolkit", "version"),
    [
        ("/dev/nvidia0", (0, 3, 0), "0.3.0"),
        ("/host/dev/nvidia0", (0, 3, 0), "0.5.0"),
        ("/host/dev/nvidia0", (0, 7, 0), "0.7.0"),
        ("/dev/nvidia0", (0, 10, 0), "0.10.0"),
    ],
)
def test_the_version_is_the_oldest_that_has_all(
    host: str, toolkit: tuple[int, int, int], version: str
) -> None:
    """An older runtime refuses a newer version, so no newer one is said than what is used."""
    nodes = [DeviceNode("/dev/nvidia0", host)]
    spec = json.loads(specification({GPU: nodes}, [], Edits(version=toolkit)))

    assert spec["cdiVersion"] == version


@pytest.mark.parametrize("board", sorted(name for name in BOARDS if BOARDS[name].mig_profiles))
def test_every_place_has_a_name_of_its_own_that_cdi_takes(board: str) -> None:
    """No two placements of any board are called the same, and no name breaks CDI's rules."""
    gpu = mig_gpu(board=board)
    shares = [share_id(gpu.id, str(spot)) for spot in board_of(gpu.mig_profiles).spots]
    names = {device_name(share): [NODE] for share in shares}

    assert len(names) == len(shares)
    checked(specification(names, [], Edits()))


def test_the_names_of_a_grant_are_found_both_ways() -> None:
    """In CDI's field and in the annotation, and only those of our kind."""
    ours = Grant(cdi_names=(f"{cdi.KIND}={GPU}", "nvidia.com/gpu=0"))
    told = Grant(annotations={"cdi.k8s.io/metagpu_0": f"{cdi.KIND}=a,{cdi.KIND}=b", "x": "y"})

    assert names_in(ours) == {GPU}
    assert names_in(told) == {"a", "b"}
    assert names_in(Grant()) == frozenset()


def test_what_the_toolkit_prints_is_found_among_its_log() -> None:
    """Its log goes the same way as its answer; the answer begins with a brace."""
    log = 'time="2026-01-01" level=info msg="Auto-detected mode as \\"nvml\\""\n'
    edits = edits_in(f"{log}{json.dumps(TOOLKIT, indent=2)}\n{log}")

    assert edits == Edits(TOOLKIT["containerEdits"], (0, 5, 0))


@pytest.mark.parametrize(
    ("printed", "why"),
    [
        ("", "it printed no CDI specification"),
        ("level=info {}", "it printed no CDI specification"),
        ('{"cdiVersion": ', "what it printed is no JSON: "),
        ("{}", "what it printed has no cdiVersion or no containerEdits"),
        ('{"cdiVersion": "1", "containerEdits": {}}', "has no cdiVersion or no containerEdits"),
        ('{"cdiVersion": "0.5.0"}', "has no cdiVersion or no containerEdits"),
    ],
)
def test_what_is_no_specification_is_refused(printed: str, why: str) -> None:
    """A toolkit of another kind spoils no file of ours."""
    with pytest.raises(ValueError, match=why):
        edits_in(printed)


@pytest.mark.parametrize(
    "change",
    [
        {"cdiVersion": "0.2.9"},
        {"kind": "gpu"},
        {"devices": []},
        {"devices": [{"name": "a", "containerEdits": {}}]},
        {"devices": [{"name": "a@1", "containerEdits": {"env": ["a=b"]}}]},
        {"containerEdits": {"env": ["=b"]}},
        {"containerEdits": {"additionalGids": [1]}},
        {"containerEdits": {"deviceNodes": [{"path": "/dev/x", "permissions": "x"}]}},
    ],
)
def test_the_rules_can_be_broken(change: dict[str, Any]) -> None:
    """The checks that these tests rest on refuse what CDI's library refuses."""
    with pytest.raises(CdiRefusedError):
        checked(json.dumps({**TOOLKIT, **change}))
    assert checked(json.dumps(TOOLKIT))

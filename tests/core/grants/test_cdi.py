"""CDI's specification and names, held against the rules by which runtimes take them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig.profiles import geometry_of, share_id
from metagpu.core.grants import cdi
from metagpu.core.grants.cdi import (
    ContainerEdits,
    build_spec,
    device_name,
    device_names,
    parse_edits,
)
from metagpu.core.grants.grant import DeviceNode, Grant
from metagpu.core.model.driver_roots import Folder
from metagpu.sim.machine.gpu_models import GPU_MODELS
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.cdi import CdiRefusedError, check_spec

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
    st.sampled_from([ContainerEdits(), parse_edits(json.dumps(TOOLKIT))]),
)
def test_a_runtime_takes_every_specification(
    devices: dict[str, list[DeviceNode]], edits: ContainerEdits
) -> None:
    """Any specification keeps CDI's rules, and has exactly the node's devices."""
    spec = check_spec(build_spec(devices, [CONTROL], edits))

    assert [device["name"] for device in spec["devices"]] == list(devices)
    assert spec["kind"] == cdi.KIND


def test_the_file_is_named_as_runtimes_look_for_it() -> None:
    """The file's name is vendor and class, with an ending that CDI reads."""
    assert cdi.KIND.replace("/", "-") + ".json" == cdi.FILE_NAME


def test_our_hook_runs_before_those_of_the_toolkit() -> None:
    """Our hook comes first, and has no timeout, by which a runtime fails the container."""
    edits = parse_edits(json.dumps(TOOLKIT))
    spec = check_spec(build_spec({GPU: [NODE]}, [], edits, hook=["/pod/mgctl", "/s", "ignore"]))
    [ours, *others] = spec["containerEdits"]["hooks"]
    assert ours == {
        "hookName": "createRuntime",
        "path": "/pod/mgctl",
        "args": ["metagpu-hook", "/s", "ignore"],
    }
    assert others == TOOLKIT["containerEdits"]["hooks"]


def test_a_device_has_its_nodes_and_what_all_have() -> None:
    """A GPU's own nodes are the device's; the driver's nodes and libraries belong to all."""
    spec = check_spec(build_spec({GPU: [NODE]}, [CONTROL], parse_edits(json.dumps(TOOLKIT))))
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
    """The file has the oldest version with its features: old runtimes refuse newer versions."""
    nodes = [DeviceNode("/dev/nvidia0", host)]
    spec = json.loads(build_spec({GPU: nodes}, [], ContainerEdits(version=toolkit)))

    assert spec["cdiVersion"] == version


@pytest.mark.parametrize(
    "model", sorted(name for name in GPU_MODELS if GPU_MODELS[name].mig_profiles)
)
def test_every_place_has_a_name_of_its_own_that_cdi_takes(model: str) -> None:
    """Placements of any MIG geometry have distinct names, and each keeps CDI's rules."""
    gpu = mig_gpu(model=model)
    shares = [share_id(gpu.id, str(spot)) for spot in geometry_of(gpu.mig_profiles).placed_profiles]
    names = {device_name(share): [NODE] for share in shares}

    assert len(names) == len(shares)
    check_spec(build_spec(names, [], ContainerEdits()))


def test_the_names_of_a_grant_are_found_both_ways() -> None:
    """Names of our kind are found in the CDI field and in the annotation."""
    ours = Grant(cdi_names=(f"{cdi.KIND}={GPU}", "nvidia.com/gpu=0"))
    answer = Grant(annotations={"cdi.k8s.io/metagpu_0": f"{cdi.KIND}=a,{cdi.KIND}=b", "x": "y"})

    assert device_names(ours) == {GPU}
    assert device_names(answer) == {"a", "b"}
    assert device_names(Grant()) == frozenset()


def test_what_the_toolkit_prints_is_found_among_its_log() -> None:
    """The log and the answer are in one stream; the answer begins with a brace."""
    log = 'time="2026-01-01" level=info msg="Auto-detected mode as \\"nvml\\""\n'
    edits = parse_edits(f"{log}{json.dumps(TOOLKIT, indent=2)}\n{log}")

    assert edits == ContainerEdits(TOOLKIT["containerEdits"], (0, 5, 0))


@pytest.mark.parametrize(
    ("printed", "why"),
    [
        ("", "it printed no CDI specification"),
        ("level=info {}", "it printed no CDI specification"),
        ('{"cdiVersion": ', "its output is not valid JSON: "),
        ("{}", "its output has no cdiVersion or no containerEdits"),
        ('{"cdiVersion": "1", "containerEdits": {}}', "has no cdiVersion or no containerEdits"),
        ('{"cdiVersion": "0.5.0"}', "has no cdiVersion or no containerEdits"),
    ],
)
def test_what_is_no_specification_is_refused(printed: str, why: str) -> None:
    """A toolkit of another kind spoils no file of ours."""
    with pytest.raises(ValueError, match=why):
        parse_edits(printed)


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
        check_spec(json.dumps({**TOOLKIT, **change}))
    assert check_spec(json.dumps(TOOLKIT))


def test_paths_become_the_hosts() -> None:
    """The innermost folder of this process that has a path decides; the container's paths stay."""
    folders = (Folder("/run/nvidia/driver", "/host/run/nvidia/driver"), Folder("/", "/host"))
    outside = {"hookName": "createRuntime", "path": "/usr/bin/x"}
    inside = {**outside, "hookName": "createContainer", "args": ["/host/a::/host/b"]}
    edits = cdi.ContainerEdits(
        {
            "env": ["A=/host/a"],
            "mounts": [
                {"hostPath": "/host/run/nvidia/driver/lib/a", "containerPath": "/lib/a"},
                {"hostPath": "/host/run/b", "containerPath": "/host/run/b"},
                {"hostPath": "/hostile", "containerPath": "/c"},
            ],
            "deviceNodes": [{"path": "/dev/x", "hostPath": "/host/dev/x"}, {"path": "/dev/y"}],
            "hooks": [inside, {**outside, "args": ["--root", "/host", "/host/a::/host/b"]}],
        }
    )

    assert cdi.with_host_paths(edits, folders).edits == {
        "env": ["A=/host/a"],
        "mounts": [
            {"hostPath": "/run/nvidia/driver/lib/a", "containerPath": "/lib/a"},
            {"hostPath": "/run/b", "containerPath": "/host/run/b"},
            {"hostPath": "/hostile", "containerPath": "/c"},
        ],
        "deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/x"}, {"path": "/dev/y"}],
        "hooks": [inside, {**outside, "args": ["--root", "/", "/a::/b"]}],
    }
    own = cdi.with_host_paths(edits, (Folder("/", "/"),))
    assert own.edits == edits.edits

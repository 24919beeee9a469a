"""NVIDIA's device plugin's file, also with keys that the plugin itself drops."""

import pytest

from metagpu.agent.config_source import to_yaml
from metagpu.compat import formats
from metagpu.core.config.config import Config
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.contracts.driver import Xid
from metagpu.core.health.fault_assessment import judge_event
from tests.compat.nvidia_texts import FOUR, SLICES, slices
from tests.compat.rig import FILES, converted, notes, offered, pools, refusal
from tests.rigs.build import BACKENDS, gpu


@pytest.mark.parametrize(("profile", "shares"), [("slice-4", 16), ("slice-10", 40)])
def test_the_slices_of_cerns_notes(profile: str, shares: int) -> None:
    """Four GPUs in slices of four are 16 nvidia.com/gpu.shared, as the notes say."""
    file = FILES / "nvidia-time-slicing-config.yaml"
    found = formats.read_manifest([Document(file.read_text(encoding="utf-8"), str(file))])
    assert found is not None
    conversion = converted(found.texts[profile][0])

    assert offered(conversion, *FOUR) == {"nvidia.com/gpu.shared": shares}
    assert conversion.notes == ()
    assert conversion.data["pools"][0]["backends"][0]["failRequestsGreaterThanOne"] is True


def test_a_file_without_sharing_offers_whole_gpus() -> None:
    """Without sharing, whole GPUs are offered as nvidia.com/gpu."""
    assert offered(converted("version: v1"), *FOUR) == {"nvidia.com/gpu": 4}


def test_replicas_keep_the_name_unless_renamed() -> None:
    """Replicas have the GPUs' name without `renameByDefault`."""
    renamed = slices(head="    renameByDefault: true\n")

    assert offered(converted(SLICES), *FOUR) == {"nvidia.com/gpu": 16}
    assert offered(converted(renamed), *FOUR) == {"nvidia.com/gpu.shared": 16}


@pytest.mark.parametrize("devices", ["[0]", "[]"])
def test_what_the_plugin_drops_has_no_effect_and_a_note(devices: str) -> None:
    """`resources`, `rename` and `devices` change nothing, as in the plugin; each has a note."""
    dropped = "has no effect, as in NVIDIA's plugin, which drops it; in metagpu's own format"
    text = slices(f"      rename: fast\n      devices: {devices}\n") + (
        "resources:\n  gpus: [{pattern: '*A100*', name: a100}]\n"
    )

    assert offered(converted(text), *FOUR) == offered(converted(SLICES), *FOUR)
    assert notes(text) == [
        (
            f"f.yaml: 7: sharing.timeSlicing.resources[0].rename: {dropped} it is resource: "
            "nvidia.com/fast"
        ),
        (
            f"f.yaml: 8: sharing.timeSlicing.resources[0].devices: {dropped}, the GPUs of a pool "
            "are chosen by gpus, such as {index: 0-1}"
        ),
        f"f.yaml: 9: resources: {dropped}, each pool has names of its own: resource",
    ]


@pytest.mark.parametrize(("count", "larger", "line"), [(2, 4, 7), (5, 5, 5)])
def test_of_two_entries_the_larger_number_counts(count: int, larger: int, line: int) -> None:
    """Of two entries of one name the one with more replicas counts; the other has a note."""
    text = slices(f"    - name: gpu\n      replicas: {count}\n")

    assert offered(converted(text), *FOUR) == {"nvidia.com/gpu": 4 * larger}
    assert notes(text) == [
        (
            f"f.yaml: {line}: sharing.timeSlicing.resources[{line // 7}]: has no effect: another "
            f"entry of this name has {larger} replicas"
        )
    ]


def test_mps_wins_with_a_note() -> None:
    """Of both ways of sharing MPS is taken, as in NVIDIA's plugin; the other has a note."""
    text = slices(way="mps") + "  timeSlicing: {resources: [{name: gpu, replicas: 2}]}\n"

    assert pools(text)[0]["backends"] == [
        {"backend": "mps", "resource": "nvidia.com/gpu", "replicas": 4}
    ]
    assert notes(text) == [
        "f.yaml: 7: sharing.timeSlicing: has no effect: where sharing.mps is given, that wins"
    ]


def test_parts_under_mps_are_counted_as_nvidia_counts_them() -> None:
    """Four replicas under MPS on four GPUs are 16."""
    assert offered(converted(slices(way="mps")), *FOUR) == {"nvidia.com/gpu": 16}


def test_mps_takes_the_policy_and_lets_a_container_hold_several() -> None:
    """NVIDIA's policy becomes the placement; its limit of one has a note."""
    text = slices(way="mps", head="    failRequestsGreaterThanOne: true\n")
    text += "flags: {plugin: {sharedDevicesAllocationPolicy: packed}}\n"

    assert pools(text)[0]["backends"][0]["placement"] == "binpack"
    assert notes(text) == [
        (
            "f.yaml: 4: sharing.mps.failRequestsGreaterThanOne: has no effect here; under MPS a "
            "container may hold several parts of one GPU"
        )
    ]


def test_a_missing_backend_is_named() -> None:
    """A missing backend is refused with the line that needs it, and the installed ones."""
    conversion = converted(slices(way="mps"))

    assert conversion.missing_backend(["mps", "whole"]) is None
    assert str(conversion.missing_backend(["whole", "fraction"])) == (
        "f.yaml: 5: sharing.mps.resources[0]: this needs the backend mps, which is not installed; "
        "there are: fraction, whole"
    )


def test_an_option_that_a_backend_does_not_have_is_named() -> None:
    """A key that the installed backend does not know is named in the refusal."""
    error = ConfigError(
        "unknown key; allowed: a", ConfigReason.UNKNOWN_KEY, path="pools[0].backends[0].replicas"
    )

    assert str(converted(SLICES).at_origin(error)) == (
        "f.yaml: 6: sharing.timeSlicing.resources[0].replicas: this needs the option replicas of a "
        "backend, which has none here"
    )


def test_flags_that_are_honoured() -> None:
    """Device lists, device nodes and the policy are taken as they are."""
    text = SLICES + (
        "flags:\n  plugin:\n    passDeviceSpecs: true\n    deviceListStrategy: cdi-annotations\n"
        "    sharedDevicesAllocationPolicy: packed\n"
    )
    conversion = converted(text)

    assert conversion.data["passDeviceSpecs"] is True
    assert conversion.data["deviceListStrategy"] == ["cdi-annotations"]
    assert conversion.data["pools"][0]["backends"][0]["allocationPolicy"] == "packed"
    assert offered(conversion, *FOUR) == {"nvidia.com/gpu": 16}


def test_of_two_ways_of_cdi_one_is_used() -> None:
    """The GPU operator's default of both ways of CDI is cdi-cri, with a note."""
    environment = {"DEVICE_LIST_STRATEGY": "cdi-annotations,cdi-cri"}

    assert converted(SLICES, environment=environment).data["deviceListStrategy"] == ["cdi-cri"]
    assert offered(converted(SLICES, environment=environment), *FOUR) == {"nvidia.com/gpu": 16}
    assert notes(SLICES, environment=environment) == [
        (
            "environment: DEVICE_LIST_STRATEGY: cdi-cri is used of the two ways of CDI: a runtime "
            "that knows both would give a container its GPU twice"
        )
    ]


def test_every_xid_enabled_wins_over_a_list_of_disabled_ones() -> None:
    """With DP_ENABLE_HEALTHCHECKS=all, every XID counts, as in the plugin; a note says so."""
    environment = {"DP_ENABLE_HEALTHCHECKS": "all", "DP_DISABLE_HEALTHCHECKS": "94, 95"}

    assert converted(SLICES, environment=environment).data["health"] == {"otherXids": "fatal"}
    assert (
        "environment: DP_DISABLE_HEALTHCHECKS: has no effect, as in NVIDIA's plugin: "
        "DP_ENABLE_HEALTHCHECKS wins"
    ) in notes(SLICES, environment=environment)


@pytest.mark.parametrize("every", ["all", "xids", "ALL", "94, 0"])
def test_no_xid_takes_a_gpu_out_of_service(every: str) -> None:
    """With DP_DISABLE_HEALTHCHECKS=all only XIDs count that the other variable names."""
    environment = {"DP_DISABLE_HEALTHCHECKS": every, "DP_ENABLE_HEALTHCHECKS": "79, ٣"}
    conversion = converted(SLICES, environment=environment)
    health = Config(Document(to_yaml(conversion.data), "f"), BACKENDS).root.health

    assert conversion.notes == ()
    xids = [Xid(gpu(0).id, code) for code in (48, 79, 3)]
    assert [judge_event(xid, health).fatal for xid in xids] == [False, True, False]


def test_null_is_as_left_out() -> None:
    """Go reads null as nothing; so do these keys."""
    text = slices(head="    renameByDefault:\n    failRequestsGreaterThanOne:\n")
    text = text.replace("version: v1", "version:\nflags:\nimex:\nresources: {gpus: , mig: }")

    assert offered(converted(text), *FOUR) == {"nvidia.com/gpu": 16}
    assert notes(text) == []


def test_the_environment_wins_over_the_file() -> None:
    """A variable of NVIDIA's daemon set counts more than the flag in the file."""
    text = SLICES + "flags: {plugin: {passDeviceSpecs: false, deviceListStrategy: envvar}}\n"
    environment = {
        "PASS_DEVICE_SPECS": "true",
        "DEVICE_LIST_STRATEGY": "envvar,cdi-cri",
        "SHARED_DEVICES_ALLOCATION_POLICY": "packed",
        "DP_DISABLE_HEALTHCHECKS": "94, nonsense,95",
        "DP_ENABLE_HEALTHCHECKS": "13",
        "MIG_STRATEGY": "",
    }
    data = converted(text, environment=environment).data

    assert data["passDeviceSpecs"] is True
    assert data["deviceListStrategy"] == ["envvar", "cdi-cri"]
    assert data["pools"][0]["backends"][0]["allocationPolicy"] == "packed"
    assert data["health"] == {"xids": {94: "application", 95: "application", 13: "fatal"}}
    assert offered(converted(text, environment=environment), gpu(0)) == {"nvidia.com/gpu": 4}


def test_flags_without_effect_have_notes() -> None:
    """Flags without effect have a note, unless they ask for nothing."""
    harmless = """\
version: v1
flags:
  failOnInitError: true
  nvidiaDriverRoot: /
  gdsEnabled: false
  deviceDiscoveryStrategy: nvml
  plugin: {deviceIDStrategy: uuid, cdiAnnotationPrefix: cdi.k8s.io/}
imex: {channelIDs: []}
"""
    asking = harmless.replace("gdsEnabled: false", "gdsEnabled: true").replace("uuid", "index")

    assert notes(harmless) == []
    assert notes(asking) == [
        (
            "f.yaml: 5: flags.gdsEnabled: has no effect here; it would have given containers "
            "GPUDirect Storage's devices"
        ),
        (
            "f.yaml: 7: flags.plugin.deviceIDStrategy: has no effect here; it would have named "
            "GPUs by index to the container runtime; metagpu names them by uuid"
        ),
    ]


def test_the_environment_has_notes_too() -> None:
    """Variables without effect have notes like keys, unless they ask for nothing."""
    environment = {
        "MOFED_ENABLED": "true",
        "GDS_ENABLED": "false",
        "FAIL_ON_INIT_ERROR": "true",
        "DP_DISABLE_HEALTHCHECKS": "xids",
    }

    assert notes("version: v1", environment=environment) == [
        (
            "environment: MOFED_ENABLED: has no effect here; it would have given containers "
            "Mellanox' devices"
        ),
    ]


def test_unknown_keys_have_notes_with_the_nearest_key() -> None:
    """A key that NVIDIA's plugin ignores has a note with the nearest known key."""
    text = SLICES.replace("timeSlicing:\n", "timeSlicing:\n    renameByDefalt: true\n")

    assert notes(text + "flags: {plugins: {}}\n") == [
        (
            "f.yaml: 4: sharing.timeSlicing.renameByDefalt: unknown key, has no effect; did you "
            "mean renameByDefault?"
        ),
        "f.yaml: 8: flags.plugins: unknown key, has no effect; did you mean plugin?",
    ]


def test_a_name_that_no_gpu_has() -> None:
    """Sharing of a name without GPUs has no effect, and a note with the known names."""
    assert notes(SLICES.replace("nvidia.com/gpu", "nvidia.com/gpus")) == [
        (
            "f.yaml: 5: sharing.timeSlicing.resources[0]: has no effect: no GPU has this name; "
            "there are: nvidia.com/gpu"
        )
    ]
    assert notes(SLICES.replace("nvidia.com/gpu", "nvidia.com/mig-1g.5gb")) == [
        (
            "f.yaml: 5: sharing.timeSlicing.resources[0]: has no effect: no instance has this name "
            "(migStrategy none)"
        )
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: v2\nsharing: {}",
            "f.yaml: 1: version: 'v2' is unknown; allowed: v1",
        ),
        (
            "version: v1\nsharing: {timeSlicing: {resources: []}}",
            "f.yaml: 2: sharing.timeSlicing.resources: there is no resource; give at least one",
        ),
        (
            SLICES.replace("      replicas: 4\n", ""),
            "f.yaml: 5: sharing.timeSlicing.resources[0]: missing key `replicas`",
        ),
        (
            SLICES.replace("4", "0"),
            (
                "f.yaml: 6: sharing.timeSlicing.resources[0].replicas: replicas is 0; allowed: 1 "
                "to 70000"
            ),
        ),
        (
            slices("      devices: some\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices: 'some' is unknown; "
                "write "
                '"all", a number of GPUs, or a list of indices and uuids'
            ),
        ),
        (
            slices("      devices: 0\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices: 0 GPUs are none; write "
                '"all", a number of GPUs, or a list of indices and uuids'
            ),
        ),
        (
            slices("      devices: [GPU-1]\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices[0]: 'GPU-1' is not a device; "
                "write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
            ),
        ),
        (
            slices("      devices: ['٣']\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices[0]: '٣' is not a device; "
                "write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
            ),
        ),
        (
            "version: v1\nflags: {migStrategy: some}",
            "f.yaml: 2: flags.migStrategy: 'some' is unknown; allowed: mixed, none, single",
        ),
        (
            "version: v1\nflags: {plugin: {deviceListStrategy: [envvar, magic]}}",
            (
                "f.yaml: 2: flags.plugin.deviceListStrategy: 'magic' is unknown; allowed: "
                "cdi-annotations, cdi-cri, envvar, volume-mounts"
            ),
        ),
    ],
)
def test_a_mistake_is_refused_with_the_operators_own_line(text: str, message: str) -> None:
    """Each refusal names file, line and path in the file as the operator wrote it."""
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MIG_STRATEGY", "some", "'some' is unknown; allowed: mixed, none, single"),
        (
            "SHARED_DEVICES_ALLOCATION_POLICY",
            "any",
            "'any' is unknown; allowed: distributed, packed",
        ),
        ("PASS_DEVICE_SPECS", "perhaps", "'perhaps' is neither true nor false"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, message: str) -> None:
    """A variable with a wrong value is refused by its name."""
    refused = refusal("version: v1", environment={variable: value})

    assert refused == f"environment: {variable}: {message}"

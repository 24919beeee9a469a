"""NVIDIA's device plugin's file: what it says, and what the plugin itself strips, works here."""

import pytest

from metagpu.compat import manifest
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError
from tests.build import gpu
from tests.compat.nvidia_texts import FOUR, SLICES, slices
from tests.compat.rig import FILES, converted, notes, offered, pools


@pytest.mark.parametrize(("profile", "shares"), [("slice-4", 16), ("slice-10", 40)])
def test_the_slices_of_cerns_notes(profile: str, shares: int) -> None:
    """Four GPUs in slices of four are 16 nvidia.com/gpu.shared, as the notes say."""
    file = FILES / "nvidia-time-slicing-config.yaml"
    texts = manifest.texts(Document(file.read_text(encoding="utf-8"), str(file)))
    conversion = converted(texts[profile][0])

    assert offered(conversion, *FOUR) == {"nvidia.com/gpu.shared": shares}
    assert conversion.notes == ()
    assert conversion.data["pools"][0]["backends"][0]["failRequestsGreaterThanOne"] is True


def test_a_file_that_says_nothing_offers_whole_gpus() -> None:
    """Without sharing, GPUs go by nvidia.com/gpu as they are."""
    assert offered(converted("version: v1"), *FOUR) == {"nvidia.com/gpu": 4}


def test_replicas_keep_the_name_unless_renamed() -> None:
    """Without `renameByDefault` replicas go by the GPUs' own name; `rename` has the last word."""
    renamed = slices("      rename: fast\n", head="    renameByDefault: true\n")

    assert offered(converted(SLICES), *FOUR) == {"nvidia.com/gpu": 16}
    assert offered(converted(renamed), *FOUR) == {"nvidia.com/fast": 16}


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        ("all", [4, 4, 4, 4]),
        ("2", [4, 4, 0, 0]),
        ("[1, '3']", [0, 4, 0, 4]),
        (f"[0, {gpu(2).id}]", [4, 0, 4, 0]),
    ],
)
def test_only_these_devices_are_shared(devices: str, shared: list[int]) -> None:
    """`devices` by number, index and uuid; the rest of the GPUs stay whole."""
    conversion = converted(slices(f"      rename: shared\n      devices: {devices}\n"))

    for each, count in zip(FOUR, shared, strict=True):
        found = offered(conversion, each)
        assert found["nvidia.com/shared"] == count
        assert found.get("nvidia.com/gpu", 0) == (0 if count else 1)


def test_each_gpu_its_own_replicas() -> None:
    """Entries of one name share different GPUs differently."""
    text = slices("      devices: [0]\n    - name: gpu\n      replicas: 10\n      devices: [1]\n")

    assert offered(converted(text), *FOUR) == {"nvidia.com/gpu": 4 + 10 + 1 + 1}


def test_the_rest_under_a_shared_name_is_one_replica_each() -> None:
    """Where replicas keep the name, GPUs that are not shared are offered by it too, once each."""
    [shared, rest] = pools(slices("      devices: [0]\n"))

    assert shared["backends"][0]["replicas"] == 4
    assert rest["backends"][0] == {
        "backend": "timeslice",
        "resource": "nvidia.com/gpu",
        "replicas": 1,
    }


def test_an_entry_that_comes_too_late_is_told() -> None:
    """After one that takes all GPUs of a name another has no effect."""
    assert notes(slices("    - name: nvidia.com/gpu\n      replicas: 2\n")) == [
        (
            "f.yaml: 7: sharing.timeSlicing.resources[1]: has no effect: the entry before it takes "
            "all GPUs"
        )
    ]


def test_names_by_pattern() -> None:
    """`resources.gpus` names GPUs by their product, and sharing goes by those names."""
    text = """\
version: v1
resources:
  gpus:
  - {pattern: "*T4*", name: t4}
  - {pattern: "*", name: nvidia.com/gpu}
sharing:
  timeSlicing:
    resources: [{name: t4, replicas: 3}]
"""
    t4 = gpu(4, name="Tesla T4", memory_mib=15360)

    assert offered(converted(text), *FOUR, t4) == {"nvidia.com/t4": 3, "nvidia.com/gpu": 4}


def test_only_the_star_is_special_in_a_pattern() -> None:
    """Other signs of our patterns stand for themselves in NVIDIA's."""
    [pool] = pools("version: v1\nresources: {gpus: [{pattern: 'A[1]?*', name: a}]}")

    assert pool["gpus"] == {"product": "A[[]1][?]*"}


def test_mps_wins_and_is_said() -> None:
    """With both ways of sharing MPS is taken, as NVIDIA's plugin does, and the other is told."""
    text = slices(way="mps") + "  timeSlicing: {resources: [{name: gpu, replicas: 2}]}\n"

    assert pools(text)[0]["backends"] == [
        {"backend": "mps", "resource": "nvidia.com/gpu", "replicas": 4}
    ]
    assert notes(text) == [
        "f.yaml: 7: sharing.timeSlicing: has no effect: where sharing.mps is given, that wins"
    ]


def test_parts_under_mps_are_counted_as_nvidia_counts_them() -> None:
    """Four replicas under MPS on four GPUs are 16, and the rest of the GPUs are one each."""
    assert offered(converted(slices(way="mps")), *FOUR) == {"nvidia.com/gpu": 16}
    assert offered(converted(slices("      devices: [0]\n", way="mps")), *FOUR) == {
        "nvidia.com/gpu": 4 + 3
    }


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


def test_a_backend_that_is_missing_is_named() -> None:
    """What is not installed is told of the line that needs it, with what there is."""
    conversion = converted(slices(way="mps"))

    assert conversion.missing(["mps", "whole"]) is None
    assert str(conversion.missing(["whole", "fraction"])) == (
        "f.yaml: 5: sharing.mps.resources[0]: this needs the backend mps, which is not installed; "
        "there are: fraction, whole"
    )


def test_an_option_that_a_backend_does_not_have_is_named() -> None:
    """A conversion to a key that the installed backend does not know is told in those words."""
    error = ConfigError("unknown key; allowed: a", path="pools[0].backends[0].replicas")

    assert str(converted(SLICES).retold(error)) == (
        "f.yaml: 5: sharing.timeSlicing.resources[0]: this needs the option replicas of a backend, "
        "which has none here"
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


def test_what_has_no_place_here_is_told() -> None:
    """Flags without effect say what they would have done, unless they ask for nothing."""
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
    """Variables without effect are told like keys; those that ask for nothing are not."""
    environment = {
        "MOFED_ENABLED": "true",
        "GDS_ENABLED": "false",
        "FAIL_ON_INIT_ERROR": "true",
        "DP_DISABLE_HEALTHCHECKS": "xids",
    }

    assert notes("version: v1", environment=environment) == [
        (
            "environment: DP_DISABLE_HEALTHCHECKS: has no effect on all XIDs at once; name those "
            "that differ"
        ),
        (
            "environment: MOFED_ENABLED: has no effect here; it would have given containers "
            "Mellanox' devices"
        ),
    ]


def test_unknown_keys_are_told_with_what_was_meant() -> None:
    """NVIDIA's plugin passes over a key that it does not know; here it is told."""
    text = SLICES.replace("timeSlicing:\n", "timeSlicing:\n    renameByDefalt: true\n")

    assert notes(text + "flags: {plugins: {}}\n") == [
        (
            "f.yaml: 4: sharing.timeSlicing.renameByDefalt: unknown key, has no effect; did you "
            "mean renameByDefault?"
        ),
        "f.yaml: 8: flags.plugins: unknown key, has no effect; did you mean plugin?",
    ]


def test_a_name_that_no_gpu_has() -> None:
    """Sharing what no GPU goes by has no effect, and the names that there are are told."""
    assert notes(SLICES.replace("nvidia.com/gpu", "nvidia.com/gpus")) == [
        (
            "f.yaml: 5: sharing.timeSlicing.resources[0]: has no effect: no GPU goes by that name; "
            "there are: nvidia.com/gpu"
        )
    ]
    assert notes(SLICES.replace("nvidia.com/gpu", "nvidia.com/mig-1g.5gb")) == [
        (
            "f.yaml: 5: sharing.timeSlicing.resources[0]: has no effect here; it would have given "
            "each MIG instance to several"
        )
    ]

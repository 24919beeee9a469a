"""NVIDIA's device plugin's file: what it says, and what the plugin itself strips, works here."""

from typing import Final

import pytest

from metagpu.compat import manifest
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError
from tests.backends.mig.gpus import mig_gpu
from tests.build import gpu
from tests.compat.rig import FILES, converted, laid, notes, offered, pools, refusal

FOUR: Final = [gpu(n) for n in range(4)]
MIG_FOUR: Final = [mig_gpu(n) for n in range(4)]
SLICES: Final = """\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
"""


def slices(more: str = "", *, way: str = "timeSlicing", head: str = "") -> str:
    """Write a file that shares GPUs; `more` are further keys of its one resource."""
    return f"""\
version: v1
sharing:
  {way}:
{head}    resources:
    - name: nvidia.com/gpu
      replicas: 4
{more}"""


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: v2\nsharing: {}",
            "f.yaml: 1: version: 'v2' is not known here; allowed: v1",
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
            "f.yaml: 5: sharing.timeSlicing.resources[0]: replicas is 0; allowed: 1 to 100000",
        ),
        (
            slices("      devices: some\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices: 'some' is not known here; "
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
            slices("      devices: []\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices: no device is named; write "
                '"all", a number of GPUs, or a list of indices and uuids'
            ),
        ),
        (
            slices("      devices: [GPU-1]\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices[0]: 'GPU-1' is no device; "
                "write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
            ),
        ),
        (
            slices("      rename: not a name\n"),
            (
                "f.yaml: 5: sharing.timeSlicing.resources[0]: 'nvidia.com/not a name' is no "
                "resource name: the name after `/` must be 1 to 63 of A-Z a-z 0-9 . _ -, "
                "alphanumeric at both ends"
            ),
        ),
        (
            "version: v1\nflags: {migStrategy: some}",
            "f.yaml: 2: flags.migStrategy: 'some' is not known here; allowed: mixed, none, single",
        ),
        (
            "version: v1\nflags: {plugin: {deviceListStrategy: [envvar, magic]}}",
            (
                "f.yaml: 2: flags.plugin.deviceListStrategy: 'magic' is not known here; allowed: "
                "cdi-annotations, cdi-cri, envvar, volume-mounts"
            ),
        ),
        (
            "version: v1\nflags: {plugin: {deviceListStrategy: [cdi-cri, cdi-annotations]}}",
            (
                "f.yaml: 2: flags.plugin.deviceListStrategy: cdi-cri and cdi-annotations inject "
                "twice; choose one of them"
            ),
        ),
    ],
)
def test_a_mistake_is_told_of_the_operators_own_line(text: str, message: str) -> None:
    """Each refusal names file, line and path in the file as the operator wrote it."""
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MIG_STRATEGY", "some", "'some' is not known here; allowed: mixed, none, single"),
        (
            "SHARED_DEVICES_ALLOCATION_POLICY",
            "any",
            "'any' is not known here; allowed: distributed, packed",
        ),
        ("PASS_DEVICE_SPECS", "perhaps", "'perhaps' is neither true nor false"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, message: str) -> None:
    """A variable that says what cannot be is refused by its name."""
    told = refusal("version: v1", environment={variable: value})

    assert told == f"environment: {variable}: {message}"


# --- MIG ------------------------------------------------------------------------------------------

LAYOUT: Final = (FILES / "nvidia-mig-config.yaml").read_text(encoding="utf-8")
SEVEN: Final = """\
version: v1
mig-configs:
  7x1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


def mixed(strategy: str) -> str:
    """Write a file of the device plugin with this strategy for MIG."""
    return f"version: v1\nflags: {{migStrategy: {strategy}}}\n"


def test_the_layout_of_cerns_notes() -> None:
    """The chosen layout is had on all GPUs, named by profile: 12 and 8 instances of four A100."""
    [pool] = pools(LAYOUT, mixed("mixed"), mig_config="2x2g.10gb-3x1g.5gb")

    assert pool == {
        "name": "2x2g.10gb-3x1g.5gb",
        "gpus": "all",
        "backends": [{"backend": "mig", "layout": {"1g.5gb": 3, "2g.10gb": 2}, "enableMig": True}],
    }
    assert pools(LAYOUT, mig_config="2x2g.10gb-3x1g.5gb") == [pool]
    cut = converted(LAYOUT, mixed("mixed"), mig_config="2x2g.10gb-3x1g.5gb")
    assert offered(cut, *MIG_FOUR) == {"nvidia.com/mig-1g.5gb": 12, "nvidia.com/mig-2g.10gb": 8}


def test_single_names_all_instances_nvidia_com_gpu() -> None:
    """Under the strategy single the same layout goes by one name, under mixed by its profiles."""
    [single] = pools(SEVEN, mixed("single"))
    [by_profile] = pools(SEVEN, mixed("mixed"))
    [by_variable] = pools(SEVEN, environment={"MIG_STRATEGY": "single"})

    assert single["backends"] == [
        {"backend": "mig", "resource": "nvidia.com/gpu", "layout": {"1g.5gb": 7}, "enableMig": True}
    ]
    assert by_profile["backends"] == [
        {"backend": "mig", "layout": {"1g.5gb": 7}, "enableMig": True}
    ]
    assert by_variable == single
    assert offered(converted(SEVEN, mixed("single")), *MIG_FOUR) == {"nvidia.com/gpu": 28}
    assert offered(converted(SEVEN, mixed("mixed")), *MIG_FOUR) == {"nvidia.com/mig-1g.5gb": 28}


def test_a_disabled_layout_leaves_gpus_to_the_plugin() -> None:
    """GPUs that shall have no MIG are offered as the device plugin's file says."""
    assert offered(converted(LAYOUT, mig_config="disabled"), *FOUR) == {"nvidia.com/gpu": 4}
    assert offered(converted(LAYOUT, SLICES, mig_config="disabled"), *FOUR) == {
        "nvidia.com/gpu": 16
    }


def test_gpus_of_a_layout_and_the_rest() -> None:
    """The last entry that names a GPU wins, as in mig-parted; GPUs that none names are shared."""
    layout = """\
mig-configs:
  some:
  - {devices: [0, 1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - {devices: [1], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  - {devices: [2], mig-enabled: false}
"""
    off, seventh, first, rest, _ = pools(layout, slices("      devices: [2, 3]\n"))

    assert off["gpus"] == {"index": "2"}
    assert off["backends"][0]["replicas"] == 4
    assert (seventh["gpus"], first["gpus"]) == ({"index": "1"}, {"index": "0,1"})
    assert rest["gpus"] == {"index": "2,3"}


def test_a_filter_by_kind_of_gpu() -> None:
    """`device-filter` goes by PCI ids, one or several, with `devices` beside it."""
    layout = """\
mig-configs:
  some:
  - {device-filter: 0x20B010DE, devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - device-filter: ["0x20B210DE", "0x20B510DE"]
    devices: [1]
    mig-enabled: true
    mig-devices: {1g.10gb: 7}
"""
    several, one, _ = pools(layout)

    assert several["gpus"] == {"index": "1", "pciDevice": ["0x20B210DE", "0x20B510DE"]}
    assert one["gpus"] == {"pciDevice": ["0x20B010DE"]}


def test_strategies_that_cannot_be_are_told() -> None:
    """`none` beside a layout, and the others without one, say what they would have done."""
    assert notes(mixed("none"), SEVEN) == [
        (
            "f.yaml: 2: flags.migStrategy: has no effect here; it would have offered a GPU in MIG "
            "mode as a whole one, which CUDA cannot use. Instances are offered by profile, as with "
            "mixed"
        )
    ]
    for strategy in ("single", "mixed"):
        assert notes(mixed(strategy)) == [
            (
                "f.yaml: 2: flags.migStrategy: has no effect here; it would have offered the MIG "
                "instances that there are. Give mig-parted's file beside this one, or a pool with "
                "backend mig"
            )
        ]
        assert offered(converted(mixed(strategy)), *FOUR) == {"nvidia.com/gpu": 4}


def test_mig_mode_is_not_turned_off() -> None:
    """A layout without MIG does not take GPUs out of MIG mode, and says so."""
    assert notes(LAYOUT, mig_config="disabled") == [
        (
            "f.yaml: 12: mig-configs.disabled[0].mig-enabled: would have turned MIG mode off; "
            "metagpu leaves it on, and such a GPU alone"
        )
    ]


def test_a_flag_of_the_environment_is_told_as_such() -> None:
    """What is wrong with a flag is said of the variable that gave it."""
    environment = {"MIG_STRATEGY": "mixed", "DEVICE_LIST_STRATEGY": "magic"}

    assert notes("version: v1", environment=environment)[0].startswith("environment: MIG_STRATEGY:")
    assert refusal("version: v1", environment=environment).startswith(
        "environment: DEVICE_LIST_STRATEGY: 'magic' is not known here; allowed: "
    )


def test_single_takes_the_name_for_instances() -> None:
    """Under single, `resources.mig` names all instances, and its first entry counts."""
    plugin = mixed("single") + "resources: {mig: [{pattern: '*', name: slice}]}\n"

    assert pools(plugin, SEVEN)[0]["backends"][0]["resource"] == "nvidia.com/slice"
    assert notes(plugin, SEVEN) == []


def test_instances_are_renamed_by_pattern() -> None:
    """Under mixed, `resources.mig` names instances by profile; the first that matches counts."""
    plugin = mixed("mixed") + (
        "resources: {mig: [{pattern: 1g.*, name: small}, {pattern: 2g.10gb, name: a.b/large}]}\n"
    )
    conversion = converted(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")

    assert offered(conversion, *MIG_FOUR) == {"nvidia.com/small": 12, "a.b/large": 8}
    assert conversion.notes == ()
    assert pools(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")[0]["backends"] == [
        {
            "backend": "mig",
            "resource": {"1g.5gb": "nvidia.com/small", "2g.10gb": "a.b/large"},
            "layout": {"1g.5gb": 3, "2g.10gb": 2},
            "enableMig": True,
        }
    ]


def test_renamed_instances_are_shared_by_their_new_name() -> None:
    """Sharing goes by the names that instances have, and adds to them as to others."""
    plugin = (
        slices(head="    renameByDefault: true\n").replace("nvidia.com/gpu", "nvidia.com/small")
        + "resources: {mig: [{pattern: 1g.5gb, name: small}]}\n"
    )

    assert offered(converted(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb"), *MIG_FOUR) == {
        "nvidia.com/small.shared": 48,
        "nvidia.com/mig-2g.10gb": 8,
    }


def test_a_name_of_no_instance_is_told() -> None:
    """A pattern that no profile of the layout matches, or that comes too late, has a note."""
    plugin = mixed("mixed") + (
        "resources:\n  mig:\n  - {pattern: 1g.5gb, name: a}\n  - {pattern: '*.5gb', name: b}\n"
    )

    assert notes(plugin, SEVEN) == [
        (
            "f.yaml: 6: resources.mig[1]: has no effect: no instance of this layout is of such a "
            "profile, or an entry before it names it; there are: 1g.5gb"
        )
    ]


def test_one_name_for_several_sizes_is_refused() -> None:
    """A pattern that gives instances of different sizes one name says which it would be."""
    plugin = mixed("mixed") + "resources: {mig: [{pattern: '*', name: slice}]}\n"

    assert refusal(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb") == (
        "f.yaml: 3: resources.mig[0]: nvidia.com/slice would be instances of several sizes: "
        "1g.5gb, 2g.10gb; give each profile a name of its own"
    )


def test_names_and_devices_of_mig_are_told() -> None:
    """Names of MIG profiles, and MIG devices among those shared, have notes."""
    text = slices("      devices: [0, '1:0']\n") + (
        "resources: {mig: [{pattern: 1g.5gb, name: small}]}\n"
    )

    assert notes(text) == [
        "f.yaml: 7: sharing.timeSlicing.resources[0].devices: has no effect on MIG devices: 1:0",
        "f.yaml: 8: resources.mig[0]: has no effect here; it would have renamed MIG instances",
    ]


@pytest.mark.parametrize(
    ("text", "mig_config", "message"),
    [
        (
            LAYOUT,
            None,
            (
                "f.yaml: 9: mig-configs: none of its layouts is chosen; give --mig-config: "
                "disabled, 2x2g.10gb-3x1g.5gb"
            ),
        ),
        (
            LAYOUT,
            "all-1g.5gb",
            (
                "f.yaml: 9: mig-configs: there is no layout 'all-1g.5gb' (--mig-config); there "
                "are: disabled, 2x2g.10gb-3x1g.5gb"
            ),
        ),
        ("mig-configs: {}", None, "f.yaml: 1: mig-configs: there is no layout; give at least one"),
        (
            SEVEN.replace("version: v1", "version: v2"),
            None,
            "f.yaml: 1: version: 'v2' is not known here; allowed: v1",
        ),
        (
            SEVEN.replace("1g.5gb: 7}", "1g.5gb: -1}"),
            None,
            (
                'f.yaml: 4: mig-configs["7x1g.5gb"][0].mig-devices["1g.5gb"]: -1 instances cannot '
                "be; "
                "write how many of it a GPU has"
            ),
        ),
        (
            SEVEN.replace("1g.5gb: 7}", "1g.5gb: 0}"),
            None,
            (
                'f.yaml: 4: mig-configs["7x1g.5gb"][0].mig-devices: no instance is named; say how '
                "many "
                "of which profile, as in 1g.5gb: 7"
            ),
        ),
        (
            SEVEN.replace("true", "false"),
            None,
            (
                'f.yaml: 4: mig-configs["7x1g.5gb"][0].mig-devices: a GPU has no instances when '
                "mig-enabled is false; remove one of the two"
            ),
        ),
        (
            SEVEN.replace("mig-enabled: true, ", ""),
            None,
            'f.yaml: 4: mig-configs["7x1g.5gb"][0]: missing key `mig-enabled`',
        ),
        (
            SEVEN.replace("devices: all", "devices: some"),
            None,
            (
                "f.yaml: 4: mig-configs[\"7x1g.5gb\"][0].devices: 'some' is not known here; write "
                "all, or a list of indices"
            ),
        ),
        (
            SEVEN.replace("devices: all", "devices: [-1]"),
            None,
            (
                'f.yaml: 4: mig-configs["7x1g.5gb"][0].devices: no GPU is named; write all, or a '
                "list "
                "of indices from 0 on"
            ),
        ),
    ],
)
def test_a_wrong_layout_is_told_of_its_line(
    text: str, mig_config: str | None, message: str
) -> None:
    """Each refusal names file, line and path, and says what can be chosen or written."""
    assert refusal(text, mig_config=mig_config) == message


def test_single_wants_one_profile_on_all_gpus() -> None:
    """GPUs that are laid out otherwise are offered to nobody and say why; the others are served."""
    wants = "the strategy single wants instances of one profile on all GPUs, and"
    choose = "choose mixed, or another layout"

    conversion = converted(LAYOUT, mixed("single"), mig_config="2x2g.10gb-3x1g.5gb")
    [why] = {it.why for it in laid(conversion, *MIG_FOUR).assignments}
    reason = f"{wants} these have 1g.5gb, 2g.10gb; {choose}"
    assert why == f"all GPUs, but nothing is cut: {reason}"
    assert offered(conversion, *MIG_FOUR) == {}
    assert [str(note) for note in conversion.notes] == [
        'f.yaml: 16: mig-configs["2x2g.10gb-3x1g.5gb"][0]: its GPUs are offered to nobody: '
        + reason
    ]


@pytest.mark.parametrize(
    ("second", "wrong", "count"),
    [
        ("mig-enabled: false", "these have no MIG instances", 21),
        (
            "mig-enabled: true, mig-devices: {1g.5gb: 1, 2g.10gb: 3}",
            "these have 1g.5gb, 2g.10gb",
            21,
        ),
        (
            "mig-enabled: true, mig-devices: {2g.10gb: 3}",
            "the GPUs of this layout have 1g.5gb, 2g.10gb",
            0,
        ),
    ],
)
def test_single_offers_the_gpus_that_are_right(second: str, wrong: str, count: int) -> None:
    """Only GPUs with another layout are kept; where none is the right one, all are."""
    text = (
        "version: v1\nmig-configs:\n  it:\n"
        "  - {devices: [1, 2, 3], mig-enabled: true, mig-devices: {1g.5gb: 7}}\n"
        f"  - {{devices: [0], {second}}}\n"
    )
    conversion = converted(text, mixed("single"))
    told = laid(conversion, *MIG_FOUR)

    assert len(told.shares) == count
    assert wrong in told.assignments[0].why
    assert {share.resource for share in told.shares} <= {"nvidia.com/gpu"}


def test_without_any_instance_single_is_as_none() -> None:
    """Where no GPU shall have MIG, GPUs are offered as they are, whatever the strategy."""
    for strategy in ("none", "single", "mixed"):
        conversion = converted(LAYOUT, mixed(strategy), mig_config="disabled")

        assert offered(conversion, *FOUR) == {"nvidia.com/gpu": 4}
        assert len(conversion.notes) == 1


def test_instances_are_shared_as_gpus_are() -> None:
    """Replicas of nvidia.com/mig-1g.5gb are honoured, with the plugin's names and refusal."""
    plugin = slices(head="    failRequestsGreaterThanOne: true\n").replace(
        "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"
    )
    [pool] = pools(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")

    assert pool["backends"] == [
        {
            "backend": "mig",
            "resource": {"1g.5gb": "nvidia.com/mig-1g.5gb"},
            "replicas": {"1g.5gb": 4},
            "failRequestsGreaterThanOne": True,
            "layout": {"1g.5gb": 3, "2g.10gb": 2},
            "enableMig": True,
        }
    ]
    for more, name in (("", ""), ("    renameByDefault: true\n", ".shared")):
        text = plugin.replace("    failRequestsGreaterThanOne: true\n", more)
        conversion = converted(text, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")

        assert offered(conversion, *MIG_FOUR) == {
            f"nvidia.com/mig-1g.5gb{name}": 48,
            "nvidia.com/mig-2g.10gb": 8,
        }
        assert not conversion.notes


def test_instances_under_one_name_are_shared() -> None:
    """Under single, replicas of nvidia.com/gpu are replicas of the instances."""
    plugin = slices(head="    renameByDefault: true\n") + "flags: {migStrategy: single}\n"

    assert offered(converted(plugin, SEVEN), *MIG_FOUR) == {"nvidia.com/gpu.shared": 112}
    assert notes(plugin, SEVEN) == []


def test_instances_are_shared_through_mps() -> None:
    """What NVIDIA's plugin refuses of MIG devices works here, under the names that it would use."""
    plugin = slices(way="mps").replace("nvidia.com/gpu", "nvidia.com/mig-1g.5gb")
    plugin += "flags: {plugin: {sharedDevicesAllocationPolicy: distributed}}\n"
    [pool] = pools(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")

    assert pool["backends"] == [
        {
            "backend": "mig",
            "resource": {"1g.5gb": "nvidia.com/mig-1g.5gb"},
            "mps": {"replicas": {"1g.5gb": 4}, "placement": "spread"},
            "layout": {"1g.5gb": 3, "2g.10gb": 2},
            "enableMig": True,
        }
    ]
    conversion = converted(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")
    assert offered(conversion, *MIG_FOUR) == {
        "nvidia.com/mig-1g.5gb": 48,
        "nvidia.com/mig-2g.10gb": 8,
    }
    assert not conversion.notes


def test_instances_under_one_name_are_shared_through_mps() -> None:
    """Under single, parts of nvidia.com/gpu are parts of the instances."""
    plugin = slices(way="mps", head="    renameByDefault: true\n")
    plugin += "flags: {migStrategy: single}\n"

    assert offered(converted(plugin, SEVEN), *MIG_FOUR) == {"nvidia.com/gpu.shared": 112}
    assert notes(plugin, SEVEN) == []


def test_what_cannot_be_shared_of_instances_is_told() -> None:
    """Some of the instances, and a second entry for the same, are notes."""
    name = "nvidia.com/mig-1g.5gb"
    plugin = slices("      devices: [0]\n").replace("nvidia.com/gpu", name)
    twice = plugin.replace("      devices: [0]\n", f"    - {{name: {name}, replicas: 2}}\n")

    assert notes(plugin, SEVEN) == [
        (
            "f.yaml: 7: sharing.timeSlicing.resources[0].devices: has no effect on MIG instances: "
            "all of them are shared"
        )
    ]
    assert notes(twice, SEVEN) == [
        (
            "f.yaml: 7: sharing.timeSlicing.resources[1]: has no effect: the entry before it takes "
            "all of them"
        )
    ]
    several = slices(way="mps").replace("nvidia.com/gpu", name)
    assert notes(several) == [
        (
            "f.yaml: 5: sharing.mps.resources[0]: has no effect here; it would have given each MIG "
            "instance to several"
        )
    ]


def test_gpus_that_single_leaves_out_are_told() -> None:
    """Under single, GPUs that no entry names would go by the name of instances: they go by none."""
    text = SEVEN.replace("devices: all", "devices: [0]")

    assert len(pools(text, mixed("single"))) == 1
    assert notes(text, mixed("single")) == [
        (
            'f.yaml: 4: mig-configs["7x1g.5gb"][0]: GPUs that this layout does not name are '
            "offered to "
            "nobody under single"
        )
    ]


def test_an_unknown_key_of_a_layout_is_a_note() -> None:
    """A key that mig-parted itself would refuse is told."""
    assert notes(SEVEN.replace("devices: all", "devices: all, mig-device: {}")) == [
        (
            'f.yaml: 4: mig-configs["7x1g.5gb"][0].mig-device: unknown key, has no effect; did you '
            "mean mig-devices?"
        )
    ]


def test_two_files_of_one_format_are_refused() -> None:
    """Two files of the device plugin say two things of one node."""
    assert refusal(SLICES, SLICES) == "g.yaml: 1: f.yaml is of the same format; give one of them"

"""A layout of mig-parted's file, beside a file of NVIDIA's device plugin or without."""

import pytest

from tests.compat.nvidia_texts import FOUR, LAYOUT, MIG_FOUR, SEVEN, SLICES, mixed, slices
from tests.compat.rig import converted, notes, offered, pools, refusal


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

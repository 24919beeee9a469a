"""A layout of mig-parted's file, with and without a file of NVIDIA's device plugin."""

from collections import Counter

import pytest
from msgspec.structs import replace

from metagpu.agent.config_source import to_yaml
from metagpu.compat import formats
from metagpu.compat.contract import ConversionContext
from metagpu.core.config.config import Config
from metagpu.core.config.document import Document
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from tests.backends.mig.gpus import instance, mig_gpu
from tests.compat.nvidia_texts import FOUR, LAYOUT, MIG_FOUR, SEVEN, SLICES, mixed
from tests.compat.rig import converted, document, layout_of, notes, offered, pools, refusal
from tests.rigs.build import BACKENDS, gpu


def test_the_layout_of_cerns_notes() -> None:
    """The chosen layout is on all GPUs with MIG, by profile: 12 and 8 instances of four A100."""
    [pool, rest] = pools(LAYOUT, mixed("mixed"), mig_config="2x2g.10gb-3x1g.5gb")

    assert pool == {
        "name": "2x2g.10gb-3x1g.5gb",
        "gpus": {"mig": True},
        "backends": [{"backend": "mig", "layout": {"1g.5gb": 3, "2g.10gb": 2}, "enableMig": True}],
    }
    assert pools(LAYOUT, mig_config="2x2g.10gb-3x1g.5gb") == [pool, rest]
    cut = converted(LAYOUT, mixed("mixed"), mig_config="2x2g.10gb-3x1g.5gb")
    assert offered(cut, *MIG_FOUR) == {"nvidia.com/mig-1g.5gb": 12, "nvidia.com/mig-2g.10gb": 8}


def test_gpus_without_mig_stay_on_offer() -> None:
    """`devices: all` is all GPUs that support MIG; the others are offered as without a layout."""
    t4 = replace(gpu(4, name="Tesla T4"), mig_enabled=None, mig_profiles=())

    assert offered(converted(SEVEN), *MIG_FOUR, t4) == {
        "nvidia.com/mig-1g.5gb": 28,
        "nvidia.com/gpu": 1,
    }
    assert offered(converted(SEVEN, SLICES), *MIG_FOUR, t4) == {
        "nvidia.com/mig-1g.5gb": 28,
        "nvidia.com/gpu": 4,
    }
    assert layout_of(converted(SEVEN), t4).pool_assignments[0].pool == "not-in-layout"


def test_mig_mode_without_instances() -> None:
    """`mig-devices: {}`, as in NVIDIA's `all-enabled`, is MIG mode without an instance."""
    layout = "mig-configs: {all-enabled: [{devices: all, mig-enabled: true, mig-devices: {}}]}"

    assert pools(layout)[0]["backends"] == [{"backend": "mig", "layout": {}, "enableMig": True}]
    assert offered(converted(layout), *MIG_FOUR) == {}
    assert notes(layout) == []


def test_a_disabled_layout_leaves_gpus_to_the_plugin() -> None:
    """GPUs without MIG in the layout are offered as the device plugin's file says."""
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
    off, seventh, first, rest = pools(layout, SLICES)

    assert off["gpus"] == {"index": "2"}
    assert off["backends"][1]["replicas"] == 4
    assert seventh["gpus"] == {"index": "1", "mig": True}
    assert first["gpus"] == {"index": "0,1", "mig": True}
    assert rest["gpus"] == "all"


def test_a_filter_by_kind_of_gpu() -> None:
    """`device-filter` selects by one or several PCI ids, with `devices` beside it."""
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

    assert several["gpus"] == {
        "index": "1",
        "pciDevice": ["0x20B210DE", "0x20B510DE"],
        "mig": True,
    }
    assert one["gpus"] == {"pciDevice": ["0x20B010DE"], "mig": True}


def test_a_filter_by_board() -> None:
    """A filter may name the maker's board, as from mig-parted 0.15 on."""
    layout = SEVEN.replace("devices: all", 'devices: all, device-filter: "0x20B010DE:0x134F10DE"')
    other = replace(MIG_FOUR[1], pci_subsystem=0x146310DE)

    found = layout_of(converted(layout), MIG_FOUR[0], other).pool_assignments
    assert [assignment.pool for assignment in found] == ["7x1g.5gb", "not-in-layout"]


def test_without_a_choice_the_plugins_file_decides() -> None:
    """A node that chooses no layout stays as it is: its instances and GPUs are offered."""
    files = [document(text, name) for text, name in ((SLICES, "f.yaml"), (SEVEN, "g.yaml"))]
    read = formats.convert(formats.recognize_files(files), ConversionContext())
    whole = replace(MIG_FOUR[1], mig_enabled=False)

    assert read.notes == ()
    existing = {MIG_FOUR[0].id: [instance(MIG_FOUR[0], "3g.20gb@4")]}
    assert offered(read, MIG_FOUR[0], whole, existing=existing) == {
        "nvidia.com/gpu": 4,
        "nvidia.com/mig-3g.20gb": 1,
    }
    alone = formats.convert(formats.recognize_files(files[1:]), ConversionContext())
    assert list(map(str, alone.notes)) == [
        (
            "g.yaml: 2: mig-configs: no layout is chosen, and the GPUs stay as they are; "
            "--mig-config, or the label nvidia.com/mig.config, chooses one of 7x1g.5gb"
        )
    ]


def test_compute_instances_are_refused_alone() -> None:
    """An entry that divides GPU instances is not taken; a part that is the whole is."""
    layout = SEVEN.replace("1g.5gb: 7", "1c.2g.10gb: 2, 3g.20gb: 1")
    [pool, _] = pools(layout)

    assert pool["backends"] == []
    assert pool["reason"].startswith("1c.2g.10gb divides a GPU instance between compute instances")
    assert notes(layout)[0].startswith('f.yaml: 4: mig-configs["7x1g.5gb"][0]: its GPUs are not')
    whole = SEVEN.replace("1g.5gb: 7", "2c.2g.10gb: 2, 2g.10gb: 1")
    assert pools(whole)[0]["backends"][0]["layout"] == {"2g.10gb": 3}


def test_impossible_strategies_have_notes() -> None:
    """`none` with a layout has a note."""
    assert notes(mixed("none"), SEVEN) == [
        (
            "f.yaml: 2: flags.migStrategy: has no effect here; it would have offered a GPU in MIG "
            "mode as a whole GPU, which CUDA cannot use. Instances are offered by profile, as with "
            "mixed"
        )
    ]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("mixed", {"nvidia.com/mig-1g.5gb": 2, "nvidia.com/gpu": 4}),
        ("single", {"nvidia.com/gpu": 2}),
        ("none", {"nvidia.com/gpu": 4}),
    ],
)
def test_existing_instances_are_offered(strategy: str, expected: dict[str, int]) -> None:
    """Without a layout, the instances that are there are offered, under the strategy's names."""
    mig = mig_gpu(0)
    existing = {mig.id: [instance(mig, "1g.5gb@0", 7), instance(mig, "1g.5gb@1", 8)]}
    config = Config(Document(to_yaml(converted(mixed(strategy)).data), "f"), BACKENDS)
    whole = [gpu(n) for n in range(1, 5)]
    for gpus in ([mig, *whole], [*whole, mig]):  # the order of GPUs decides nothing
        layout = build_layout(config, gpus, Injection(), existing)
        assert Counter(share.resource for share in layout.shares) == expected
    assert notes(mixed(strategy)) == []


def test_single_offers_instances_of_one_size() -> None:
    """Under single, a GPU with instances of several sizes offers none, with the reason."""
    mig = mig_gpu(0)
    existing = {mig.id: [instance(mig, "1g.5gb@0", 7), instance(mig, "2g.10gb@2", 8)]}
    config = Config(Document(to_yaml(converted(mixed("single")).data), "f"), BACKENDS)
    layout = build_layout(config, [mig], Injection(), existing)

    assert layout.shares == ()
    assert (
        "for instances of one size, and its pool has 1g.5gb, 2g.10gb"
        in layout.pool_assignments[0].reason
    )

    other = mig_gpu(1)
    existing = {
        mig.id: [instance(mig, "1g.5gb@0", 7)],
        other.id: [instance(other, "2g.10gb@2", 8)],
    }
    layout = build_layout(config, [mig, other, gpu(2)], Injection(), existing)
    assert layout.shares == ()
    assert "other devices of this node have the name" in layout.pool_assignments[2].reason


def test_an_instance_of_an_unknown_profile_is_left_out() -> None:
    """An instance whose profile NVML does not list is not offered, and the others are."""
    mig = mig_gpu(0)
    unknown = replace(instance(mig, "2g.10gb@2", 8), profile=999)
    existing = {mig.id: [instance(mig, "1g.5gb@0", 7), unknown]}
    config = Config(Document(to_yaml(converted(mixed("mixed")).data), "f"), BACKENDS)
    layout = build_layout(config, [mig], Injection(), existing)

    assert [share.resource for share in layout.shares] == ["nvidia.com/mig-1g.5gb"]


def test_gpus_leave_mig_mode() -> None:
    """`mig-enabled: false` turns MIG mode off, and the GPUs are shared as without a layout."""
    [pool] = pools(LAYOUT, SLICES, mig_config="disabled")

    assert pool["gpus"] == "all"
    assert pool["backends"][0] == {"backend": "mig", "disableMig": True}
    assert pool["backends"][1]["backend"] == "timeslice"
    assert notes(LAYOUT, mig_config="disabled") == []


def test_a_wrong_flag_of_the_environment_names_its_variable() -> None:
    """The refusal of a wrong flag names the variable that set the flag."""
    environment = {"MIG_STRATEGY": "mixed", "DEVICE_LIST_STRATEGY": "magic"}

    assert refusal("version: v1", environment=environment).startswith(
        "environment: DEVICE_LIST_STRATEGY: 'magic' is unknown; allowed: "
    )


@pytest.mark.parametrize(
    ("text", "mig_config", "message"),
    [
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
            "f.yaml: 1: version: 'v2' is unknown; allowed: v1",
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
                'f.yaml: 4: mig-configs["7x1g.5gb"][0].mig-devices: all counts are 0; say how many '
                "of which profile, or write {} for none"
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
            SEVEN.replace(", mig-devices: {1g.5gb: 7}", ""),
            None,
            (
                'f.yaml: 4: mig-configs["7x1g.5gb"][0].mig-devices: no instance is named; say how '
                "many of which profile, as in 1g.5gb: 7, or {} for MIG mode without instances"
            ),
        ),
        (
            SEVEN.replace("devices: all, ", ""),
            None,
            'f.yaml: 4: mig-configs["7x1g.5gb"][0]: missing key `devices`',
        ),
        (
            SEVEN.replace("devices: all", "devices: some"),
            None,
            (
                "f.yaml: 4: mig-configs[\"7x1g.5gb\"][0].devices: 'some' is unknown; write "
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
def test_a_wrong_layout_is_refused_with_its_line(
    text: str, mig_config: str | None, message: str
) -> None:
    """Each refusal names file, line and path, and the allowed values."""
    assert refusal(text, mig_config=mig_config) == message


def test_an_unknown_key_of_a_layout_is_refused() -> None:
    """A misspelt key is refused, as mig-parted does, and not what is missing without it."""
    assert refusal(SEVEN.replace("mig-devices", "mig_devices")) == (
        'f.yaml: 4: mig-configs["7x1g.5gb"][0].mig_devices: unknown key, which mig-parted refuses; '
        "allowed: mig-enabled, devices, device-filter, mig-devices; did you mean mig-devices?"
    )


def test_two_files_of_one_format_are_refused() -> None:
    """Two files of the device plugin for one node are refused."""
    assert refusal(SLICES, SLICES) == "g.yaml: 1: f.yaml is of the same format; give one of them"

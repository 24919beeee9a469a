"""MIG instances by the names of NVIDIA's device plugin, and their sharing."""

import pytest

from tests.compat.nvidia_texts import FOUR, LAYOUT, MIG_FOUR, SEVEN, mixed, slices
from tests.compat.rig import converted, layout_of, notes, offered, pools


def test_instances_are_shared_as_gpus_are() -> None:
    """Replicas of nvidia.com/mig-1g.5gb are honoured, with the plugin's names and refusal."""
    plugin = slices(head="    failRequestsGreaterThanOne: true\n").replace(
        "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"
    )
    pool, _ = pools(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")

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
    """MIG devices under MPS, which NVIDIA's plugin refuses, work under its names."""
    plugin = slices(way="mps").replace("nvidia.com/gpu", "nvidia.com/mig-1g.5gb")
    plugin += "flags: {plugin: {sharedDevicesAllocationPolicy: distributed}}\n"
    pool, _ = pools(plugin, LAYOUT, mig_config="2x2g.10gb-3x1g.5gb")

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


def test_sharing_without_effect_has_notes() -> None:
    """The smaller of two entries of one name, and entries for no instance, have notes."""
    name = "nvidia.com/mig-1g.5gb"
    twice = slices(f"    - {{name: {name}, replicas: 2}}\n").replace("nvidia.com/gpu", name)

    assert notes(twice, SEVEN) == [
        (
            "f.yaml: 7: sharing.timeSlicing.resources[1]: has no effect: another entry of this "
            "name has 4 replicas"
        )
    ]
    several = slices(way="mps").replace("nvidia.com/gpu", name)
    for strategy in ("none", "single"):
        assert notes(f"{several}flags: {{migStrategy: {strategy}}}\n") == [
            (
                "f.yaml: 5: sharing.mps.resources[0]: has no effect: no instance has this name "
                f"(migStrategy {strategy})"
            )
        ]
    assert notes(f"{several}flags: {{migStrategy: mixed}}\n") == []
    assert len(notes(several.replace("1g.5gb", "tiny") + "flags: {migStrategy: mixed}\n")) == 1


@pytest.mark.parametrize("policy", ["packed", "distributed"])
def test_every_source_of_devices_is_shared_alike(policy: str) -> None:
    """GPUs, instances of a layout, and instances that are there get each of NVIDIA's options."""
    head = "    renameByDefault: true\n    failRequestsGreaterThanOne: true\n"
    flags = (
        f"flags: {{migStrategy: STRATEGY, plugin: {{sharedDevicesAllocationPolicy: {policy}}}}}\n"
    )
    plugin = slices(head=head, more="    - {name: mig-1g.5gb.me, replicas: 3}\n") + flags
    single, by_profile = (plugin.replace("STRATEGY", name) for name in ("single", "mixed"))
    options = {"failRequestsGreaterThanOne": True, "allocationPolicy": policy}
    four = {"resource": "nvidia.com/gpu.shared", "replicas": 4, **options}
    three = {"resource": {"1g.5gb+me": "nvidia.com/mig-1g.5gb.me.shared"}, **options}
    three["replicas"] = {"1g.5gb+me": 3}
    layout = SEVEN.replace("{1g.5gb: 7}", "{1g.5gb+me: 1}")

    assert [pool["backends"] for pool in pools(single)] == [
        [
            {"backend": "mig", **four, "existing": True},
            {"backend": "timeslice", **four},
        ]
    ]
    [in_layout] = pools(single, layout)
    assert in_layout["backends"] == [
        {"backend": "mig", **four, "layout": {"1g.5gb+me": 1}, "enableMig": True}
    ]
    [existing] = pools(by_profile)
    assert existing["backends"][0] == {"backend": "mig", **three, "existing": True}
    [in_layout, _] = pools(by_profile, layout)
    assert in_layout["backends"] == [
        {"backend": "mig", **three, "layout": {"1g.5gb+me": 1}, "enableMig": True}
    ]


def test_existing_instances_are_shared_through_mps() -> None:
    """MPS is for instances that are there too, with its placement."""
    plugin = slices(way="mps", more="    - {name: mig-1g.5gb, replicas: 3}\n")
    plugin += "flags: {migStrategy: STRATEGY, plugin: {sharedDevicesAllocationPolicy: packed}}\n"
    [one_name] = pools(plugin.replace("STRATEGY", "single"))
    [by_profile] = pools(plugin.replace("STRATEGY", "mixed"))

    assert one_name["backends"][0] == {
        "backend": "mig",
        "resource": "nvidia.com/gpu",
        "mps": {"replicas": 4, "placement": "binpack"},
        "existing": True,
    }
    assert by_profile["backends"][0] == {
        "backend": "mig",
        "resource": {"1g.5gb": "nvidia.com/mig-1g.5gb"},
        "mps": {"replicas": {"1g.5gb": 3}, "placement": "binpack"},
        "existing": True,
    }


def test_single_names_all_instances_nvidia_com_gpu() -> None:
    """Under the strategy single the same layout goes by one name, under mixed by its profiles."""
    [single] = pools(SEVEN, mixed("single"))
    by_profile, _ = pools(SEVEN, mixed("mixed"))
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


def test_single_wants_one_profile_on_all_gpus() -> None:
    """GPUs with another layout have no shares, with the reason; the others are served."""
    wants = "the strategy single wants instances of one profile on all GPUs, and"
    choose = "choose mixed, or another layout"

    conversion = converted(LAYOUT, mixed("single"), mig_config="2x2g.10gb-3x1g.5gb")
    [why] = {assignment.reason for assignment in layout_of(conversion, *MIG_FOUR).pool_assignments}
    reason = f"{wants} these have 1g.5gb, 2g.10gb; {choose}"
    assert why == f"all GPUs, but no shares: {reason}"
    assert offered(conversion, *MIG_FOUR) == {}
    assert [str(note) for note in conversion.notes] == [
        'f.yaml: 16: mig-configs["2x2g.10gb-3x1g.5gb"][0]: its GPUs are not offered: ' + reason
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
    layout = layout_of(conversion, *MIG_FOUR)

    assert len(layout.shares) == count
    assert wrong in layout.pool_assignments[0].reason
    assert {share.resource for share in layout.shares} <= {"nvidia.com/gpu"}


def test_without_any_instance_single_is_as_none() -> None:
    """Without MIG on any GPU, whole GPUs are offered under every strategy."""
    for strategy in ("none", "single", "mixed"):
        conversion = converted(LAYOUT, mixed(strategy), mig_config="disabled")

        assert offered(conversion, *FOUR) == {"nvidia.com/gpu": 4}
        assert conversion.notes == ()


def test_gpus_that_single_leaves_out_have_a_note() -> None:
    """Under single, GPUs without an entry would have the instances' name, so have no shares."""
    text = SEVEN.replace("devices: all", "devices: [0]")

    assert len(pools(text, mixed("single"))) == 1
    assert notes(text, mixed("single")) == [
        (
            'f.yaml: 4: mig-configs["7x1g.5gb"][0]: GPUs that this layout does not name are '
            "not offered under single"
        )
    ]

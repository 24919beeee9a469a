"""MIG instances by the names of NVIDIA's device plugin, and which are shared."""

from tests.compat.nvidia_texts import LAYOUT, MIG_FOUR, SEVEN, mixed, slices
from tests.compat.rig import converted, notes, offered, pools, refusal


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

"""MIG instances by the names of NVIDIA's device plugin, and their sharing."""

from tests.compat.nvidia_texts import LAYOUT, MIG_FOUR, SEVEN, slices
from tests.compat.rig import converted, notes, offered, pools


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


def test_unsupported_sharing_of_instances_has_notes() -> None:
    """A second entry for one name, and instances without a layout, have notes."""
    name = "nvidia.com/mig-1g.5gb"
    twice = slices(f"    - {{name: {name}, replicas: 2}}\n").replace("nvidia.com/gpu", name)

    assert notes(twice, SEVEN) == [
        (
            "f.yaml: 7: sharing.timeSlicing.resources[1]: has no effect: the entry before it takes "
            "all of them"
        )
    ]
    several = slices(way="mps").replace("nvidia.com/gpu", name)
    assert notes(several) == [
        (
            "f.yaml: 5: sharing.mps.resources[0]: has no effect here; it would have shared MIG "
            "instances"
        )
    ]

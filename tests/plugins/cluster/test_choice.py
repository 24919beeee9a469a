"""Which profile and which layout the node's labels choose."""

import pytest

from metagpu.core.profiles import Instruction
from metagpu.plugins.cluster.choice import instruction

OURS = "metagpu.io/config"
PLUGIN = "nvidia.com/device-plugin.config"
MIG = "nvidia.com/mig.config"
HELD = {"data": {"a": "1", "all-balanced": "2"}}


@pytest.mark.parametrize(
    ("labels", "profile", "label", "mig"),
    [
        ({}, None, "", None),
        ({OURS: "a"}, "a", OURS, None),
        ({PLUGIN: "b"}, "b", PLUGIN, None),
        ({OURS: "a", PLUGIN: "b", MIG: "m"}, "a", OURS, "m"),
        ({OURS: ""}, None, "", None),
        ({MIG: "all-balanced"}, "all-balanced", MIG, "all-balanced"),
        ({MIG: "elsewhere"}, None, "", "elsewhere"),
        ({MIG: "all-balanced", OURS: "a"}, "a", OURS, "all-balanced"),
    ],
)
def test_labels_choose(
    labels: dict[str, str], profile: str | None, label: str, mig: str | None
) -> None:
    """Our label comes before NVIDIA's; mig-manager's names a layout, or a profile of its name."""
    data = HELD["data"]
    assert instruction(labels, HELD, "here") == Instruction(profile, label, mig, "here", data)


def test_config_map_may_be_missing_or_empty() -> None:
    """One that is not used says nothing of profiles; one without data has none."""
    assert instruction({}).profiles is None
    assert instruction({}, {}, "here").profiles == {}

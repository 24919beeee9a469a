"""The profile and the layout that the node's labels choose."""

import pytest

from metagpu.core.config.profiles import ClusterChoice
from metagpu.plugins.cluster.profile_choice import read_choice

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
    assert read_choice(labels, HELD, "here") == ClusterChoice(profile, label, mig, "here", data)


def test_config_map_may_be_missing_or_empty() -> None:
    """Without a ConfigMap profiles are unknown; one without data has none."""
    assert read_choice({}).profiles is None
    assert read_choice({}, {}, "here").profiles == {}

"""The strategy `single` of NVIDIA's device plugin."""

import pytest

from tests.compat.nvidia_texts import FOUR, LAYOUT, MIG_FOUR, SEVEN, mixed
from tests.compat.rig import converted, layout_of, notes, offered, pools


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
    [why] = {it.reason for it in layout_of(conversion, *MIG_FOUR).pool_assignments}
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

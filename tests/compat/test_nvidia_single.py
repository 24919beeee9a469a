"""The strategy `single` of NVIDIA's device plugin."""

import pytest

from tests.compat.nvidia_texts import FOUR, LAYOUT, MIG_FOUR, SEVEN, mixed
from tests.compat.rig import converted, laid, notes, offered, pools


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


def test_single_takes_the_name_for_instances() -> None:
    """Under single, `resources.mig` names all instances, and its first entry counts."""
    plugin = mixed("single") + "resources: {mig: [{pattern: '*', name: slice}]}\n"

    assert pools(plugin, SEVEN)[0]["backends"][0]["resource"] == "nvidia.com/slice"
    assert notes(plugin, SEVEN) == []


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

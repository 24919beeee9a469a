"""The effects of a change of configuration, as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.layout.diff import ChangeKind, ConfiguredLayout, LayoutDiff, diff_layouts
from metagpu.core.layout.layout import Layout
from metagpu.core.model.shares import ResourceName
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpusFound, SharesClaimed
from tests.rigs.build import METAGPU, after, config, gpu, layout_of

FOUR = [gpu(n) for n in range(4)]
HEAD = "version: metagpu/v1\npools:\n"
FRACTIONS = (
    "  - {name: parts, gpus: {index: 0-1}, backends: [{backend: fraction, sharesPerGpu: 10}]}\n"
)
SLICES = "  - {name: slices, gpus: {index: 2-3}, backends: [{backend: timeslice, replicas: 4}]}\n"
WHOLE = "  - {name: slices, gpus: {index: 2-3}, backends: [{backend: whole}]}\n"


def state(*pools: str) -> ConfiguredLayout:
    """Apply some pools to four GPUs."""
    text = HEAD + "".join(pools)
    return ConfiguredLayout(layout_of(*FOUR, text=text), config(text))


def planned(
    before: ConfiguredLayout, then: ConfiguredLayout, snapshot: Snapshot | None = None
) -> LayoutDiff:
    """Compare two states over four GPUs, idle ones by default."""
    return diff_layouts(snapshot or after(GpusFound(tuple(FOUR), at=0)), before, then)


def resources(plan: LayoutDiff) -> dict[ResourceName, ChangeKind]:
    """Return the change of each resource."""
    return {each.resource: each.change for each in plan.resources}


def gpus(plan: LayoutDiff) -> list[ChangeKind]:
    """Return the change of each GPU."""
    return [each.change for each in plan.gpus]


def test_the_same_is_untouched() -> None:
    """A configuration against itself changes nothing."""
    plan = planned(state(FRACTIONS, SLICES), state(FRACTIONS, SLICES))

    assert set(resources(plan).values()) == {ChangeKind.UNCHANGED}
    assert gpus(plan) == [ChangeKind.UNCHANGED] * 4
    assert plan.settings == ()


def test_another_api_changes_the_resource() -> None:
    """The same shares by claims are another offer: the kubelet's list ends."""
    by_claims = FRACTIONS.replace("{name: parts,", "{name: parts, api: dra,")
    plan = planned(state(FRACTIONS), state(by_claims))

    assert resources(plan) == {METAGPU: ChangeKind.CHANGED}


def test_only_differences_are_named() -> None:
    """Other shares of one pool add and remove its resources, and leave the other pool."""
    plan = planned(state(FRACTIONS, SLICES), state(FRACTIONS, WHOLE))

    assert [(each.resource, each.change) for each in plan.resources] == [
        (METAGPU, ChangeKind.UNCHANGED),
        ("nvidia.com/gpu.shared", ChangeKind.REMOVED),
        ("nvidia.com/gpu", ChangeKind.ADDED),
    ]
    assert [each.shares for each in plan.resources] == [(20, 20), (8, 0), (0, 2)]
    assert gpus(plan) == [
        ChangeKind.UNCHANGED,
        ChangeKind.UNCHANGED,
        ChangeKind.CHANGED,
        ChangeKind.CHANGED,
    ]
    assert plan.gpus[2].backends == (("timeslice",), ("whole",))


def test_other_numbers_are_a_new_list() -> None:
    """More shares of the same name change the resource and its GPUs."""
    plan = planned(state(FRACTIONS), state(FRACTIONS.replace("10", "20")))

    assert plan.resources[0].change is ChangeKind.CHANGED
    assert plan.resources[0].shares == (20, 40)
    assert gpus(plan)[:2] == [ChangeKind.CHANGED] * 2


def test_other_settings_are_no_new_list() -> None:
    """An option of requests alone changes settings and no list."""
    plan = planned(state(FRACTIONS), state(FRACTIONS.replace("10}", "10, placement: spread}")))

    assert resources(plan) == {METAGPU: ChangeKind.OPTIONS}
    assert gpus(plan) == [
        ChangeKind.OPTIONS,
        ChangeKind.OPTIONS,
        ChangeKind.UNCHANGED,
        ChangeKind.UNCHANGED,
    ]


@pytest.mark.parametrize("setting", ["offer: all", "memoryEnforcement: {policy: off}"])
def test_each_setting_of_a_pool_is_compared(setting: str) -> None:
    """A pool with another setting is another offer of its GPUs, whatever the setting is."""
    changed = FRACTIONS.replace("{name: parts,", f"{{name: parts, {setting},")
    plan = planned(state(FRACTIONS), state(changed))

    assert set(gpus(plan)) == {ChangeKind.OPTIONS, ChangeKind.UNCHANGED}


def test_other_memory_enforcement_changes_the_gpus_alone() -> None:
    """A pool's memory enforcement changes its GPUs and no list."""
    plan = planned(
        state(FRACTIONS),
        state(FRACTIONS.replace("name: parts", "name: parts, memoryEnforcement: {policy: kill}")),
    )

    assert resources(plan) == {METAGPU: ChangeKind.UNCHANGED}
    assert gpus(plan) == [
        ChangeKind.OPTIONS,
        ChangeKind.OPTIONS,
        ChangeKind.UNCHANGED,
        ChangeKind.UNCHANGED,
    ]


def test_gpus_that_come_into_a_pool_and_leave_it() -> None:
    """A GPU that enters a first pool is added; a GPU that leaves its pool is removed."""
    plan = planned(state(FRACTIONS), state(FRACTIONS.replace("0-1", "1-2")))

    assert gpus(plan) == [
        ChangeKind.REMOVED,
        ChangeKind.UNCHANGED,
        ChangeKind.ADDED,
        ChangeKind.UNCHANGED,
    ]
    assert resources(plan) == {METAGPU: ChangeKind.CHANGED}


def test_from_nothing_all_is_added() -> None:
    """In a first configuration everything is added."""
    plan = planned(ConfiguredLayout(Layout((), {}, ())), state(FRACTIONS))

    assert resources(plan) == {METAGPU: ChangeKind.ADDED}
    assert gpus(plan)[:2] == [ChangeKind.ADDED] * 2


@pytest.mark.parametrize(
    ("then", "waits"),
    [
        (FRACTIONS, [0, 0]),
        (FRACTIONS.replace("10}", "10, placement: spread}"), [0, 0]),
        (FRACTIONS.replace("10", "20"), [2, 0]),
        (FRACTIONS.replace("parts", "renamed"), [0, 0]),
        (FRACTIONS.replace("fraction,", "fraction, resource: a.b/c,"), [2, 0]),
    ],
)
def test_a_gpu_waits_for_its_leases(then: str, waits: list[int]) -> None:
    """A GPU with new shares waits for the leases on its present shares, and for no others."""
    before = state(FRACTIONS)
    snapshot = after(
        GpusFound(tuple(FOUR), at=0),
        before.layout.offer_fact,
        SharesClaimed(before.layout.shares[:2], at=1),
    )
    plan = planned(before, state(then), snapshot)

    assert [len(each.waits_for) for each in plan.gpus[:2]] == waits


def test_settings_of_the_file_are_named_by_their_keys() -> None:
    """Changed settings of the whole file are named."""
    text = HEAD + FRACTIONS
    then = ConfiguredLayout(
        layout_of(*FOUR, text=text),
        config("passDeviceSpecs: false\nhealth: {quietPeriod: 1s}\n" + text),
    )

    assert planned(state(FRACTIONS), then).settings == ("health", "passDeviceSpecs")


_pools = st.lists(
    st.sampled_from([FRACTIONS, FRACTIONS.replace("10", "3"), SLICES, WHOLE]),
    min_size=1,
    max_size=3,
    unique=True,
).map(
    lambda pools: [pool.replace("name: ", f"name: {number}-") for number, pool in enumerate(pools)]
)


@given(_pools, _pools)
def test_a_plan_is_what_applying_does(one: list[str], other: list[str]) -> None:
    """Untouched resources keep the very offer that they have; all others get another."""
    before, then = state(*one), state(*other)
    old = after(GpusFound(tuple(FOUR), at=0), before.layout.offer_fact)
    new = after(then.layout.offer_fact, since=old)

    for name, change in resources(planned(before, then, old)).items():
        same = name in old.offers and old.offers.get(name) is new.offers.get(name)
        assert same == (change in (ChangeKind.UNCHANGED, ChangeKind.OPTIONS))
        assert (name in new.offers) == (change is not ChangeKind.REMOVED)

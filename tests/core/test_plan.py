"""What a change of configuration would do, as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.facts import GpusFound, SharesGranted
from metagpu.core.layout import Layout
from metagpu.core.model import ResourceName
from metagpu.core.plan import Change, Plan, State, compare
from metagpu.core.snapshot import Snapshot
from tests.build import METAGPU, after, config, gpu, laid_out

FOUR = [gpu(n) for n in range(4)]
HEAD = "version: metagpu/v1\npools:\n"
FRACTIONS = (
    "  - {name: parts, gpus: {index: 0-1}, backends: [{backend: fraction, sharesPerGpu: 10}]}\n"
)
SLICES = "  - {name: slices, gpus: {index: 2-3}, backends: [{backend: timeslice, replicas: 4}]}\n"
WHOLE = "  - {name: slices, gpus: {index: 2-3}, backends: [{backend: whole}]}\n"


def state(*pools: str) -> State:
    """Lay some pools over four GPUs."""
    text = HEAD + "".join(pools)
    return State(laid_out(*FOUR, text=text), config(text))


def planned(before: State, then: State, snapshot: Snapshot | None = None) -> Plan:
    """Compare two states over four GPUs, idle ones by default."""
    return compare(snapshot or after(GpusFound(tuple(FOUR), at=0)), before, then)


def resources(plan: Plan) -> dict[ResourceName, Change]:
    """Give what happens to each resource."""
    return {each.resource: each.change for each in plan.resources}


def gpus(plan: Plan) -> list[Change]:
    """Give what happens to each GPU."""
    return [each.change for each in plan.gpus]


def test_the_same_is_untouched() -> None:
    """A configuration against itself changes nothing."""
    plan = planned(state(FRACTIONS, SLICES), state(FRACTIONS, SLICES))

    assert set(resources(plan).values()) == {Change.UNTOUCHED}
    assert gpus(plan) == [Change.UNTOUCHED] * 4
    assert plan.settings == ()


def test_only_what_differs_is_named() -> None:
    """Another way of cutting one pool adds and removes its resources, and leaves the other."""
    plan = planned(state(FRACTIONS, SLICES), state(FRACTIONS, WHOLE))

    assert [(each.resource, each.change) for each in plan.resources] == [
        (METAGPU, Change.UNTOUCHED),
        ("nvidia.com/gpu.shared", Change.REMOVED),
        ("nvidia.com/gpu", Change.ADDED),
    ]
    assert [each.shares for each in plan.resources] == [(20, 20), (8, 0), (0, 2)]
    assert gpus(plan) == [Change.UNTOUCHED, Change.UNTOUCHED, Change.CHANGED, Change.CHANGED]
    assert plan.gpus[2].backends == (("timeslice",), ("whole",))


def test_other_numbers_are_a_new_list() -> None:
    """More shares of the same name change the resource and its GPUs."""
    plan = planned(state(FRACTIONS), state(FRACTIONS.replace("10", "20")))

    assert plan.resources[0].change is Change.CHANGED
    assert plan.resources[0].shares == (20, 40)
    assert gpus(plan)[:2] == [Change.CHANGED] * 2


def test_other_terms_are_no_new_list() -> None:
    """An option that concerns requests alone changes terms and no list."""
    plan = planned(state(FRACTIONS), state(FRACTIONS.replace("10}", "10, placement: spread}")))

    assert resources(plan) == {METAGPU: Change.TERMS}
    assert gpus(plan) == [Change.TERMS, Change.TERMS, Change.UNTOUCHED, Change.UNTOUCHED]


def test_other_rules_for_memory_are_other_terms_of_the_gpus() -> None:
    """What a pool says about memory touches its GPUs and no list."""
    plan = planned(
        state(FRACTIONS),
        state(FRACTIONS.replace("name: parts", "name: parts, memoryEnforcement: {policy: kill}")),
    )

    assert resources(plan) == {METAGPU: Change.UNTOUCHED}
    assert gpus(plan) == [Change.TERMS, Change.TERMS, Change.UNTOUCHED, Change.UNTOUCHED]


def test_gpus_that_come_into_a_pool_and_leave_it() -> None:
    """A GPU that no pool had is added, one that no pool has is removed."""
    plan = planned(state(FRACTIONS), state(FRACTIONS.replace("0-1", "1-2")))

    assert gpus(plan) == [Change.REMOVED, Change.UNTOUCHED, Change.ADDED, Change.UNTOUCHED]
    assert resources(plan) == {METAGPU: Change.CHANGED}


def test_from_nothing_all_is_added() -> None:
    """Where nothing runs everything is new."""
    plan = planned(State(Layout((), {}, ())), state(FRACTIONS))

    assert resources(plan) == {METAGPU: Change.ADDED}
    assert gpus(plan)[:2] == [Change.ADDED] * 2


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
def test_a_gpu_waits_for_who_holds_it(then: str, waits: list[int]) -> None:
    """A GPU that is cut anew waits for the leases on its present shares, and for no others."""
    before = state(FRACTIONS)
    snapshot = after(
        GpusFound(tuple(FOUR), at=0),
        before.layout.offered,
        SharesGranted(before.layout.shares[:2], at=1),
    )
    plan = planned(before, state(then), snapshot)

    assert [len(each.waits_for) for each in plan.gpus[:2]] == waits


def test_settings_of_the_file_are_named_by_their_keys() -> None:
    """What the file as a whole says differently is named."""
    text = HEAD + FRACTIONS
    then = State(
        laid_out(*FOUR, text=text),
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
def test_a_plan_is_what_taking_it_does(one: list[str], other: list[str]) -> None:
    """Untouched resources keep the very offer that they have; all others get another."""
    before, then = state(*one), state(*other)
    old = after(GpusFound(tuple(FOUR), at=0), before.layout.offered)
    new = after(then.layout.offered, since=old)

    for name, change in resources(planned(before, then, old)).items():
        same = name in old.offers and old.offers.get(name) is new.offers.get(name)
        assert same == (change in (Change.UNTOUCHED, Change.TERMS))
        assert (name in new.offers) == (change is not Change.REMOVED)

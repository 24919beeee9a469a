"""The table of reasons: each row, their order, and all who ask it."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.availability.conflict import conflicts
from metagpu.core.availability.exact import free_part
from metagpu.core.availability.reasons import (
    REASONS,
    Listing,
    Reason,
    availability_of,
    count_free,
    open_to,
    reason_for_none,
    refuse,
)
from metagpu.core.model.offers import Api
from metagpu.core.model.request_errors import GpuUnhealthy, InstanceUnhealthy, RequestError
from metagpu.core.model.shares import (
    CordonSource,
    HardwareDevice,
    Holder,
    Lease,
    OfferTurn,
    Pause,
    ProvisionedState,
    ResourceClaimRef,
    ResourceName,
    Share,
    ShareId,
    Verdict,
)
from metagpu.core.model.snapshot import (
    Cleanup,
    GpuState,
    HiddenShares,
    KubeletWord,
    Offer,
    Snapshot,
)
from metagpu.plugins.cluster.node_object import healthy_shares_of
from metagpu.plugins.kubelet.device_plugin import DeviceList
from metagpu.plugins.kubelet.pb import v1beta1
from tests.rigs.build import gpu, share

A: Final = gpu(0)
FRACTIONS: Final = tuple(share(A, number, backend="fraction") for number in range(3))
WHOLE: Final = share(A, 0, backend="whole", resource="a.b/gpu", slots=["w"])
PLACES: Final = (
    share(A, 0, backend="mig", resource="a.b/mig", slots=["s0", "s1"]),
    share(A, 1, backend="mig", resource="a.b/mig", slots=["s0"]),
    share(A, 2, backend="mig", resource="a.b/mig", slots=["s1"]),
)
SHARES: Final = (*FRACTIONS, WHOLE, *PLACES)
BY_ID: Final = {other.id: other for other in SHARES}
BACKENDS: Final = ("fraction", "whole", "mig")
HOLDER: Final = Holder("ns", "pod", "main")
CLAIM: Final = ResourceClaimRef("ns", "claim", "uid")
OLD: Final = share(A, 9, backend="fraction", resource="a.b/old")
HEALTHY: Final = Verdict(healthy=True, since=1)
FAULTY: Final = Verdict(healthy=False, since=2, reason="XID 79")
PAUSE: Final = Pause("fan", since=3)


def state(*shares: Share, **fields: Any) -> GpuState:  # noqa: ANN401 - any field of a state
    """Return a healthy GPU with these shares, all by default, and these fields."""
    return GpuState(A, fields.pop("verdict", HEALTHY), shares or SHARES, **fields)


def leased(*shares: Share, **fields: Any) -> Mapping[ShareId, Lease]:  # noqa: ANN401
    """Return leases of shares."""
    return MappingProxyType({other.id: Lease(other, 5, **fields) for other in shares})


def mig(**fields: Any) -> Mapping[str, ProvisionedState]:  # noqa: ANN401
    """Return what the backend mig has created."""
    return {"mig": ProvisionedState(**fields)}


ROWS: Final[Mapping[str, tuple[GpuState, set[Share]]]] = {
    "unhealthy": (state(verdict=FAULTY), set(SHARES)),
    "cordoned": (state(cordons={CordonSource.OPERATOR: PAUSE}), set(SHARES)),
    "suspended": (state(suspended={"mig": PAUSE}), set(PLACES)),
    "unconfirmed-lease": (state(leases=leased(FRACTIONS[0], unconfirmed=True)), {FRACTIONS[0]}),
    "resource-claim": (state(leases=leased(WHOLE, resource_claim=CLAIM)), {WHOLE}),
    "orphaned-lease": (state(leases=leased(OLD), can_conflict=True), set(SHARES)),
    "occupied": (
        state(*PLACES, provisioned=mig(blocked={"s0": "instance 3 is there"})),
        {PLACES[0], PLACES[1]},
    ),
    "staggered": (state(*PLACES, provisioned=mig(delayed={PLACES[2].id})), {PLACES[2]}),
    "in-use": (
        state(leases=leased(*FRACTIONS), can_conflict=True),
        {WHOLE, *PLACES},
    ),
    "cleanup": (state(cleanup=Cleanup(since={"whole": 7})), {*FRACTIONS, *PLACES}),
    "out-of-turn": (state(turn=OfferTurn("mig", 1)), {*FRACTIONS, WHOLE}),
    "turn-ends": (state(*PLACES, turn=OfferTurn("mig", 1, withdrawn=True)), set(PLACES)),
    "held-back": (
        state(hidden=HiddenShares({FRACTIONS[0].resource: frozenset([FRACTIONS[0].id])})),
        {FRACTIONS[0]},
    ),
    "pod-ending": (
        state(leases=leased(WHOLE), hidden=HiddenShares(ending=frozenset([WHOLE.id]))),
        {WHOLE},
    ),
}
"""For each row a state with that reason alone, and the shares that it is about."""


def test_the_table_is_short_and_each_row_has_its_state() -> None:
    """A reason is one row; nobody has to know more than 14 of them."""
    assert [row.name for row in REASONS] == list(ROWS)
    assert len(REASONS) <= 14


@pytest.mark.parametrize("row", REASONS, ids=lambda row: row.name)
def test_each_row_is_about_its_shares(row: Reason) -> None:
    """A state with one reason names that row for its shares, and has the row's effects."""
    now, expected = ROWS[row.name]
    available = availability_of(now)
    ids = frozenset(candidate.id for candidate in expected)

    assert [(reason.name, shares) for reason, shares in available.found] == [(row.name, ids)]
    assert {
        candidate for candidate in now.shares if available.reason(candidate.id) is row
    } == expected
    assert available.unlisted == (set() if row.listed is Listing.YES else ids)
    assert available.uncounted == (set() if row.counted else ids)
    assert available.refused == (ids if row.refusal else set())
    for other in expected:
        refusal = available.refusal(other)
        assert (refusal is None) == (row.refusal is None)
        assert refusal is None or len(str(refusal)) > len(other.id)


@pytest.mark.parametrize(
    ("lease", "kept"),
    [
        ({}, False),
        ({"holder": HOLDER}, True),
        ({"resource_claim": CLAIM}, True),
    ],
    ids=["nobody", "a container", "a claim"],
)
def test_a_share_whose_slot_is_occupied_stays_listed_for_its_holder(
    lease: Mapping[str, Any], *, kept: bool
) -> None:
    """A lease that no container is known for keeps no share listed that nobody can have."""
    blocked = mig(blocked={"s1": "instance 3 is there"})
    now = state(*PLACES, leases=leased(PLACES[2], **lease), provisioned=blocked)
    reason = availability_of(now).reason(PLACES[2].id)
    assert (reason is None or reason.name != "occupied") is kept


@pytest.mark.parametrize("healthy", [True, False])
def test_a_faulty_device_is_its_own_shares_alone(*, healthy: bool) -> None:
    """A refusal names the MIG device, and the GPU where all of it is out of service."""
    made = mig(devices={PLACES[0].id: HardwareDevice("MIG-0", 1, 0, idle=True)})
    verdict = HEALTHY if healthy else FAULTY
    now = state(*PLACES, verdict=verdict, provisioned=made, mig_faults={"MIG-0": FAULTY})

    assert availability_of(now).unlisted == {each.id for each in PLACES[: 1 if healthy else 3]}
    refusal = availability_of(now).refusal(PLACES[0])
    assert type(refusal) is (InstanceUnhealthy if healthy else GpuUnhealthy)


@pytest.mark.parametrize(("idle", "held"), [(True, False), (False, False), (False, True)])
def test_a_device_that_is_not_idle_keeps_its_slots(*, idle: bool, held: bool) -> None:
    """The slots of a device are occupied until it is idle, or leased again."""
    made = mig(devices={PLACES[1].id: HardwareDevice("MIG-0", 1, 0, idle=idle)})
    leases = leased(*PLACES[1:2] if held else (), holder=HOLDER)
    reason = availability_of(state(*PLACES, provisioned=made, leases=leases)).reason(PLACES[0].id)

    assert (reason.name if reason else "") == ("in-use" if held else "" if idle else "occupied")


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (CordonSource.OPERATOR, "`metagpu uncordon 0` on this node"),
        (CordonSource.NODE, "`kubectl metagpu uncordon NODE/0`"),
        (CordonSource.DRIVER_UPGRADE, "shares are given again after that"),
    ],
)
def test_a_cordon_names_what_ends_it(source: CordonSource, end: str) -> None:
    """The owner of a pod reads who has to act."""
    refusal = str(availability_of(state(cordons={source: PAUSE})).refusal(WHOLE))
    assert "(fan); " in refusal
    assert end in refusal


@pytest.mark.parametrize(
    ("holder", "told"),
    [(None, "an earlier pod may still run with it"), (HOLDER, f"{HOLDER} still runs with it")],
)
def test_a_share_that_the_kubelet_forgot_names_its_pod(holder: Holder | None, told: str) -> None:
    """The owner of a pod reads whose end frees the share, where that is known."""
    now = state(leases=leased(WHOLE, unconfirmed=True, holder=holder))
    assert told in str(availability_of(now).refusal(WHOLE))


@pytest.mark.parametrize(
    ("fields", "is_open"),
    [
        ({}, True),
        ({"verdict": FAULTY}, False),
        ({"cordons": {CordonSource.NODE: PAUSE}}, False),
        ({"suspended": {"mig": PAUSE}}, False),
        ({"suspended": {"whole": PAUSE}}, True),
        ({"leases": leased(WHOLE)}, False),
        ({"leases": leased(PLACES[0])}, True),
    ],
)
def test_a_gpu_is_open_to_a_backend(fields: dict[str, Any], *, is_open: bool) -> None:
    """A backend may grant shares of a GPU that is in service and that no other backend has."""
    assert open_to(state(**fields), "mig") == is_open


def test_a_state_that_is_replaced_is_freed_at_once() -> None:
    """The collector, which seldom looks at all objects, is not needed."""
    gc.disable()
    try:
        now = state(leases=leased(WHOLE))
        available = weakref.ref(availability_of(now))
        assert available() is availability_of(now)
        del now
        assert available() is None
    finally:
        gc.enable()


def test_the_first_of_several_reasons_is_shown() -> None:
    """The order of the table decides, not the order of events."""
    both = state(verdict=FAULTY, cordons={CordonSource.NODE: PAUSE}, suspended={"mig": PAUSE})
    cordoned = replace(both, verdict=HEALTHY)

    for now, name in ((both, "unhealthy"), (cordoned, "cordoned")):
        row = availability_of(now).reason(PLACES[0].id)
        assert row is not None
        assert row.name == name
    assert "XID 79" in str(availability_of(both).refusal(PLACES[0]))
    assert "fan" in str(availability_of(cordoned).refusal(PLACES[0]))


@pytest.mark.parametrize("row", REASONS, ids=lambda row: row.name)
def test_an_amount_of_nothing_has_a_reason(row: Reason) -> None:
    """Reports name the row of a Node without free shares; held shares have a holder."""
    now, expected = ROWS[row.name]
    ids = frozenset(other.id for other in expected)
    on_node = row.counted or ids <= now.leases.keys()

    assert reason_for_none(now, ids) == (None if on_node else row.name)
    assert reason_for_none(now, ids | _ids(FRACTIONS[0].resource)) in (None, row.name)
    assert reason_for_none(state(), ids) is None


def test_shares_that_init_containers_alone_hold_are_in_use() -> None:
    """An amount of nothing has a reason where no lease says who holds the shares."""
    ids = _ids(FRACTIONS[0].resource)
    held = dict.fromkeys(ids, frozenset({("uid", "init")}))

    assert reason_for_none(state(allocated=held), ids) == "in-use"
    assert reason_for_none(state(allocated=held, leases=leased(*FRACTIONS)), ids) is None
    del held[FRACTIONS[0].id]
    assert reason_for_none(state(allocated=held), ids) is None


def test_rows_that_are_found_together_have_equal_effects() -> None:
    """A finder of the shares of several rows at once stands for each of them."""
    for row in REASONS:
        for other in REASONS:
            if row.together is not None and row.together is other.together:
                assert _effects(row) == _effects(other)
                assert row.evidence == other.evidence


def _effects(row: Reason) -> tuple[Listing, bool, bool, bool, str]:
    return row.listed, row.counted, row.free, row.refusal is None, row.taint


# --- all who ask, beside an account of its own ----------------------------------------------------


@st.composite
def states(draw: st.DrawFn) -> GpuState:
    """Create states in which anything may be so at once, also what never is."""

    def some(values: Sequence[Any]) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), max_size=2, unique=True))

    held = {value.id: Lease(value, 5, unconfirmed=draw(st.booleans())) for value in some(SHARES)}
    held |= {value.id: Lease(value, 5, resource_claim=CLAIM) for value in some(SHARES)}
    if draw(st.booleans()) and draw(st.booleans()):
        held[OLD.id] = Lease(OLD, 5)
    kinds = st.builds(
        HardwareDevice,
        st.sampled_from(["MIG-1", "MIG-2"]),
        st.just(1),
        st.just(0),
        idle=st.booleans(),
        reusable=st.booleans(),
    )
    made = ProvisionedState(
        devices={value.id: draw(kinds) for value in some(PLACES)},
        blocked=dict.fromkeys(some(["s0", "s1"]), "an instance is there"),
        paused={value.id: "its daemon fails" for value in some(PLACES)},
        exclusive=draw(st.booleans()),
        delayed=frozenset(value.id for value in some(PLACES)),
    )
    turn = st.builds(OfferTurn, st.sampled_from(BACKENDS), st.just(1.0), st.booleans())
    back = {value.resource: _ids(value.resource) for value in some(SHARES)}
    return state(
        verdict=draw(st.sampled_from([HEALTHY, HEALTHY, HEALTHY, FAULTY])),
        api=draw(st.sampled_from(Api)),
        leases=MappingProxyType(held),
        allocated=frozenset(value.id for value in some(SHARES)),
        can_conflict=True,
        hidden=draw(st.sampled_from([None, HiddenShares(back, frozenset(list(held)[:1]))])),
        suspended=dict.fromkeys(some(BACKENDS), PAUSE),
        cordons=dict.fromkeys(some([CordonSource.OPERATOR])[: draw(st.integers(0, 1))], PAUSE),
        cleanup=Cleanup(since=dict.fromkeys(some(BACKENDS)[:1], 7)),
        provisioned=draw(st.sampled_from([{}, {"mig": made}])),
        turn=draw(st.none() | turn),
        mig_faults=dict.fromkeys(some(["MIG-1"]), FAULTY),
    )


def _ids(resource: ResourceName) -> frozenset[ShareId]:
    return frozenset(other.id for other in SHARES if other.resource == resource)


def _node(now: GpuState) -> Snapshot:
    offers = {}
    for resource in dict.fromkeys(other.resource for other in SHARES):
        own = {other.id: other for other in SHARES if other.resource == resource}
        by_gpu = {A.id: tuple(own.values())}
        offers[resource] = Offer(resource, by_gpu, own, {A.id: frozenset(own)}, api=now.api)
    return Snapshot(MappingProxyType({A.id: now}), offers=offers)


def _conflicts(now: GpuState, own_share: Share) -> bool:
    """Return whether a share conflicts with anything: the rule, told share by share."""
    if (lease := now.leases.get(own_share.id)) is not None:
        slots = {slot for made in now.provisioned.values() for slot in made.blocked}
        stale = lease.resource_claim is None and bool(own_share.footprint & slots)
        return stale and OLD.id not in now.leases
    if OLD.id in now.leases:  # nobody knows what is free beside it
        return True
    held = [lease.share for lease in now.leases.values()]
    others = [backend for backend, made in now.provisioned.items() if made.exclusive]
    if any(conflicts(own_share, other) for other in held) or {*now.cleanup.since, *others} - {
        own_share.backend
    }:
        return True
    for made in now.provisioned.values():
        if own_share.id in made.delayed or own_share.footprint & made.blocked.keys():
            return True
        left = {BY_ID[i]: device for i, device in made.devices.items() if i not in now.leases}
        own = left.get(own_share)
        for other, device in left.items():
            again = device.reusable and own is not None and own.reusable and not own.idle
            if not device.idle and own_share.footprint & other.footprint and not again:
                return True
    return False


def _refused(now: GpuState, own_share: Share) -> bool:
    """Return whether Allocate refuses a share."""
    made = now.provisioned.get("mig", ProvisionedState())
    device, lease = made.devices.get(own_share.id), now.leases.get(own_share.id)
    by_claim = lease is not None and lease.resource_claim is not None
    return (
        not now.verdict.healthy
        or (device is not None and device.device in now.mig_faults)
        or bool(now.cordons)
        or own_share.backend in now.suspended
        or own_share.id in made.paused
        or (lease is not None and lease.unconfirmed)
        or (by_claim and now.api is Api.DEVICE_PLUGIN)
        or _conflicts(now, own_share)
    )


def _others_turn(now: GpuState, own_share: Share) -> bool:
    """Return whether another backend offers the idle GPU."""
    idle = not now.leases and not now.cleanup.since
    turn = now.turn if idle else None
    return (
        turn is not None and turn.backend != own_share.backend and own_share.id not in now.allocated
    )


def _listed(now: GpuState, own_share: Share) -> bool:
    """Return whether the kubelet sees a share as Healthy."""
    taken = own_share.id in now.leases or own_share.id in now.allocated
    lease = now.leases.get(own_share.id)
    hidden = now.hidden or HiddenShares()
    if own_share.id in hidden.ending or (own_share.resource in hidden.held_back and not taken):
        return False
    if lease is not None:  # its pod keeps it, whatever keeps others away
        leases = {**now.leases, own_share.id: replace(lease, unconfirmed=False)}
        kept = replace(now, cordons={}, leases=MappingProxyType(leases))
        return not _refused(kept, own_share) and not _others_turn(now, own_share)
    return not _refused(now, own_share) and not _others_turn(now, own_share)


def _counted(now: GpuState, own_share: Share) -> bool:
    """Return whether the Node's amount has a share: not in the last moments of a turn."""
    ends = now.turn is not None and now.turn.withdrawn and now.turn.backend == own_share.backend
    idle = not now.leases and not now.cleanup.since
    return _listed(now, own_share) and not (ends and idle)


def _free(now: GpuState, own_share: Share) -> bool:
    """Return whether reports count a share as free."""
    taken = own_share.id in now.leases or own_share.id in now.allocated
    return not taken and not _refused(now, own_share) and not _others_turn(now, own_share)


@given(states())
def test_all_who_ask_agree_with_an_independent_rule(now: GpuState) -> None:
    """Lists, Node amounts, reports and Allocate say the same of each share in any state."""
    node = _node(now)
    amounts = healthy_shares_of(node)
    for resource, offer in node.offers.items():
        shares = [BY_ID[i] for i in offer.shares]
        assert count_free(now, resource) == sum(_free(now, candidate) for candidate in shares)
        assert free_part(now, offer).free == count_free(now, resource)
        if now.api is Api.DEVICE_PLUGIN:
            devices = DeviceList(resource)
            listed = v1beta1.ListAndWatchResponse().parse(devices.encode(devices.view(node)))
            healthy = {device.id for device in listed.devices if device.health == "Healthy"}
            assert healthy == {candidate.id for candidate in shares if _listed(now, candidate)}
            assert amounts[resource] == sum(_counted(now, candidate) for candidate in shares)
        for other in shares:
            if not _refused(now, other):
                refuse([other], node)
                continue
            with pytest.raises(RequestError):
                refuse([other], node)
            row = availability_of(now).reason(other.id)
            assert row is not None
            assert row.refusal is not None


@given(states())
def test_no_row_is_about_shares_without_its_evidence(now: GpuState) -> None:
    """A row that has evidence finds nothing where the state has none of it."""
    empty: dict[str, Any] = {
        "cordons": {},
        "suspended": {},
        "provisioned": {},
        "can_conflict": False,
        "cleanup": Cleanup(),
        "turn": None,
        "hidden": None,
        "kubelet": KubeletWord(),
    }
    for row in REASONS:
        if row.evidence:
            fields = {name.partition(".")[0] for name in row.evidence}
            without = replace(now, **{field: empty[field] for field in fields})
            assert row.shares(without) == frozenset(), row.name

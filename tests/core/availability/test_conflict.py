"""The rule of sharing, and its invariants."""

import re
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.availability.conflict import (
    conflicting_shares,
    conflicts,
    occupied_text,
    orphaned_leases,
    orphaned_text,
    shares_to_wait,
    unavailable_shares,
    without_conflict,
)
from metagpu.core.availability.reasons import availability_of, count_free, waits_for
from metagpu.core.model.shares import (
    HardwareDevice,
    Holder,
    Lease,
    ProvisionedState,
    ResourceName,
    Share,
    ShareId,
    Verdict,
)
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import (
    EarlierLeases,
    Fact,
    GpuFaulted,
    GpusFound,
    LeasesObserved,
    SharesClaimed,
    SharesPending,
    SharesReleased,
)
from metagpu.core.state.reduce import reduce
from tests.core.two_gpus import A_SHARES, ALICE, FOUND, LEASED, A, B
from tests.rigs.build import METAGPU, after, offer, share


def test_a_lease_of_another_backend_makes_shares_unavailable() -> None:
    """A GPU with new shares is unavailable until the pods of its old shares end."""
    slices = (share(A, 0, backend="slice"), share(A, 1, backend="slice"))
    recut = after(offer(*slices), since=LEASED)
    freed = after(SharesReleased(A_SHARES[:2], at=30), since=recut)

    assert conflicting_shares(recut.gpus[A.id]) == {part.id for part in slices}
    assert conflicting_shares(freed.gpus[A.id]) == frozenset()
    assert count_free(freed.gpus[A.id], METAGPU) == 2


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (share(A, 0), share(A, 1), False),
        (share(A, 0), share(A, 0), True),
        (share(A, 0), share(B, 0), False),
        (share(A, 0), share(A, 1, backend="slice"), True),
        (share(A, 0), share(B, 1, backend="slice"), False),
        (share(A, 0, slots=["e0", "s1"]), share(A, 1, slots=["s1"]), True),
    ],
    ids=["own slots", "itself", "other GPU", "other backend", "both other", "a slot in common"],
)
def test_shares_conflict_by_gpu_backend_and_slot(
    first: Share, second: Share, *, expected: bool
) -> None:
    """Two shares exclude each other on one GPU by backend or by a slot in common, both ways."""
    assert conflicts(first, second) == expected
    assert conflicts(second, first) == expected


SLOTS = st.frozensets(st.sampled_from(["s0", "s1", "s2", "media"]), min_size=1)
POOL = [A, B]


@st.composite
def share_sets(draw: st.DrawFn) -> list[Share]:
    """Create shares of two GPUs by up to three backends, with slots that may overlap."""
    shares = []
    for of in POOL:
        backends = draw(st.lists(st.sampled_from(["fraction", "slice", "mig"]), max_size=6))
        shares += [
            share(of, number, backend=backend, slots=draw(SLOTS))
            for number, backend in enumerate(backends)
        ]
    return shares


@given(share_sets())
def test_shares_without_conflict_are_those_of_the_rule(shares: list[Share]) -> None:
    """Computed once for all, they are those that conflict with no held share."""
    of_one_gpu = [other for other in shares if other.gpu == A.id]
    held = of_one_gpu[: len(of_one_gpu) // 2]
    expected = [
        candidate
        for candidate in of_one_gpu
        if not any(conflicts(candidate, other) for other in held)
    ]
    assert without_conflict(of_one_gpu, held) == expected


@st.composite
def histories(draw: st.DrawFn) -> list[Fact]:
    """Yield facts about two GPUs: offers, claims, releases and lists in any order.

    As in the daemon, only what is on offer is granted; the offer may change while shares are held.
    """
    facts: list[Fact] = [FOUND]
    on_offer: list[Share] = []
    ever: list[Share] = []

    for at in range(draw(st.integers(1, 12))):
        kind = draw(
            st.sampled_from(["offer", "grant", "grant", "release", "await", "observe", "fault"])
        )
        if kind == "offer" or not on_offer:
            on_offer = draw(share_sets())
            ever += on_offer
            facts.append(offer(*on_offer))
        elif kind == "grant":
            chosen = draw(st.lists(st.sampled_from(on_offer), max_size=4, unique=True))
            facts.append(SharesClaimed(tuple(chosen), at=at))
        elif kind in ("release", "await"):
            fact = SharesReleased if kind == "release" else SharesPending
            facts.append(fact(tuple(draw(st.lists(st.sampled_from(ever)))), at=at))
        elif kind == "observe":
            seen = draw(st.lists(st.sampled_from(ever)))
            facts.append(LeasesObserved({s.id: ALICE for s in seen}, at=at, admission_timeout=2))
        else:
            facts.append(GpuFaulted(draw(st.sampled_from(POOL)).id, "XID 79", at=at))
    return facts


@given(histories())
def test_unavailable_shares_conflict_with_a_lease(history: list[Fact]) -> None:
    """A share is unavailable exactly if it conflicts with a lease; none is free beside orphans.

    The exception are equal parts, whose number is known: see the next test.
    """
    snapshot = Snapshot()

    for fact in history:
        snapshot, _ = reduce(snapshot, fact)
        for state in snapshot.gpus.values():
            held = {lease.share for lease in state.leases.values()}
            if not orphaned_leases(state.shares, state.leases):
                assert conflicting_shares(state) == {
                    part.id
                    for part in state.shares
                    if part not in held and any(conflicts(part, other) for other in held)
                }
            elif shares_to_wait(state.shares, state.leases) is None:
                assert conflicting_shares(state) == {
                    part.id for part in state.shares if part not in held
                }


@given(histories())
def test_events_have_every_change_of_leases(history: list[Fact]) -> None:
    """The events alone lead to the same held shares as the snapshots."""
    snapshot, held_by_events = Snapshot(), set[ShareId]()

    for fact in history:
        snapshot, events = reduce(snapshot, fact)
        for event in events:
            if isinstance(event, SharesClaimed):
                held_by_events |= {part.id for part in event.shares}
            elif isinstance(event, SharesReleased):
                held_by_events -= {part.id for part in event.shares}
        assert held_by_events == {held for state in snapshot.gpus.values() for held in state.leases}


@given(histories())
def test_every_fact_taken_twice_changes_nothing_more(history: list[Fact]) -> None:
    """A fact that was just applied changes nothing the second time."""
    snapshot = Snapshot()

    for fact in history:
        snapshot, _ = reduce(snapshot, fact)
        again, events = reduce(snapshot, fact)
        assert again is snapshot
        assert events == ()


@given(st.sets(st.integers(0, 9)), st.integers(1, 10))
def test_equal_shares_of_one_backend_never_conflict(held: set[int], count: int) -> None:
    """Shares of one backend with a slot each do not conflict, and all stay available."""
    shares = [share(A, number) for number in range(count)]
    granted = tuple(shares[number] for number in sorted(held) if number < count)
    state = after(GpusFound((A,), at=0), offer(*shares), SharesClaimed(granted, at=1)).gpus[A.id]

    assert not state.can_conflict
    assert conflicting_shares(state) == frozenset()
    assert count_free(state, METAGPU) == count - len(granted)


TOTAL = 40 * 2**30


def parts(count: int, *, replica: bool = False) -> list[Share]:
    """Divide a GPU into equal parts, or offer it so many times."""
    return [
        replace(share(A, number), memory=TOTAL // count, replica=replica, interchangeable=True)
        for number in range(count)
    ]


def divided_again(before: int, held: int, now: int, *, replica: bool = False) -> Snapshot:
    """Return a GPU of which parts of an earlier division are held."""
    old, new = parts(before, replica=replica), parts(now, replica=replica)
    claimed = SharesClaimed(tuple(old[before - held :]), at=1)
    return after(GpusFound((A,), at=0), offer(*old), claimed, offer(*new))


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 200))
def test_a_gpu_divided_again_offers_what_is_free_of_it(before: int, held: int, now: int) -> None:
    """Held and free parts are the whole GPU at most, and nothing that fits is kept."""
    held = min(before, held)
    state = divided_again(before, held, now).gpus[A.id]
    ids = sum(other.id in state.leases for other in state.shares)

    free = count_free(state, METAGPU)
    fits = (before - held) * now // before  # whole parts of the new division
    assert free == min(now - ids, fits)
    assert not conflicting_shares(state) & state.leases.keys()


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 30))
def test_replicas_are_counted(before: int, held: int, now: int) -> None:
    """More replicas are there at once; of fewer, those are free that nobody's turn takes."""
    held = min(before, held)
    state = divided_again(before, held, now, replica=True).gpus[A.id]

    assert count_free(state, METAGPU) == max(0, now - held)
    if now >= before:
        assert orphaned_leases(state.shares, state.leases) == ()


@pytest.mark.parametrize("change", ["resource", "backend", "instances", "several"])
def test_parts_of_another_kind_wait(change: str) -> None:
    """A GPU whose leases cannot be counted in its new parts gives none of them."""
    old = parts(4)
    new = [replace(other, memory=other.memory // 2) for other in old]
    if change == "resource":
        new = [replace(other, resource=ResourceName("a.b/c")) for other in new]
    elif change == "backend":
        new = [replace(other, backend="slice") for other in new]
    elif change == "instances":
        old, new = (
            [replace(other, interchangeable=False) for other in each] for each in (old, new)
        )
    else:
        new[3] = replace(new[3], memory=1)
    claimed = SharesClaimed((old[0],), at=1)
    state = after(GpusFound((A,), at=0), offer(*old), claimed, offer(*new)).gpus[A.id]

    assert shares_to_wait(state.shares, state.leases) is None
    assert conflicting_shares(state) == {other.id for other in new}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (HardwareDevice("MIG-0", 1, 0, idle=False), {0, 1}),
        (HardwareDevice("MIG-0", 1, 0, idle=False, reusable=True), {1}),
        (HardwareDevice("MIG-0", 1, 0, idle=True), set[int]()),
    ],
    ids=["in use", "reusable", "idle"],
)
def test_a_device_without_a_holder_occupies_its_slots(
    device: HardwareDevice, expected: set[int]
) -> None:
    """Shares on the slots of a device wait until it is idle; a reusable one is given again."""
    shares = (share(A, 0, slots=["s0"]), share(A, 1, slots=["s0", "s1"]), share(A, 2, slots=["s2"]))
    provisioned = MappingProxyType({"mig": ProvisionedState(devices={shares[0].id: device})})
    unavailable = unavailable_shares(shares, {}, provisioned=provisioned)
    assert unavailable == {shares[number].id for number in expected}

    told = occupied_text(
        GpuState(A, Verdict(healthy=True, since=0), shares, provisioned=provisioned), shares[1]
    )
    assert (f"{shares[0].id} was just released" in told) is not device.idle


@pytest.mark.parametrize(
    ("holders", "resource", "told"),
    [
        ([None], "a.b/c", "by a pod that is being admitted under a.b/c, .* end of that pod"),
        ([ALICE], "", f"by {re.escape(str(ALICE))} under another name, .* end of that pod"),
        ([Holder("team", str(n), "main") for n in range(5)], "a.b/c", r"team/4 \(main\) under"),
        (
            [Holder("team", str(n), "main") for n in range(7)],
            "a.b/c",
            r"team/0 .*, team/4 \(main\), 2 more under a.b/c, .* end of these pods",
        ),
    ],
)
def test_a_gpu_that_waits_names_the_pods_it_waits_for(
    holders: list[Holder | None], resource: str, told: str
) -> None:
    """The first five are named; a pod that the kubelet has not listed yet is named as one."""
    leases = [
        Lease(share(A, 9 + n, backend="old", resource=resource), since=1, holder=holder)
        for n, holder in enumerate(holders)
    ]
    held = MappingProxyType({lease.share.id: lease for lease in leases})
    state = GpuState(A, Verdict(healthy=True, since=0), A_SHARES, leases=held)
    assert re.search(f"is held .*{told}", orphaned_text(state))


@pytest.mark.parametrize(
    ("held", "now", "told"),
    [(1, 8, "2 free shares wait for"), (1, 4, "1 free share waits"), (4, 2, "2 free shares wait")],
)
def test_what_waits_for_an_earlier_division_is_counted(held: int, now: int, told: str) -> None:
    """An earlier part takes as many of the new parts as it needs, and all of them at most."""
    old = [replace(each, id=ShareId(f"{each.id}-old")) for each in parts(4)]
    leases = MappingProxyType({each.id: Lease(each, since=1, holder=ALICE) for each in old[:held]})
    state = GpuState(A, Verdict(healthy=True, since=0), tuple(parts(now)), leases=leases)
    assert told in orphaned_text(state)


def test_a_new_position_is_no_new_share() -> None:
    """A held share whose number in the list changed is the same share: nothing waits for it."""
    moved = [replace(a_share, number=a_share.number + 1) for a_share in A_SHARES]
    state = after(offer(*moved), since=LEASED).gpus[A.id]

    assert orphaned_leases(state.shares, state.leases) == ()
    assert count_free(state, METAGPU) == 1


def test_while_earlier_leases_are_unknown_nothing_is_given() -> None:
    """All free shares wait, those of GPUs that come later too: pods may hold other ones."""
    whole = [share(B, 0, backend="whole", resource="nvidia.com/gpu")]
    both = offer(*A_SHARES, *whole, share(B, 0, backend="timeslice"))
    unknown = after(EarlierLeases("the kubelet is late"), FOUND, both)
    first, second = unknown.gpus.values()
    assert availability_of(first).refused == {other.id for other in first.shares}
    assert availability_of(second).refused == {other.id for other in second.shares}
    assert waits_for(second) == (
        f"GPU {second.gpu} waits until it is known which pods hold it: the kubelet is late"
    )

    known = after(EarlierLeases(""), since=unknown)
    assert not any(availability_of(gpu).refused for gpu in known.gpus.values())

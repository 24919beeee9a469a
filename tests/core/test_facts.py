"""What each fact makes of a snapshot, and what news it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.facts import (
    Fact,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    LeasesObserved,
    SharesAwaited,
    SharesGranted,
    SharesOffered,
    SharesReleased,
    TopologyRead,
)
from metagpu.core.gpu import Connection, Gpu, PciPath, Topology
from metagpu.core.model import Holder, Lease, ResourceName, Share, ShareId, Verdict
from metagpu.core.reduce import reduce
from metagpu.core.sharing import conflicts
from metagpu.core.snapshot import Snapshot
from tests.build import METAGPU, after, gpu, offer, share

A, B = gpu(0), gpu(1)
A_SHARES = (share(A, 0), share(A, 1), share(A, 2))
B_SHARES = (share(B, 0), share(B, 1))
ALICE = Holder("team", "alice", "main")
BOB = Holder("team", "bob", "main")

FOUND = GpusFound((A, B), at=1)
OFFERED = offer(*A_SHARES, *B_SHARES)
NODE = after(FOUND, OFFERED)
LEASED = after(SharesGranted(A_SHARES[:2], at=10), since=NODE)


def leases(snapshot: Snapshot, of: Gpu = A) -> dict[ShareId, Lease]:
    """Give the leases on one GPU."""
    return dict(snapshot.gpus[of.id].leases)


# --- GPUs -----------------------------------------------------------------------------------------


def test_found_gpus_are_healthy_since_then() -> None:
    """A GPU that NVML names is known, healthy, idle, and in the order of its index."""
    snapshot, news = reduce(Snapshot(), GpusFound((B, A), at=7))

    assert list(snapshot.gpus) == [A.id, B.id]
    assert snapshot.gpus[A.id].verdict == Verdict(healthy=True, since=7)
    assert snapshot.gpus[A.id].owner is None
    assert news == (GpusFound((B, A), at=7),)


def test_a_vanished_gpu_stays_known() -> None:
    """A GPU that NVML names no more keeps its place, its shares and its leases."""
    following, news = reduce(LEASED, GpusFound((B,), at=20))

    assert following is LEASED
    assert news == ()


def test_a_gpu_that_comes_later_joins_in_order() -> None:
    """A new GPU gets its place by index; the others' states are the same objects."""
    first = after(GpusFound((B,), at=1))
    snapshot, _ = reduce(first, GpusFound((A, B), at=2))

    assert list(snapshot.gpus) == [A.id, B.id]
    assert snapshot.gpus[B.id] is first.gpus[B.id]


def test_connections_are_learned_and_kept() -> None:
    """What NVML says of a pair is known from then on; a pair it is silent about stays as it was."""
    near, far = Connection(PciPath.SWITCH), Connection(PciPath.SYSTEM)
    first, second = frozenset((A.id, B.id)), frozenset((B.id, gpu(2).id))
    read = TopologyRead(Topology({first: near}))
    snapshot, news = reduce(NODE, read)
    later, _ = reduce(snapshot, TopologyRead(Topology({second: far})))

    assert news == (read,)
    assert later.topology == Topology({first: near, second: far})
    assert snapshot.gpus is NODE.gpus
    assert snapshot.offers is NODE.offers


def test_connections_read_again_are_no_news() -> None:
    """A survey that reads the same connections, or none, changes nothing."""
    read = TopologyRead(Topology({frozenset((A.id, B.id)): Connection(PciPath.SWITCH)}))
    snapshot = after(read, since=NODE)

    for fact in (read, TopologyRead(Topology())):
        assert reduce(snapshot, fact) == (snapshot, ())
        assert reduce(snapshot, fact)[0] is snapshot


def test_a_new_description_keeps_what_is_known() -> None:
    """A GPU described anew (here by another index) keeps shares, leases and verdict."""
    moved = replace(A, index=5)
    snapshot, news = reduce(LEASED, GpusFound((moved,), at=20))

    assert list(snapshot.gpus) == [B.id, A.id]
    assert snapshot.gpus[A.id] == replace(LEASED.gpus[A.id], gpu=moved)
    assert news == (GpusFound((moved,), at=20),)


def test_the_first_reason_of_a_fault_stands() -> None:
    """While a GPU is out of service, later faults change neither reason nor time."""
    broken, news = reduce(NODE, GpuFaulted(A.id, "XID 79", at=5))
    again, no_news = reduce(broken, GpuFaulted(A.id, "XID 48", at=6))

    assert broken.gpus[A.id].verdict == Verdict(healthy=False, since=5, reason="XID 79")
    assert news == (GpuFaulted(A.id, "XID 79", at=5),)
    assert again is broken
    assert no_news == ()


def test_a_recovered_gpu_is_healthy_since_then() -> None:
    """Recovery ends the fault; its reason is news and no part of the verdict."""
    broken = after(GpuFaulted(A.id, "XID 79", at=5), since=NODE)
    snapshot, news = reduce(broken, GpuRecovered(A.id, "quiet", at=9))

    assert snapshot.gpus[A.id].verdict == Verdict(healthy=True, since=9)
    assert news == (GpuRecovered(A.id, "quiet", at=9),)


def test_a_fault_touches_no_other_gpu() -> None:
    """Everything but the GPU of a fault stays the same object: its readers are not woken."""
    snapshot, _ = reduce(LEASED, GpuFaulted(A.id, "XID 79", at=5))

    assert snapshot.gpus[B.id] is LEASED.gpus[B.id]
    assert snapshot.offers is LEASED.offers
    assert leases(snapshot) == leases(LEASED)


# --- facts of nothing new -------------------------------------------------------------------------

NOWHERE = gpu(9)
NOTHING = LeasesObserved({}, at=0)
TOLD = after(NOTHING, since=NODE)

STALE: list[tuple[str, Snapshot, Fact]] = [
    ("found again", NODE, FOUND),
    ("found nothing", NODE, GpusFound((), at=9)),
    ("recovered while healthy", NODE, GpuRecovered(A.id, "quiet", at=9)),
    ("fault of an unknown GPU", NODE, GpuFaulted(NOWHERE.id, "XID 79", at=9)),
    ("recovery of an unknown GPU", NODE, GpuRecovered(NOWHERE.id, "quiet", at=9)),
    ("offered again", NODE, OFFERED),
    ("offered shares of an unknown GPU", NODE, offer(*OFFERED.shares, share(NOWHERE, 0))),
    ("granted nothing", NODE, SharesGranted((), at=9)),
    ("granted of an unknown GPU", NODE, SharesGranted((share(NOWHERE, 0),), at=9)),
    ("awaited by nobody", NODE, SharesAwaited(A_SHARES[:1], at=9)),
    ("awaited of an unknown GPU", NODE, SharesAwaited((share(NOWHERE, 0),), at=9)),
    ("granted once more at the same time", LEASED, SharesGranted(A_SHARES[:2], at=10)),
    ("released what nobody holds", LEASED, SharesReleased(B_SHARES, at=9)),
    ("released of an unknown GPU", LEASED, SharesReleased((share(NOWHERE, 0),), at=9)),
    ("observed what is known", TOLD, LeasesObserved({}, at=9)),
    ("observed an unknown GPU", TOLD, LeasesObserved({share(NOWHERE, 0).id: ALICE}, at=9)),
    ("observed a grant too early", after(NOTHING, since=LEASED), LeasesObserved({}, at=29.9)),
]


@pytest.mark.parametrize(
    ("snapshot", "fact"), [row[1:] for row in STALE], ids=[r[0] for r in STALE]
)
def test_nothing_new_gives_the_same_object(snapshot: Snapshot, fact: Fact) -> None:
    """A fact that says nothing new gives the very same snapshot and no news."""
    following, news = reduce(snapshot, fact)

    assert following is snapshot
    assert news == ()


# --- offers ---------------------------------------------------------------------------------------


def test_offered_shares_are_grouped_by_gpu() -> None:
    """An offer has its shares by id and by GPU, each GPU its own."""
    snapshot, news = reduce(after(FOUND), OFFERED)
    offered = snapshot.offers[METAGPU]

    assert offered.by_gpu == {A.id: A_SHARES, B.id: B_SHARES}
    assert list(offered.shares.values()) == [*A_SHARES, *B_SHARES]
    assert snapshot.gpus[A.id].shares == A_SHARES
    assert news == (OFFERED,)


def test_a_resource_without_shares_is_an_offer_too() -> None:
    """A resource that no GPU serves is known, with nothing in it."""
    snapshot = after(SharesOffered((METAGPU,), ()))

    assert snapshot.offers[METAGPU].shares == {}
    assert snapshot.offers[METAGPU].by_gpu == {}


def test_an_untouched_offer_stays_the_same_object() -> None:
    """When one resource changes, another's Offer and other GPUs' states are the same objects."""
    other = share(B, 7, resource="example.com/other")
    before = after(offer(*A_SHARES, other), since=after(FOUND))
    snapshot, _ = reduce(before, offer(*A_SHARES[:1], other))

    assert snapshot.offers[other.resource] is before.offers[other.resource]
    assert snapshot.gpus[B.id] is before.gpus[B.id]
    assert snapshot.offers[METAGPU].by_gpu == {A.id: A_SHARES[:1]}


def test_a_resource_taken_back_is_gone() -> None:
    """What the next offer does not name is on offer no more."""
    snapshot = after(SharesOffered((), ()), since=NODE)

    assert snapshot.offers == {}
    assert snapshot.gpus[A.id].shares == ()


def test_a_lease_outlives_its_offer() -> None:
    """A share that is held stays held when it is no longer on offer, until it is released."""
    without = after(SharesOffered((METAGPU,), B_SHARES), since=LEASED)
    released, news = reduce(without, SharesReleased(A_SHARES[:1], at=30))

    assert leases(without) == leases(LEASED)
    assert list(leases(released)) == [A_SHARES[1].id]
    assert news == (SharesReleased(A_SHARES[:1], at=30),)


def test_a_held_share_of_another_backend_withholds_until_released() -> None:
    """A GPU recut while a pod holds a share of the old cut is nobody's until that pod ends."""
    slices = (share(A, 0, backend="slice"), share(A, 1, backend="slice"))
    recut = after(offer(*slices), since=LEASED)
    freed = after(SharesReleased(A_SHARES[:2], at=30), since=recut)

    assert recut.gpus[A.id].withheld == {part.id for part in slices}
    assert freed.gpus[A.id].withheld == frozenset()
    assert freed.gpus[A.id].free(METAGPU) == 2


# --- grants and releases --------------------------------------------------------------------------


def test_a_grant_is_a_lease_without_a_holder() -> None:
    """A granted share is held since then; who holds it is told later."""
    snapshot, news = reduce(NODE, SharesGranted(A_SHARES[:1], at=10))

    assert leases(snapshot) == {A_SHARES[0].id: Lease(A_SHARES[0], 10)}
    assert snapshot.gpus[A.id].owner == "fraction"
    assert snapshot.gpus[A.id].free(METAGPU) == 2
    assert news == (SharesGranted(A_SHARES[:1], at=10),)


def test_a_grant_over_two_gpus_is_one_piece_of_news() -> None:
    """A container may hold shares of several GPUs; all are told at once."""
    both = (A_SHARES[0], B_SHARES[0])
    snapshot, news = reduce(NODE, SharesGranted(both, at=10))

    assert [list(leases(snapshot, of)) for of in (A, B)] == [[both[0].id], [both[1].id]]
    assert news == (SharesGranted(both, at=10),)


def test_a_share_granted_again_is_held_anew() -> None:
    """An id given again (init container, then app) starts its patience anew and is no news."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=LEASED)
    snapshot, news = reduce(held, SharesGranted(A_SHARES[:1], at=30))

    assert leases(snapshot)[A_SHARES[0].id] == Lease(A_SHARES[0], 30)
    assert news == ()


def test_an_awaited_share_stays_its_holders() -> None:
    """A container that starts renews its lease; another holder does not wait for what it did."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=LEASED)
    waiting, news = reduce(held, SharesAwaited(A_SHARES[:1], at=30))
    assert leases(waiting)[A_SHARES[0].id] == Lease(A_SHARES[0], 30, ALICE, awaited=True)
    assert news == ()

    for holder, awaited in ((ALICE, True), (BOB, False)):
        told = after(LeasesObserved({A_SHARES[0].id: holder}, at=40), since=waiting)
        expected = Lease(A_SHARES[0], 30, holder, awaited=awaited)
        assert leases(told)[A_SHARES[0].id] == expected


def test_released_shares_are_free() -> None:
    """A release ends the leases that there are, and tells of those alone."""
    snapshot, news = reduce(LEASED, SharesReleased(A_SHARES, at=30))

    assert leases(snapshot) == {}
    assert snapshot.gpus[A.id].free(METAGPU) == 3
    assert news == (SharesReleased(A_SHARES[:2], at=30),)


def test_a_faulty_gpu_has_nothing_free() -> None:
    """Nothing can be granted from a GPU out of service, whatever is held of it."""
    broken = after(GpuFaulted(A.id, "XID 79", at=5), since=LEASED)

    assert broken.gpus[A.id].free(METAGPU) == 0


# --- the kubelet's account ------------------------------------------------------------------------


def test_an_observed_holder_is_written_to_the_lease() -> None:
    """The kubelet tells who holds a grant: the lease goes on since its grant, and it is no news."""
    snapshot, news = reduce(LEASED, LeasesObserved({s.id: ALICE for s in A_SHARES[:2]}, at=20))

    assert leases(snapshot) == {s.id: Lease(s, 10, ALICE) for s in A_SHARES[:2]}
    assert news == ()


def test_a_holder_seen_first_is_a_grant() -> None:
    """After a restart the kubelet knows pods that the daemon does not: they are leases and news."""
    snapshot, news = reduce(NODE, LeasesObserved({B_SHARES[0].id: BOB, A_SHARES[2].id: BOB}, at=9))

    assert leases(snapshot, A) == {A_SHARES[2].id: Lease(A_SHARES[2], 9, BOB)}
    assert leases(snapshot, B) == {B_SHARES[0].id: Lease(B_SHARES[0], 9, BOB)}
    assert news == (SharesGranted((A_SHARES[2], B_SHARES[0]), at=9),)


def test_a_holder_who_is_gone_is_a_release() -> None:
    """A share with a holder that the kubelet names no more is free at once."""
    held = after(LeasesObserved({s.id: ALICE for s in A_SHARES[:2]}, at=20), since=LEASED)
    snapshot, news = reduce(held, LeasesObserved({A_SHARES[0].id: ALICE}, at=21))

    assert list(leases(snapshot)) == [A_SHARES[0].id]
    assert news == (SharesReleased(A_SHARES[1:2], at=21),)


def test_a_new_holder_takes_over_the_lease() -> None:
    """A share handed from one container to the next is never free in between."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=LEASED)
    snapshot, news = reduce(held, LeasesObserved({A_SHARES[0].id: BOB}, at=21))

    assert leases(snapshot)[A_SHARES[0].id] == Lease(A_SHARES[0], 10, BOB)
    assert news == ()


def test_a_grant_that_never_shows_up_expires() -> None:
    """A grant that the kubelet does not name after its patience is over ends."""
    snapshot, news = reduce(LEASED, LeasesObserved({}, at=30))

    assert leases(snapshot) == {}
    assert news == (SharesReleased(A_SHARES[:2], at=30),)


def test_an_old_answer_says_nothing_of_a_young_lease() -> None:
    """What was asked before a share was granted anew neither names its holder nor ends it."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=NODE)
    again = after(SharesGranted(A_SHARES[:1], at=30), since=held)

    for old in (LeasesObserved({A_SHARES[0].id: ALICE}, at=29), LeasesObserved({}, at=30)):
        assert reduce(again, old) == (again, ())
    assert reduce(again, LeasesObserved({}, at=31)) == (again, ())


def test_patience_is_the_facts_own() -> None:
    """How long a grant may go unseen is said with the observation."""
    snapshot, _ = reduce(LEASED, LeasesObserved({}, at=13, patience=3))

    assert leases(snapshot) == {}


def test_a_held_share_off_offer_changes_holders_too() -> None:
    """A lease whose share is no longer on offer is followed like any other."""
    without = after(SharesOffered((METAGPU,), ()), since=LEASED)
    snapshot, _ = reduce(without, LeasesObserved({A_SHARES[0].id: BOB}, at=20))

    assert leases(snapshot)[A_SHARES[0].id] == Lease(A_SHARES[0], 10, BOB)


def test_what_is_held_under_another_name_keeps_the_gpu() -> None:
    """A pod that holds a GPU under a name that is not on offer keeps all of it from others."""
    held = {A_SHARES[0].id: ALICE}
    other = LeasesObserved(held, at=9, resources={A_SHARES[0].id: ResourceName("nvidia.com/gpu")})
    snapshot, _ = reduce(TOLD, other)

    assert snapshot.gpus[A.id].withheld == {part.id for part in A_SHARES}
    assert [lease.holder for lease in snapshot.gpus[A.id].waits_for] == [ALICE]
    assert snapshot.gpus[B.id] is TOLD.gpus[B.id]

    freed, _ = reduce(snapshot, LeasesObserved({}, at=10))

    assert freed.gpus[A.id].withheld == frozenset()


def test_a_gpu_cut_anew_waits_for_who_holds_it() -> None:
    """A held GPU that is cut into other shares offers none of them until the old lease ends."""
    anew = tuple(replace(part, memory=part.memory + 1) for part in A_SHARES)
    snapshot = after(offer(*anew, *B_SHARES), since=LEASED)

    assert snapshot.gpus[A.id].withheld == {part.id for part in anew}

    freed, _ = reduce(snapshot, SharesReleased(A_SHARES[:2], at=30))

    assert freed.gpus[A.id].withheld == frozenset()


def test_releases_are_told_before_grants() -> None:
    """One observation that frees a share and finds another holder tells the release first."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=2), since=NODE)
    _, news = reduce(held, LeasesObserved({A_SHARES[1].id: BOB}, at=3))

    assert news == (SharesReleased(A_SHARES[:1], at=3), SharesGranted(A_SHARES[1:2], at=3))


# --- the one rule of sharing ----------------------------------------------------------------------


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


@pytest.mark.parametrize("resource", [None, A_SHARES[0].resource], ids=["unnamed", "named"])
def test_leases_told_of_before_the_offer_are_its_own(resource: ResourceName | None) -> None:
    """At a start it is the same whether the kubelet's account or the offer comes first."""
    held = A_SHARES[0].id
    account = LeasesObserved(
        {held: ALICE}, at=20, resources={} if resource is None else {held: resource}
    )

    early, late = after(FOUND, account, OFFERED), after(FOUND, OFFERED, account)

    assert early.gpus == late.gpus
    assert not early.gpus[A.id].withheld


def test_leases_told_of_under_another_name_stay_foreign_to_the_offer() -> None:
    """An id that is held under a name we do not offer it by keeps its GPU from being given."""
    held = A_SHARES[0].id
    account = LeasesObserved({held: ALICE}, at=20, resources={held: ResourceName("other.io/gpu")})

    state = after(FOUND, account, OFFERED).gpus[A.id]

    assert state.withheld == {share.id for share in A_SHARES}


SLOTS = st.frozensets(st.sampled_from(["s0", "s1", "s2", "media"]), min_size=1)
POOL = [A, B]


@st.composite
def cuts(draw: st.DrawFn) -> list[Share]:
    """Cut two GPUs by up to three backends, with slots that may overlap."""
    shares = []
    for of in POOL:
        backends = draw(st.lists(st.sampled_from(["fraction", "slice", "mig"]), max_size=6))
        shares += [
            share(of, number, backend=backend, slots=draw(SLOTS))
            for number, backend in enumerate(backends)
        ]
    return shares


@st.composite
def histories(draw: st.DrawFn) -> list[Fact]:
    """Tell what happens to two GPUs: cuts, grants, releases and observations in any order.

    As in the daemon, only what is on offer is granted; a cut may come while shares are held.
    """
    facts: list[Fact] = [FOUND]
    on_offer: list[Share] = []
    ever: list[Share] = []

    for at in range(draw(st.integers(1, 12))):
        kind = draw(
            st.sampled_from(["cut", "grant", "grant", "release", "await", "observe", "fault"])
        )
        if kind == "cut" or not on_offer:
            on_offer = draw(cuts())
            ever += on_offer
            facts.append(offer(*on_offer))
        elif kind == "grant":
            chosen = draw(st.lists(st.sampled_from(on_offer), max_size=4, unique=True))
            facts.append(SharesGranted(tuple(chosen), at=at))
        elif kind in ("release", "await"):
            fact = SharesReleased if kind == "release" else SharesAwaited
            facts.append(fact(tuple(draw(st.lists(st.sampled_from(ever)))), at=at))
        elif kind == "observe":
            seen = draw(st.lists(st.sampled_from(ever)))
            facts.append(LeasesObserved({s.id: ALICE for s in seen}, at=at, patience=2))
        else:
            facts.append(GpuFaulted(draw(st.sampled_from(POOL)).id, "XID 79", at=at))
    return facts


@given(histories())
def test_withheld_is_what_conflicts_with_a_lease(history: list[Fact]) -> None:
    """After any history a share is withheld exactly if a lease excludes it or a stray is there."""
    snapshot = Snapshot()

    for fact in history:
        snapshot, _ = reduce(snapshot, fact)
        for state in snapshot.gpus.values():
            stray = bool(state.waits_for)
            assert state.withheld == {
                part.id
                for part in state.shares
                if part not in {lease.share for lease in state.leases.values()}
                and (stray or any(conflicts(part, i.share) for i in state.leases.values()))
            }


@given(histories())
def test_no_news_means_no_change_of_holding(history: list[Fact]) -> None:
    """Following the news alone gives the same held shares as the snapshots do."""
    snapshot, told = Snapshot(), set[ShareId]()

    for fact in history:
        snapshot, news = reduce(snapshot, fact)
        for event in news:
            if isinstance(event, SharesGranted):
                told |= {part.id for part in event.shares}
            elif isinstance(event, SharesReleased):
                told -= {part.id for part in event.shares}
        assert told == {held for state in snapshot.gpus.values() for held in state.leases}


@given(histories())
def test_every_fact_taken_twice_changes_nothing_more(history: list[Fact]) -> None:
    """A fact that was just taken in says nothing new, whatever it is."""
    snapshot = Snapshot()

    for fact in history:
        snapshot, _ = reduce(snapshot, fact)
        again, news = reduce(snapshot, fact)
        assert again is snapshot
        assert news == ()


@given(st.sets(st.integers(0, 9)), st.integers(1, 10))
def test_equal_cuts_of_one_backend_never_contend(held: set[int], count: int) -> None:
    """Shares of one backend that have a slot each are not contended, and nothing is withheld."""
    shares = [share(A, number) for number in range(count)]
    granted = tuple(shares[number] for number in sorted(held) if number < count)
    state = after(GpusFound((A,), at=0), offer(*shares), SharesGranted(granted, at=1)).gpus[A.id]

    assert not state.contended
    assert state.withheld == frozenset()
    assert state.free(METAGPU) == count - len(granted)

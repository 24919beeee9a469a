"""The one rule of sharing, and what holds whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.facts import (
    Fact,
    GpuFaulted,
    GpusFound,
    LeasesObserved,
    SharesAwaited,
    SharesGranted,
    SharesReleased,
)
from metagpu.core.model import Share, ShareId
from metagpu.core.reduce import reduce
from metagpu.core.sharing import conflicts
from metagpu.core.snapshot import Snapshot
from tests.build import METAGPU, after, offer, share
from tests.core.two_gpus import A_SHARES, ALICE, FOUND, LEASED, A, B


def test_a_held_share_of_another_backend_withholds_until_released() -> None:
    """A GPU recut while a pod holds a share of the old cut is nobody's until that pod ends."""
    slices = (share(A, 0, backend="slice"), share(A, 1, backend="slice"))
    recut = after(offer(*slices), since=LEASED)
    freed = after(SharesReleased(A_SHARES[:2], at=30), since=recut)

    assert recut.gpus[A.id].withheld == {part.id for part in slices}
    assert freed.gpus[A.id].withheld == frozenset()
    assert freed.gpus[A.id].free(METAGPU) == 2


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

"""Who holds what: grants, releases, and the kubelet's account of them."""

import pytest
from msgspec.structs import replace

from metagpu.core.facts import (
    GpuFaulted,
    LeasesObserved,
    SharesAwaited,
    SharesGranted,
    SharesOffered,
    SharesReleased,
)
from metagpu.core.model import Lease, ResourceName
from metagpu.core.reduce import reduce
from tests.build import METAGPU, after, offer
from tests.core.two_gpus import (
    A_SHARES,
    ALICE,
    B_SHARES,
    BOB,
    FOUND,
    LEASED,
    NODE,
    OFFERED,
    TOLD,
    A,
    B,
    leases,
)


def test_a_lease_outlives_its_offer() -> None:
    """A share that is held stays held when it is no longer on offer, until it is released."""
    without = after(SharesOffered((METAGPU,), B_SHARES), since=LEASED)
    released, news = reduce(without, SharesReleased(A_SHARES[:1], at=30))

    assert leases(without) == leases(LEASED)
    assert list(leases(released)) == [A_SHARES[1].id]
    assert news == (SharesReleased(A_SHARES[:1], at=30),)


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

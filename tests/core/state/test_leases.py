"""Leases: claims, releases and the kubelet's lists of holders."""

from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.availability.conflict import conflicting_shares, orphaned_leases
from metagpu.core.availability.reasons import count_free
from metagpu.core.model.resource_claims import ClaimDevice
from metagpu.core.model.shares import (
    UNKNOWN_BACKEND,
    Holder,
    Lease,
    ResourceClaimRef,
    ResourceName,
    Share,
    ShareId,
)
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    GpusFound,
    KubeletStarted,
    LeasesObserved,
    ResourceClaimsRead,
    SharesClaimed,
    SharesOffered,
    SharesPending,
    SharesReleased,
)
from metagpu.core.state.reduce import reduce
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
from tests.rigs.build import METAGPU, after, gpu, offer


def test_a_lease_outlives_its_offer() -> None:
    """A share that is held stays held when it is no longer on offer, until it is released."""
    without = after(SharesOffered((METAGPU,), B_SHARES), since=LEASED)
    released, events = reduce(without, SharesReleased(A_SHARES[:1], at=30))

    assert leases(without) == leases(LEASED)
    assert list(leases(released)) == [A_SHARES[1].id]
    assert events == (SharesReleased(A_SHARES[:1], at=30),)


def test_a_grant_is_a_lease_without_a_holder() -> None:
    """A claimed share is a lease from then on; the kubelet names the holder later."""
    snapshot, events = reduce(NODE, SharesClaimed(A_SHARES[:1], at=10))

    assert leases(snapshot) == {A_SHARES[0].id: Lease(A_SHARES[0], 10)}
    assert snapshot.gpus[A.id].owner == "fraction"
    assert count_free(snapshot.gpus[A.id], METAGPU) == 2
    assert events == (SharesClaimed(A_SHARES[:1], at=10),)


def test_a_grant_over_two_gpus_is_one_event() -> None:
    """The claim of shares on several GPUs is one event."""
    both = (A_SHARES[0], B_SHARES[0])
    snapshot, events = reduce(NODE, SharesClaimed(both, at=10))

    assert [list(leases(snapshot, of)) for of in (A, B)] == [[both[0].id], [both[1].id]]
    assert events == (SharesClaimed(both, at=10),)


def test_a_repeated_claim_restarts_its_timeout() -> None:
    """A repeated claim (init container, then app) restarts its timeout, no event."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=LEASED)
    snapshot, events = reduce(held, SharesClaimed(A_SHARES[:1], at=30))

    assert leases(snapshot)[A_SHARES[0].id] == Lease(A_SHARES[0], 30)
    assert events == ()


def test_a_pending_share_stays_with_its_holder() -> None:
    """A container that starts renews its lease; another holder's lease begins again."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=LEASED)
    waiting, events = reduce(held, SharesPending(A_SHARES[:1], at=30))
    assert leases(waiting)[A_SHARES[0].id] == Lease(
        A_SHARES[0], 30, ALICE, provisioned_at_start=True
    )
    assert events == ()

    for holder, awaited in ((ALICE, True), (BOB, False)):
        observed = after(LeasesObserved({A_SHARES[0].id: holder}, at=40), since=waiting)
        expected = Lease(A_SHARES[0], 30, holder, provisioned_at_start=awaited)
        assert leases(observed)[A_SHARES[0].id] == expected


def test_released_shares_are_free() -> None:
    """A release ends the existing leases; its event has these alone."""
    snapshot, events = reduce(LEASED, SharesReleased(A_SHARES, at=30))

    assert leases(snapshot) == {}
    assert count_free(snapshot.gpus[A.id], METAGPU) == 3
    assert events == (SharesReleased(A_SHARES[:2], at=30),)


def test_an_observed_holder_is_written_to_the_lease() -> None:
    """The kubelet names the holder of a lease; the lease goes on, without an event."""
    snapshot, events = reduce(LEASED, LeasesObserved({s.id: ALICE for s in A_SHARES[:2]}, at=20))

    assert leases(snapshot) == {s.id: Lease(s, 10, ALICE) for s in A_SHARES[:2]}
    assert events == ()


def test_a_holder_seen_first_is_a_grant() -> None:
    """A restarted daemon learns leases from the kubelet; they are events."""
    snapshot, events = reduce(
        NODE, LeasesObserved({B_SHARES[0].id: BOB, A_SHARES[2].id: BOB}, at=9)
    )

    assert leases(snapshot, A) == {A_SHARES[2].id: Lease(A_SHARES[2], 9, BOB)}
    assert leases(snapshot, B) == {B_SHARES[0].id: Lease(B_SHARES[0], 9, BOB)}
    assert events == (SharesClaimed((A_SHARES[2], B_SHARES[0]), at=9),)


def test_a_new_holder_takes_over_the_lease() -> None:
    """A share handed from one container to the next is never free in between."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=LEASED)
    snapshot, events = reduce(held, LeasesObserved({A_SHARES[0].id: BOB}, at=21))

    assert leases(snapshot)[A_SHARES[0].id] == Lease(A_SHARES[0], 10, BOB)
    assert events == ()


def test_an_old_answer_says_nothing_of_a_young_lease() -> None:
    """A list from before a repeated claim neither names its holder nor ends it."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=NODE)
    again = after(SharesClaimed(A_SHARES[:1], at=30), since=held)

    for old in (LeasesObserved({A_SHARES[0].id: ALICE}, at=29), LeasesObserved({}, at=30)):
        assert reduce(again, old) == (again, ())
    assert reduce(again, LeasesObserved({}, at=31)) == (again, ())


@pytest.mark.parametrize("at", [29, 30])
def test_a_list_from_before_a_container_start_does_not_end_its_lease(at: float) -> None:
    """A list requested before a known lease became pending again, or then, does not end it."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=20), since=NODE)
    pending = after(SharesPending(A_SHARES[:1], at=30), since=held)

    assert reduce(pending, LeasesObserved({}, at=at)) == (pending, ())
    assert leases(after(LeasesObserved({}, at=31), since=pending)) == {}


@pytest.mark.parametrize("at", [29, 30])
def test_a_list_from_before_a_claim_does_not_name_its_holder(at: float) -> None:
    """A list requested before a share was claimed, or then, may name the holder before."""
    claimed = after(SharesClaimed(A_SHARES[:1], at=30), since=NODE)

    earlier = after(LeasesObserved({A_SHARES[0].id: BOB}, at=at), since=claimed)
    assert leases(earlier) == leases(claimed)
    later = after(LeasesObserved({A_SHARES[0].id: BOB}, at=31), since=claimed)
    assert leases(later)[A_SHARES[0].id].holder == BOB


def test_the_timeout_is_the_facts_own() -> None:
    """The timeout of an unconfirmed claim comes with the list."""
    snapshot, _ = reduce(LEASED, LeasesObserved({}, at=13, admission_timeout=3))

    assert leases(snapshot) == {}


def test_a_held_share_off_offer_changes_holders_too() -> None:
    """A lease whose share is no longer on offer is followed like any other."""
    without = after(SharesOffered((METAGPU,), ()), since=LEASED)
    snapshot, _ = reduce(without, LeasesObserved({A_SHARES[0].id: BOB}, at=20))

    assert leases(snapshot)[A_SHARES[0].id] == Lease(A_SHARES[0], 10, BOB)


def test_a_lease_under_another_name_keeps_the_gpu() -> None:
    """A pod that holds a GPU under a name that is not on offer keeps all of it from others."""
    held = {A_SHARES[0].id: ALICE}
    other = LeasesObserved(held, at=9, resources={A_SHARES[0].id: ResourceName("nvidia.com/gpu")})
    snapshot, _ = reduce(TOLD, other)

    assert conflicting_shares(snapshot.gpus[A.id]) == {part.id for part in A_SHARES}
    assert [
        lease.holder
        for lease in orphaned_leases(snapshot.gpus[A.id].shares, snapshot.gpus[A.id].leases)
    ] == [ALICE]
    assert snapshot.gpus[B.id] is TOLD.gpus[B.id]

    freed, _ = reduce(snapshot, LeasesObserved({}, at=10))

    assert conflicting_shares(freed.gpus[A.id]) == frozenset()


def test_a_share_that_the_kubelet_names_otherwise_is_of_the_other_name() -> None:
    """A GPU that a pod got under another plugin's name is not one of the pod's earlier shares."""
    share, other = A_SHARES[0].id, ResourceName("nvidia.com/gpu")
    listed = after(LeasesObserved({share: ALICE}, at=20), since=LEASED)
    snapshot, _ = reduce(listed, LeasesObserved({share: ALICE}, at=21, resources={share: other}))

    held = leases(snapshot)[share].share
    assert held == Share(share, A.id, other, UNKNOWN_BACKEND, -1, A_SHARES[0].footprint, 0)


def test_new_shares_of_a_gpu_wait_for_its_old_lease() -> None:
    """New shares of a GPU under another name are unavailable until its old lease ends."""
    new_shares = tuple(replace(part, resource=ResourceName("a.b/c")) for part in A_SHARES)
    snapshot = after(offer(*new_shares, *B_SHARES), since=LEASED)

    assert conflicting_shares(snapshot.gpus[A.id]) == {part.id for part in new_shares}

    freed, _ = reduce(snapshot, SharesReleased(A_SHARES[:2], at=30))

    assert conflicting_shares(freed.gpus[A.id]) == frozenset()


def test_releases_are_published_before_grants() -> None:
    """A list that ends one lease and begins another has the release first."""
    held = after(LeasesObserved({A_SHARES[0].id: ALICE}, at=2), since=NODE)
    _, events = reduce(held, LeasesObserved({A_SHARES[1].id: BOB}, at=3))

    assert events == (SharesReleased(A_SHARES[:1], at=3), SharesClaimed(A_SHARES[1:2], at=3))


@pytest.mark.parametrize("resource", [None, A_SHARES[0].resource], ids=["unnamed", "named"])
def test_leases_reported_before_the_offer_belong_to_it(resource: ResourceName | None) -> None:
    """At a start the kubelet's list may come before the offer."""
    held = A_SHARES[0].id
    account = LeasesObserved(
        {held: ALICE}, at=20, resources={} if resource is None else {held: resource}
    )

    early, late = after(FOUND, account, OFFERED), after(FOUND, OFFERED, account)

    assert early.gpus == late.gpus
    assert not conflicting_shares(early.gpus[A.id])


NAME = {A_SHARES[0].id: METAGPU}
PODS = frozenset({(ALICE.namespace, ALICE.pod)})
SHARE = A_SHARES[0]
CLAIMED = after(SharesClaimed((SHARE,), at=10), since=NODE)
WAITING = after(SharesClaimed((SHARE,), at=10, unanswered=True), since=NODE)
RENEWED = after(SharesClaimed((A_SHARES[1],), at=25), since=CLAIMED)
CLAIM = ResourceClaimRef("team", "claim", "uid-1")
BESIDE_CLAIM = after(SharesClaimed((A_SHARES[1],), at=25, resource_claim=CLAIM), since=CLAIMED)
LISTED = after(LeasesObserved({SHARE.id: ALICE}, at=20), since=CLAIMED)
FORGOTTEN = after(KubeletStarted((0, 0, 1)), since=LISTED)


@pytest.mark.parametrize(
    ("since", "look", "held"),
    [
        pytest.param(LISTED, {}, False, id="not listed"),
        pytest.param(LISTED, {"pods": PODS}, False, id="listed without"),
        pytest.param(LISTED, {"kubelet_ready": False}, True, id="kubelet not ready"),
        pytest.param(FORGOTTEN, {}, False, id="forgotten, pod not listed"),
        pytest.param(FORGOTTEN, {"pods": PODS}, True, id="forgotten, pod listed"),
        pytest.param(FORGOTTEN, {"pods": PODS, "stopped": {ALICE}}, False, id="forgotten, stopped"),
        pytest.param(
            FORGOTTEN,
            {
                "pods": PODS,
                "holders": {A_SHARES[1].id: ALICE},
                "resources": {A_SHARES[1].id: METAGPU},
            },
            False,
            id="forgotten, started again with other shares",
        ),
        pytest.param(
            FORGOTTEN, {"pods": PODS, "released": {SHARE.id}}, False, id="forgotten, released"
        ),
        pytest.param(CLAIMED, {"at": 29}, True, id="claimed, young"),
        pytest.param(CLAIMED, {"at": 30}, False, id="claimed, old"),
        pytest.param(CLAIMED, {"at": 11, "released": {SHARE.id}}, False, id="claimed, released"),
        pytest.param(CLAIMED, {"at": 129, "allocated": NAME}, True, id="claimed, in checkpoint"),
        pytest.param(CLAIMED, {"at": 130, "allocated": NAME}, False, id="claimed, very old"),
        pytest.param(
            CLAIMED,
            {"at": 9999, "allocated": NAME, "running": {SHARE.id}},
            True,
            id="claimed, pod runs",
        ),
        pytest.param(RENEWED, {"at": 44}, True, id="claimed, and another one later"),
        pytest.param(RENEWED, {"at": 45}, False, id="claimed, and the last one is old"),
        pytest.param(
            RENEWED, {"holders": {A_SHARES[1].id: BOB}}, False, id="claimed, and another one listed"
        ),
        pytest.param(BESIDE_CLAIM, {}, False, id="claimed, and a ResourceClaim later"),
        pytest.param(WAITING, {"at": 9999, "released": {SHARE.id}}, True, id="Allocate waits"),
    ],
)
def test_the_rule_of_ends(since: Snapshot, look: dict[str, Any], *, held: bool) -> None:
    """A lease that the list does not name ends as the table of docs/development/leases.md says."""
    fact = LeasesObserved(**{"holders": {}, "at": 30, **look})

    assert (SHARE.id in leases(after(fact, since=since))) == held


def test_an_unconfirmed_lease_is_confirmed_by_the_list_or_the_kubelets_own_checkpoint() -> None:
    """A file of an earlier kubelet confirms nothing."""
    confirmed = [
        not leases(after(fact, since=FORGOTTEN))[SHARE.id].unconfirmed
        for fact in (
            LeasesObserved({SHARE.id: ALICE}, at=30),
            LeasesObserved({}, at=30, kubelet_ready=False, allocated=NAME, confirms=True),
            LeasesObserved({}, at=30, kubelet_ready=False, allocated=NAME),
        )
    ]

    assert confirmed == [True, True, False]


def test_the_checkpoint_begins_leases_while_the_list_says_nothing() -> None:
    """An id of the checkpoint is held, by nobody known, until the list names its holder."""
    early = LeasesObserved({}, at=5, kubelet_ready=False, allocated=NAME, begins=True)
    begun = after(early, since=NODE)
    assert leases(begun) == {SHARE.id: Lease(SHARE, 5, unconfirmed=True, from_checkpoint=True)}

    listed = after(LeasesObserved({SHARE.id: ALICE}, at=6), since=begun)
    assert leases(listed) == {SHARE.id: Lease(SHARE, 5, ALICE)}
    late = LeasesObserved({}, at=5, allocated=NAME)
    assert leases(after(late, since=NODE)) == {}


def test_what_the_kubelet_lists_of_a_gpu_that_is_gone_is_kept_until_its_pod_ends() -> None:
    """Ids of a GPU that the node lacks have a holder, no lease, and end with the list."""
    gone = ShareId("GPU-gone::0")
    listed = {gone: ALICE, ShareId("other-device"): ALICE}
    known, _ = reduce(NODE, LeasesObserved(listed, at=10))
    again, _ = reduce(known, LeasesObserved(listed, at=20))

    assert {i: (lease.holder, lease.since) for i, lease in known.vanished.items()} == {
        gone: (ALICE, 10)
    }
    assert (again.vanished, leases(again)) == (known.vanished, leases(NODE))
    for fact in (LeasesObserved({}, at=30), LeasesObserved(listed, 30, ended=frozenset({gone}))):
        assert not reduce(again, fact)[0].vanished
    unready = LeasesObserved({}, at=30, kubelet_ready=False)
    assert reduce(again, unready)[0].vanished == known.vanished


def test_the_list_names_the_containers_of_a_claim() -> None:
    """The first is the holder for as long as it is listed; a list without them ends nothing."""
    claimed = after(SharesClaimed((SHARE,), at=10, resource_claim=CLAIM), since=NODE)

    def look(*holders: Holder) -> LeasesObserved:
        return LeasesObserved({}, at=20, of_claims={(CLAIM.uid, SHARE.id): holders})

    both, alone = after(look(ALICE, BOB), since=claimed), after(look(BOB), look(), since=claimed)
    assert leases(both)[SHARE.id] == replace(
        leases(claimed)[SHARE.id], holder=ALICE, sharers=(BOB,)
    )
    assert leases(alone)[SHARE.id] == replace(leases(claimed)[SHARE.id], holder=BOB)
    assert reduce(both, look(BOB, ALICE)) == (both, ())
    assert leases(after(look(BOB), since=both)) == leases(alone)


def test_what_a_claim_has_of_a_gpu_that_is_gone_comes_back_with_the_gpu() -> None:
    """Containers of the claim are named meanwhile; what others had there stays theirs."""
    own = ClaimDevice(CLAIM.uid, gpu(2).id, "fraction", ("0", "1"))
    beside = replace(own, gpu=A.id, slots=("7",))
    zero, one = own.share_ids
    read = ResourceClaimsRead({CLAIM: (own, beside)}, at=5)
    known = after(read, since=LEASED)
    assert set(known.vanished) == {zero, one}
    assert {*leases(known)} == {*leases(LEASED), *beside.share_ids}
    assert leases(known)[beside.share_ids[0]].resource_claim == CLAIM
    assert reduce(known, replace(read, at=6)) == (known, ())
    unprepared = SharesReleased((known.vanished[one].share,), at=7)
    assert set(after(unprepared, since=known).vanished) == {zero}

    other = ShareId(f"{gpu(2).id}::9")
    named = LeasesObserved({other: BOB}, at=20, of_claims={(CLAIM.uid, zero): (ALICE,)})
    returned, events = reduce(after(named, since=known), GpusFound((gpu(2),), at=30))
    assert {i: lease.holder for i, lease in leases(returned, gpu(2)).items()} == {
        zero: ALICE,
        one: None,
    }
    assert list(returned.vanished) == [other]
    assert events[1:] == (
        SharesClaimed(tuple(leases(returned, gpu(2))[i].share for i in (zero, one)), at=30),
    )


def test_what_the_checkpoint_has_of_a_gpu_is_known_until_it_is_read_again() -> None:
    """The ids are without those of ended pods, the device nodes those of the answers it keeps."""
    containers = {SHARE.id: frozenset({("uid", "main")})}
    nodes = {frozenset({0}): frozenset({SHARE.id})}
    allocated = dict.fromkeys((SHARE.id, A_SHARES[1].id), METAGPU)
    ended = frozenset({A_SHARES[1].id})
    read = LeasesObserved(
        {}, 20, allocated=allocated, containers=containers, nodes={A.id: nodes}, ended=ended
    )
    known = after(read, LeasesObserved({}, 21), since=NODE)
    assert (known.gpus[A.id].allocated, known.gpus[A.id].kubelet.nodes) == (containers, nodes)
    later = after(LeasesObserved({}, 22, allocated={}), since=known)
    assert (later.gpus[A.id].allocated, later.gpus[A.id].kubelet.nodes) == ({}, {})

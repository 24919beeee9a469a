"""The snapshot and the events that follow from each fact."""

import pytest
from msgspec.structs import replace

from metagpu.core.model.gpu import Connection, PciPath, Topology
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import OfferTurn, Verdict
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import PodEnded
from metagpu.core.state.facts import (
    CompetingPluginFound,
    CompetingPluginGone,
    Fact,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    KubeletStarted,
    LeasesObserved,
    PodsListed,
    RegistrationProblemFound,
    RegistrationProblemGone,
    SharesClaimed,
    SharesOffered,
    SharesPending,
    SharesReleased,
    TopologyRead,
    TurnsChanged,
    UnreadableGpusFound,
)
from metagpu.core.state.reduce import reduce
from tests.core.two_gpus import (
    A_SHARES,
    ALICE,
    B_SHARES,
    FOUND,
    LEASED,
    NODE,
    NOTHING,
    OFFERED,
    TOLD,
    A,
    B,
    leases,
)
from tests.rigs.build import METAGPU, after, gpu, offer, share

# --- GPUs -----------------------------------------------------------------------------------------


def test_found_gpus_are_healthy_since_then() -> None:
    """A GPU that NVML names is known, healthy, idle, and in the order of its index."""
    snapshot, events = reduce(Snapshot(), GpusFound((B, A), at=7))

    assert list(snapshot.gpus) == [A.id, B.id]
    assert snapshot.gpus[A.id].verdict == Verdict(healthy=True, since=7)
    assert snapshot.gpus[A.id].owner is None
    assert events == (GpusFound((B, A), at=7),)


def test_a_vanished_gpu_stays_known() -> None:
    """A GPU that NVML names no more keeps its place, its shares and its leases."""
    following, events = reduce(LEASED, GpusFound((B,), at=20))

    assert following is LEASED
    assert events == ()


def test_a_gpu_that_comes_later_joins_in_order() -> None:
    """A new GPU gets its place by index; the others' states are the same objects."""
    first = after(GpusFound((B,), at=1))
    snapshot, _ = reduce(first, GpusFound((A, B), at=2))

    assert list(snapshot.gpus) == [A.id, B.id]
    assert snapshot.gpus[B.id] is first.gpus[B.id]


def test_connections_are_learned_and_kept() -> None:
    """A reported connection stays known when a later report leaves it out."""
    near, far = Connection(PciPath.SWITCH), Connection(PciPath.SYSTEM)
    first, second = frozenset((A.id, B.id)), frozenset((B.id, gpu(2).id))
    read = TopologyRead(Topology({first: near}))
    snapshot, events = reduce(NODE, read)
    later, _ = reduce(snapshot, TopologyRead(Topology({second: far})))

    assert events == (read,)
    assert later.topology == Topology({first: near, second: far})
    assert snapshot.gpus is NODE.gpus
    assert snapshot.offers is NODE.offers


def test_a_new_description_keeps_what_is_known() -> None:
    """A GPU with a new description (another index) keeps shares, leases, verdict."""
    moved = replace(A, index=5)
    snapshot, events = reduce(LEASED, GpusFound((moved,), at=20))

    assert list(snapshot.gpus) == [B.id, A.id]
    assert snapshot.gpus[A.id] == replace(LEASED.gpus[A.id], gpu=moved)
    assert events == (GpusFound((moved,), at=20),)


def test_the_first_reason_of_a_fault_stands() -> None:
    """While a GPU is out of service, later faults change neither reason nor time."""
    broken, events = reduce(NODE, GpuFaulted(A.id, "XID 79", at=5))
    again, no_news = reduce(broken, GpuFaulted(A.id, "XID 48", at=6))

    assert broken.gpus[A.id].verdict == Verdict(healthy=False, since=5, reason="XID 79")
    assert events == (GpuFaulted(A.id, "XID 79", at=5),)
    assert again is broken
    assert no_news == ()


def test_a_recovered_gpu_is_healthy_since_then() -> None:
    """Recovery ends the fault; its reason is in the event, not in the verdict."""
    broken = after(GpuFaulted(A.id, "XID 79", at=5), since=NODE)
    snapshot, events = reduce(broken, GpuRecovered(A.id, "quiet", at=9))

    assert snapshot.gpus[A.id].verdict == Verdict(healthy=True, since=9)
    assert events == (GpuRecovered(A.id, "quiet", at=9),)


def test_a_fault_touches_no_other_gpu() -> None:
    """Everything but the GPU of a fault stays the same object: its readers are not woken."""
    snapshot, _ = reduce(LEASED, GpuFaulted(A.id, "XID 79", at=5))

    assert snapshot.gpus[B.id] is LEASED.gpus[B.id]
    assert snapshot.offers is LEASED.offers
    assert leases(snapshot) == leases(LEASED)


# --- facts of nothing new -------------------------------------------------------------------------

NOWHERE = gpu(9)

ELSEWHERE = LeasesObserved({share(NOWHERE, 0).id: ALICE}, at=9)
READ = TopologyRead(Topology({frozenset((A.id, B.id)): Connection(PciPath.SWITCH)}))
STALE: list[tuple[str, Snapshot, Fact]] = [
    ("found again", NODE, FOUND),
    ("found nothing", NODE, GpusFound((), at=9)),
    ("recovered while healthy", NODE, GpuRecovered(A.id, "quiet", at=9)),
    ("fault of an unknown GPU", NODE, GpuFaulted(NOWHERE.id, "XID 79", at=9)),
    ("recovery of an unknown GPU", NODE, GpuRecovered(NOWHERE.id, "quiet", at=9)),
    ("offered again", NODE, OFFERED),
    ("offered shares of an unknown GPU", NODE, offer(*OFFERED.shares, share(NOWHERE, 0))),
    ("granted nothing", NODE, SharesClaimed((), at=9)),
    ("granted of an unknown GPU", NODE, SharesClaimed((share(NOWHERE, 0),), at=9)),
    ("awaited by nobody", NODE, SharesPending(A_SHARES[:1], at=9)),
    ("awaited of an unknown GPU", NODE, SharesPending((share(NOWHERE, 0),), at=9)),
    ("granted once more at the same time", LEASED, SharesClaimed(A_SHARES[:2], at=10)),
    ("released what nobody holds", LEASED, SharesReleased(B_SHARES, at=9)),
    ("released of an unknown GPU", LEASED, SharesReleased((share(NOWHERE, 0),), at=9)),
    ("the same connections", after(READ, since=NODE), READ),
    ("no connections", after(READ, since=NODE), TopologyRead(Topology())),
    ("the same kubelet", after(KubeletStarted((0, 0, 1)), since=NODE), KubeletStarted((0, 0, 1))),
    ("observed what is known", TOLD, LeasesObserved({}, at=9)),
    ("observed an unknown GPU again", after(ELSEWHERE, since=TOLD), ELSEWHERE),
    ("observed a grant too early", after(NOTHING, since=LEASED), LeasesObserved({}, at=29.9)),
]


@pytest.mark.parametrize(
    ("snapshot", "fact"), [row[1:] for row in STALE], ids=[r[0] for r in STALE]
)
def test_nothing_new_gives_the_same_object(snapshot: Snapshot, fact: Fact) -> None:
    """A fact without a change returns the same snapshot object and no events."""
    following, events = reduce(snapshot, fact)

    assert following is snapshot
    assert events == ()


# --- offers ---------------------------------------------------------------------------------------


def test_offered_shares_are_grouped_by_gpu() -> None:
    """An offer has its shares by id and by GPU, each GPU its own."""
    snapshot, events = reduce(after(FOUND), OFFERED)
    offered = snapshot.offers[METAGPU]

    assert offered.by_gpu == {A.id: A_SHARES, B.id: B_SHARES}
    assert list(offered.shares.values()) == [*A_SHARES, *B_SHARES]
    assert snapshot.gpus[A.id].shares == A_SHARES
    assert events == (OFFERED,)


def test_a_resource_without_shares_is_an_offer_too() -> None:
    """A resource that no GPU serves is known, with nothing in it."""
    snapshot = after(SharesOffered((METAGPU,), ()))

    assert snapshot.offers[METAGPU].shares == {}
    assert snapshot.offers[METAGPU].by_gpu == {}


def test_an_untouched_offer_stays_the_same_object() -> None:
    """A change of one resource keeps the other Offers and GPU states as objects."""
    other = share(B, 7, resource="example.com/other")
    before = after(offer(*A_SHARES, other), since=after(FOUND))
    snapshot, _ = reduce(before, offer(*A_SHARES[:1], other))

    assert snapshot.offers[other.resource] is before.offers[other.resource]
    assert snapshot.gpus[B.id] is before.gpus[B.id]
    assert snapshot.offers[METAGPU].by_gpu == {A.id: A_SHARES[:1]}


def test_a_resource_taken_back_is_gone() -> None:
    """Shares that the next offer leaves out are no longer on offer."""
    snapshot = after(SharesOffered((), ()), since=NODE)

    assert snapshot.offers == {}
    assert snapshot.gpus[A.id].shares == ()


# --- GPUs that cannot be read ---------------------------------------------------------------------


def test_an_unreadable_gpu_keeps_its_time() -> None:
    """A GPU that cannot be read has its present reason, and the time since which it cannot."""
    first = after(UnreadableGpusFound({1: "it hangs", 2: "it hangs"}, at=5))
    following, events = reduce(first, UnreadableGpusFound({1: "it is lost"}, at=6))

    assert {
        i: (verdict.reason, verdict.since) for i, verdict in following.unreadable_gpus.items()
    } == {1: ("it is lost", 5)}
    assert events == (UnreadableGpusFound({1: "it is lost"}, at=6),)
    assert reduce(following, UnreadableGpusFound({1: "it is lost"}, at=7)) == (following, ())


def test_a_turn_is_of_the_gpus_that_are_named() -> None:
    """A turn begins, is no change when told again, and ends; a GPU that is not known has none."""
    turn = OfferTurn("fraction", since=3)
    begun = after(TurnsChanged({A.id: turn, gpu(9).id: turn}), since=NODE)
    assert (begun.gpus[A.id].turn, begun.gpus[B.id].turn) == (turn, None)
    assert reduce(begun, TurnsChanged({A.id: turn})) == (begun, ())
    assert after(TurnsChanged({A.id: None}), since=begun).gpus[A.id].turn is None


FOUND_PLUGIN = CompetingPluginFound(METAGPU, "a plugin")
PROBLEM = RegistrationProblemFound(METAGPU, "refused")


@pytest.mark.parametrize(
    ("found", "gone", "field"),
    [
        (FOUND_PLUGIN, CompetingPluginGone(METAGPU), "competing_plugins"),
        (PROBLEM, RegistrationProblemGone(METAGPU), "registration_problems"),
    ],
)
def test_a_problem_of_a_resource_is_known_until_it_is_gone(
    found: Fact, gone: Fact, field: str
) -> None:
    """The same problem again is no news, and neither is the end of none."""
    known, events = reduce(NODE, found)
    assert list(getattr(known, field)) == [METAGPU]
    assert events == (found,)
    assert reduce(known, found) == (known, ())
    ended, events = reduce(known, gone)
    assert (getattr(ended, field), events) == ({}, (gone,))
    assert reduce(ended, gone) == (ended, ())


def test_an_equal_list_of_pods_is_no_news_but_of_its_age() -> None:
    """Readers of the pods are not woken by it."""
    pods = (KnownPod("uid", "team", "alice", "Running"),)
    known = after(PodsListed(pods, asked=3), since=NODE)
    assert reduce(known, PodsListed(pods, asked=3))[0] is known
    later, events = reduce(known, PodsListed(pods, asked=4))
    assert (later.pods.asked, events) == (4, ())
    over = after(PodsListed((replace(pods[0], phase="Succeeded"),)), since=known)
    gone = PodsListed((), asked=5)
    assert [reduce(each, gone)[1][1:] for each in (known, over)] == [(PodEnded(pods[0]),), ()]

"""Who may give shares of a GPU: cordons, backends that are not ready, and cleaning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.facts import (
    BackendResumed,
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpuFaulted,
    GpuKept,
    GpuLeft,
    GpuReturned,
    GpusFound,
    GpuUncordoned,
    InstanceFaulted,
    InstanceRecovered,
    LeasesObserved,
    SharesGranted,
    SharesOffered,
    SharesReleased,
    StockTold,
)
from metagpu.core.model import FOREIGN, Holder, Made, Pause, ResourceName, ShareId, Stock
from metagpu.core.reduce import reduce
from metagpu.core.snapshot import GpuState, Snapshot
from tests.build import METAGPU, after, gpu, offer, share

A, B = gpu(0), gpu(1)
FRACTIONS = tuple(share(A, number) for number in range(2))
HOLDER = Holder("default", "pod", "main")
UNITS = tuple(share(A, number, backend="mps", resource="x/mps") for number in range(2))
MPS = ResourceName("x/mps")
KEPT = GpuKept(A.id, "mps", readies=True, cleans=True, at=5)
READY = BackendResumed(A.id, "mps", at=6)
OFFERED = offer(*FRACTIONS, *UNITS)
BEGUN = after(GpusFound((A, B), at=1), KEPT, OFFERED)
NODE = after(READY, since=BEGUN)
HELD = after(SharesGranted(UNITS[:1], at=10), since=NODE)
DIRTY = after(SharesReleased(UNITS[:1], at=20), since=HELD)


def state(snapshot: Snapshot) -> GpuState:
    """Give what is known of the first GPU."""
    return snapshot.gpus[A.id]


# --- readiness ------------------------------------------------------------------------------------


def test_what_is_not_ready_is_never_on_offer() -> None:
    """A backend that makes its GPU ready first begins suspended; others are not touched."""
    assert state(BEGUN).suspended == {"mps": Pause("it is being made ready", since=5)}
    assert state(BEGUN).shut == {unit.id for unit in UNITS}
    assert state(BEGUN).free(METAGPU) == 2
    assert state(BEGUN).free(MPS) == 0
    assert not state(BEGUN).open_to("mps")
    assert state(BEGUN).open_to("fraction")

    assert state(NODE).suspended == {}
    assert state(NODE).shut == frozenset()
    assert state(NODE).free(MPS) == 2


def test_a_backend_that_need_not_be_ready_is_at_once() -> None:
    """Most backends begin with all their shares on offer."""
    fact = GpuKept(A.id, "fraction", readies=False, cleans=False, at=5)

    assert reduce(NODE, fact) == (NODE, ())


def test_a_suspended_backend_keeps_its_leases() -> None:
    """What is held stays held; nothing else of the backend is given, held ids included."""
    snapshot, news = reduce(HELD, BackendSuspended(A.id, "mps", "its daemon died", at=12))

    assert state(snapshot).leases == state(HELD).leases
    assert state(snapshot).owner == "mps"
    assert state(snapshot).shut == {part.id for part in (*UNITS, *FRACTIONS)}
    assert news == (BackendSuspended(A.id, "mps", "its daemon died", at=12),)


def test_a_suspension_goes_on_with_its_latest_reason() -> None:
    """The first time and the latest reason of a suspension stand."""
    snapshot = after(BackendSuspended(A.id, "mps", "its daemon died", at=12), since=BEGUN)

    assert state(snapshot).suspended == {"mps": Pause("its daemon died", since=5)}


def test_an_offer_laid_anew_resumes_nobody() -> None:
    """A reload that changes shares leaves suspensions and cordons as they are."""
    paused = after(GpuCordoned(A.id, "riser", at=7), since=BEGUN)
    snapshot = after(offer(*UNITS[:1]), since=paused)

    assert state(snapshot).suspended == state(BEGUN).suspended
    assert state(snapshot).cordon == Pause("riser", since=7)


# --- cleaning -------------------------------------------------------------------------------------


def test_a_gpu_stays_its_backends_until_it_is_clean() -> None:
    """After the last lease the others wait for the backend's word; its own shares do not."""
    assert state(DIRTY).owner == "mps"
    assert state(DIRTY).cleaning == {"mps": 20}
    assert state(DIRTY).withheld == {part.id for part in FRACTIONS}
    assert state(DIRTY).free(MPS) == 2
    assert state(DIRTY).open_to("mps")

    clean, news = reduce(DIRTY, GpuReturned(A.id, "mps", since=20, at=25))
    assert state(clean).owner is None
    assert state(clean).withheld == frozenset()
    assert news == (GpuReturned(A.id, "mps", since=20, at=25),)


def test_only_the_last_lease_begins_a_cleaning() -> None:
    """While the backend has another lease of the GPU there is nothing to clean."""
    two = after(SharesGranted(UNITS, at=10), since=NODE)
    one = after(SharesReleased(UNITS[:1], at=20), since=two)

    assert state(one).cleaning == {}
    assert state(one).owner == "mps"


def test_a_gpu_of_a_backend_that_does_not_clean_is_free_at_once() -> None:
    """Fractions leave nothing behind."""
    held = after(SharesGranted(FRACTIONS[:1], at=10), since=NODE)
    freed = after(SharesReleased(FRACTIONS[:1], at=20), since=held)

    assert state(freed).owner is None
    assert state(freed).cleaning == {}


def test_a_share_given_meanwhile_makes_it_owned_again() -> None:
    """A grant of the owner ends the cleaning, and what is said about that one is not heard."""
    again = after(SharesGranted(UNITS[1:], at=21), since=DIRTY)
    late = GpuReturned(A.id, "mps", since=20, at=22)

    assert state(again).cleaning == {}
    assert state(again).withheld == {part.id for part in FRACTIONS}
    assert reduce(again, late) == (again, ())

    dirty = after(SharesReleased(UNITS[1:], at=23), since=again)
    assert state(dirty).cleaning == {"mps": 23}
    assert reduce(dirty, late) == (dirty, ())


def test_a_failed_grant_is_cleaned_after_too() -> None:
    """A grant that was taken back may have changed the hardware already."""
    claimed = after(SharesGranted(UNITS[:1], at=10), since=NODE)
    taken_back = after(SharesReleased(UNITS[:1], at=10.5), since=claimed)

    assert state(taken_back).cleaning == {"mps": 10.5}


def test_a_stranger_does_not_end_a_cleaning() -> None:
    """What another plugin gives of a GPU that is being cleaned says nothing of its being clean."""
    other = FRACTIONS[0].id
    seen = LeasesObserved(
        {other: Holder("team", "eve", "main")}, at=21, resources={other: ResourceName("x/y")}
    )
    snapshot = after(seen, since=DIRTY)

    assert state(snapshot).owner == FOREIGN
    assert state(snapshot).cleaning == {"mps": 20}
    gone = after(LeasesObserved({}, at=22), since=snapshot)
    assert state(gone).owner == "mps"
    assert state(gone).withheld == {part.id for part in FRACTIONS}


def test_a_backend_that_leaves_is_waited_for_no_more() -> None:
    """Who does not keep the GPU any more is neither made ready nor cleans, now or later."""
    left = GpuLeft(A.id, "mps", at=30)

    assert state(after(left, since=DIRTY)).owner is None
    assert state(after(left, since=DIRTY)).withheld == frozenset()
    assert state(after(left, since=BEGUN)).suspended == {}

    released = after(left, SharesReleased(UNITS[:1], at=31), since=HELD)
    assert state(released).owner is None


def test_a_cleaning_outlives_the_offer() -> None:
    """A GPU that is cut anew while it is being cleaned is nobody else's before it is clean."""
    recut = after(offer(*FRACTIONS), since=DIRTY)

    assert state(recut).withheld == {part.id for part in FRACTIONS}
    granted_beside = after(offer(*FRACTIONS), SharesReleased(UNITS[:1], at=20), since=HELD)
    assert state(granted_beside).withheld == {part.id for part in FRACTIONS}
    clean = after(GpuReturned(A.id, "mps", since=20, at=25), since=recut)
    assert state(clean).withheld == frozenset()


# --- cordon ---------------------------------------------------------------------------------------


def test_a_cordon_shuts_what_is_not_held() -> None:
    """Nothing new is given of a cordoned GPU; what is held stays listed as it was."""
    snapshot, news = reduce(HELD, GpuCordoned(A.id, "riser", at=12))

    assert state(snapshot).cordon == Pause("riser", since=12)
    assert state(snapshot).shut == {part.id for part in (*FRACTIONS, *UNITS)} - {UNITS[0].id}
    assert state(snapshot).free(MPS) == 0
    assert not state(snapshot).open_to("mps")
    assert snapshot.gpus[B.id] is HELD.gpus[B.id]
    assert news == (GpuCordoned(A.id, "riser", at=12),)

    lifted = after(GpuUncordoned(A.id, at=15), since=snapshot)
    assert state(lifted) == state(HELD)


def test_a_cordon_that_is_told_again_takes_its_new_reason() -> None:
    """The first time and the latest reason of a cordon stand."""
    snapshot = after(GpuCordoned(A.id, "riser", at=12), GpuCordoned(A.id, "fan", at=14), since=NODE)

    assert state(snapshot).cordon == Pause("fan", since=12)


# --- nothing new ----------------------------------------------------------------------------------

PAUSED = after(
    GpuCordoned(A.id, "riser", at=7), BackendSuspended(A.id, "mps", "died", at=8), since=DIRTY
)
STALE: list[tuple[str, Snapshot, Fact]] = [
    ("cordoned already", PAUSED, GpuCordoned(A.id, "riser", at=9)),
    ("not cordoned", NODE, GpuUncordoned(A.id, at=9)),
    ("suspended already", PAUSED, BackendSuspended(A.id, "mps", "died", at=9)),
    ("not suspended", NODE, BackendResumed(A.id, "mps", at=9)),
    ("kept already", BEGUN, KEPT),
    ("never kept", NODE, GpuLeft(A.id, "slice", at=9)),
    ("not being cleaned", NODE, GpuReturned(A.id, "mps", since=1, at=9)),
    ("cleaned by another", DIRTY, GpuReturned(A.id, "fraction", since=20, at=21)),
    ("an unknown GPU", NODE, GpuCordoned(gpu(7).id, "riser", at=9)),
]


@pytest.mark.parametrize(
    ("snapshot", "fact"), [row[1:] for row in STALE], ids=[row[0] for row in STALE]
)
def test_nothing_new_gives_the_same_object(snapshot: Snapshot, fact: Fact) -> None:
    """A fact that says nothing new gives the very same snapshot and no news."""
    following, news = reduce(snapshot, fact)

    assert following is snapshot
    assert news == ()


def test_a_fault_and_a_pause_do_not_mix() -> None:
    """A GPU that recovers is as suspended and cordoned as before."""
    snapshot = after(GpuFaulted(A.id, "XID 79", at=9), since=PAUSED)

    assert state(snapshot).suspended == state(PAUSED).suspended
    assert state(snapshot).cordon == state(PAUSED).cordon
    assert state(after(SharesOffered((), ()), since=snapshot)).cordon == state(PAUSED).cordon


# --- stock ----------------------------------------------------------------------------------------

STOCK = Stock({UNITS[0].id: Made("MIG-x", 1, 0)}, blocked={"m01": "somebody is there"})


def test_stock_is_known_until_its_backend_leaves() -> None:
    """What a backend tells replaces what it told before, and goes with it."""
    told = after(StockTold(A.id, "mps", STOCK, at=7), since=NODE)
    again, no_news = reduce(told, StockTold(A.id, "mps", STOCK, at=8))
    less = after(StockTold(A.id, "mps", Stock(), at=9), since=told)

    assert state(told).stocks == {"mps": STOCK}
    assert state(told).withheld == {unit.id for unit in UNITS}
    assert again is told
    assert no_news == ()
    assert state(less) == state(NODE)
    assert state(after(GpuLeft(A.id, "mps", at=9), since=told)).stocks == {}


def test_stock_that_is_idle_or_held_is_in_nobodys_way() -> None:
    """What was made is free for its share while it is idle, and its holder's while it is held."""
    made = Stock({UNITS[0].id: Made("MIG-x", 1, 0)})
    idle = Stock({UNITS[0].id: Made("MIG-x", 1, 0, idle=True)})

    assert state(after(StockTold(A.id, "mps", made, at=7), since=NODE)).withheld == {UNITS[0].id}
    assert not state(after(StockTold(A.id, "mps", idle, at=7), since=NODE)).withheld
    held = after(StockTold(A.id, "mps", made, at=7), since=HELD)
    assert state(held).withheld == {fraction.id for fraction in FRACTIONS}


def test_shares_that_are_paused_are_shut_held_or_not() -> None:
    """What a backend gives nothing new of is listed Unhealthy, and is in the way of nobody."""
    paused = Stock(paused={UNITS[0].id: "it hangs"})
    idle = state(after(StockTold(A.id, "mps", paused, at=7), since=NODE))
    held = state(after(StockTold(A.id, "mps", paused, at=7), since=HELD))

    assert idle.shut == {UNITS[0].id}
    assert not idle.withheld
    assert idle.paused == {UNITS[0].id: "it hangs"}
    assert UNITS[0].id in held.leases
    assert held.shut == held.withheld | {UNITS[0].id}


def test_what_is_held_elsewhere_is_known_once_the_kubelet_has_told() -> None:
    """MIG devices that another plugin gave are remembered; other devices are nobody's business."""
    held = {ShareId("MIG-x"): HOLDER, ShareId("rdma0"): HOLDER}

    assert state(NODE).elsewhere is None
    assert state(after(LeasesObserved({}, at=9), since=NODE)).elsewhere == frozenset()
    assert state(after(LeasesObserved(held, at=9), since=NODE)).elsewhere == frozenset(["MIG-x"])


# --- verdicts on MIG devices ----------------------------------------------------------------------

DEVICES = ("MIG-a", "MIG-b", "MIG-c")
MANY = tuple(share(A, number, backend="mig", resource="x/mig") for number in range(4))
ON_OFFER = after(GpusFound((A, B), at=1), offer(*MANY))

stocks = st.dictionaries(st.sampled_from([it.id for it in MANY]), st.sampled_from(DEVICES)).map(
    lambda made: StockTold(
        A.id, "mig", Stock({i: Made(device, 1, 0, idle=True) for i, device in made.items()}), at=5
    )
)
verdicts = st.builds(
    lambda kind, device: kind(A.id, device, "XID 94", at=6),
    st.sampled_from((InstanceFaulted, InstanceRecovered)),
    st.sampled_from(DEVICES),
)


@given(st.lists(stocks | verdicts, max_size=20))
def test_a_fault_of_a_device_is_of_its_shares_alone(told: list[Fact]) -> None:
    """Whatever is made, faulted and mended in whatever order: only what stands for it is shut."""
    made: dict[ShareId, str] = {}
    ill: set[str] = set()
    for fact in told:
        match fact:
            case StockTold():
                made = {i: it.device for i, it in fact.stock.made.items()}
            case InstanceFaulted():
                ill.add(fact.device)
            case InstanceRecovered():
                ill.discard(fact.device)

    snapshot = after(*told, since=ON_OFFER)
    expected = {i for i, device in made.items() if device in ill}
    assert state(snapshot).shut == expected
    assert state(snapshot).broken == expected
    assert state(snapshot).verdict.healthy
    assert snapshot.gpus[B.id] is ON_OFFER.gpus[B.id]
    assert all((state(snapshot).fault_of(it.id) is None) == (it.id not in expected) for it in MANY)


def test_the_first_fault_of_a_device_stands() -> None:
    """A second one says nothing new; one that is over, or of no device known, neither."""
    first = InstanceFaulted(A.id, "MIG-a", "XID 94", at=6)
    faulted = after(first, since=ON_OFFER)

    assert reduce(faulted, InstanceFaulted(A.id, "MIG-a", "XID 31", at=7)) == (faulted, ())
    assert reduce(faulted, InstanceRecovered(A.id, "MIG-b", "gone", at=7)) == (faulted, ())
    assert state(faulted).faults["MIG-a"].reason == "XID 94"


def test_a_held_share_that_is_broken_is_listed_so() -> None:
    """Unlike what is withheld, a broken device is Unhealthy for its holder too."""
    made = Stock({MANY[0].id: Made("MIG-a", 1, 0)})
    snapshot = after(
        StockTold(A.id, "mig", made, at=5),
        SharesGranted(MANY[:1], at=6),
        InstanceFaulted(A.id, "MIG-a", "XID 94", at=7),
        since=ON_OFFER,
    )

    assert state(snapshot).shut == {MANY[0].id}
    assert state(snapshot).leases

"""Cordons, suspended backends and cleanups of a GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.availability.conflict import conflicting_shares, shares_on_faulty_devices
from metagpu.core.availability.reasons import availability_of, count_free, open_to
from metagpu.core.model.shares import (
    UNKNOWN_BACKEND,
    CordonSource,
    HardwareDevice,
    Holder,
    Pause,
    ProvisionedState,
    ResourceName,
    ShareId,
)
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import (
    BackendAttached,
    BackendDetached,
    BackendResumed,
    BackendSuspended,
    CleanupFinished,
    Fact,
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    GpuUncordoned,
    InstanceFaulted,
    InstanceRecovered,
    LeasesObserved,
    ProvisioningReported,
    SharesClaimed,
    SharesOffered,
    SharesReleased,
)
from metagpu.core.state.reduce import reduce
from tests.rigs.build import METAGPU, after, gpu, offer, share

A, B = gpu(0), gpu(1)
FRACTIONS = tuple(share(A, number) for number in range(2))
HOLDER = Holder("default", "pod", "main")
UNITS = tuple(share(A, number, backend="mps", resource="x/mps") for number in range(2))
MPS = ResourceName("x/mps")
KEPT = BackendAttached(A.id, "mps", needs_setup=True, needs_cleanup=True, at=5)
READY = BackendResumed(A.id, "mps", at=6)
OFFERED = offer(*FRACTIONS, *UNITS)
BEGUN = after(GpusFound((A, B), at=1), KEPT, OFFERED)
NODE = after(READY, since=BEGUN)
HELD = after(SharesClaimed(UNITS[:1], at=10), since=NODE)
DIRTY = after(SharesReleased(UNITS[:1], at=20), since=HELD)


def state(snapshot: Snapshot) -> GpuState:
    """Return the state of the first GPU."""
    return snapshot.gpus[A.id]


def test_what_follows_from_a_state_is_computed_once() -> None:
    """The unhealthy shares of one state are one object; another state has its own."""
    suspended = state(after(BackendSuspended(A.id, "mps", "no program", at=7), since=NODE))

    assert availability_of(suspended).unlisted is availability_of(suspended).unlisted
    assert availability_of(suspended).unlisted == {share.id for share in UNITS}
    assert availability_of(state(NODE)).unlisted == set()


def test_a_state_has_few_fields_and_few_properties() -> None:
    """Conclusions about shares are in `core/availability`, not in properties of the state."""
    fields = GpuState.__struct_fields__
    own = [
        variable
        for variable in vars(GpuState)
        if not variable.startswith("__") and variable not in fields
    ]

    assert len(fields) <= 16
    assert len(own) <= 8


# --- readiness ------------------------------------------------------------------------------------


def test_a_backend_with_setup_is_not_on_offer_before_it_is_ready() -> None:
    """A backend that needs setup begins suspended; others are not touched."""
    assert state(BEGUN).suspended == {"mps": Pause("it is being made ready", since=5)}
    assert availability_of(state(BEGUN)).unlisted == {unit.id for unit in UNITS}
    assert count_free(state(BEGUN), METAGPU) == 2
    assert count_free(state(BEGUN), MPS) == 0
    assert not open_to(state(BEGUN), "mps")
    assert open_to(state(BEGUN), "fraction")

    assert state(NODE).suspended == {}
    assert availability_of(state(NODE)).unlisted == frozenset()
    assert count_free(state(NODE), MPS) == 2


def test_a_backend_that_need_not_be_ready_is_at_once() -> None:
    """A backend without setup has all its shares on offer at once."""
    fact = BackendAttached(A.id, "fraction", needs_setup=False, needs_cleanup=False, at=5)

    assert reduce(NODE, fact) == (NODE, ())


def test_a_suspended_backend_keeps_its_leases() -> None:
    """Leases stay; the backend grants nothing else, leased ids included."""
    snapshot, events = reduce(HELD, BackendSuspended(A.id, "mps", "its daemon died", at=12))

    assert state(snapshot).leases == state(HELD).leases
    assert state(snapshot).owner == "mps"
    assert availability_of(state(snapshot)).unlisted == {part.id for part in (*UNITS, *FRACTIONS)}
    assert events == (BackendSuspended(A.id, "mps", "its daemon died", at=12),)


def test_a_suspension_goes_on_with_its_latest_reason() -> None:
    """A suspension has its first time and its latest reason."""
    snapshot = after(BackendSuspended(A.id, "mps", "its daemon died", at=12), since=BEGUN)

    assert state(snapshot).suspended == {"mps": Pause("its daemon died", since=5)}


def test_a_new_offer_resumes_no_backend() -> None:
    """A reload that changes shares leaves suspensions and cordons as they are."""
    paused = after(GpuCordoned(A.id, "riser", at=7), since=BEGUN)
    snapshot = after(offer(*UNITS[:1]), since=paused)

    assert state(snapshot).suspended == state(BEGUN).suspended
    assert state(snapshot).cordon == Pause("riser", since=7)


# --- cleaning -------------------------------------------------------------------------------------


def test_a_gpu_stays_its_backends_until_it_is_clean() -> None:
    """After its last lease a GPU stays with its backend until the cleanup is reported."""
    assert state(DIRTY).owner == "mps"
    assert state(DIRTY).cleanup.since == {"mps": 20}
    assert conflicting_shares(state(DIRTY)) == {part.id for part in FRACTIONS}
    assert count_free(state(DIRTY), MPS) == 2
    assert open_to(state(DIRTY), "mps")

    clean, events = reduce(DIRTY, CleanupFinished(A.id, "mps", since=20, at=25))
    assert state(clean).owner is None
    assert conflicting_shares(state(clean)) == frozenset()
    assert events == (CleanupFinished(A.id, "mps", since=20, at=25),)


def test_only_the_last_lease_begins_a_cleaning() -> None:
    """While the backend has another lease of the GPU there is nothing to clean."""
    two = after(SharesClaimed(UNITS, at=10), since=NODE)
    one = after(SharesReleased(UNITS[:1], at=20), since=two)

    assert state(one).cleanup.since == {}
    assert state(one).owner == "mps"


def test_a_gpu_of_a_backend_that_does_not_clean_is_free_at_once() -> None:
    """A GPU of a backend without cleanup is free at once."""
    held = after(SharesClaimed(FRACTIONS[:1], at=10), since=NODE)
    freed = after(SharesReleased(FRACTIONS[:1], at=20), since=held)

    assert state(freed).owner is None
    assert state(freed).cleanup.since == {}


def test_a_grant_during_a_cleanup_ends_it() -> None:
    """A grant of the owner ends the cleanup; a late report about it has no effect."""
    again = after(SharesClaimed(UNITS[1:], at=21), since=DIRTY)
    late = CleanupFinished(A.id, "mps", since=20, at=22)

    assert state(again).cleanup.since == {}
    assert conflicting_shares(state(again)) == {part.id for part in FRACTIONS}
    assert reduce(again, late) == (again, ())

    dirty = after(SharesReleased(UNITS[1:], at=23), since=again)
    assert state(dirty).cleanup.since == {"mps": 23}
    assert reduce(dirty, late) == (dirty, ())


def test_a_failed_grant_is_cleaned_after_too() -> None:
    """A grant that was taken back may have changed the hardware already."""
    claimed = after(SharesClaimed(UNITS[:1], at=10), since=NODE)
    taken_back = after(SharesReleased(UNITS[:1], at=10.5), since=claimed)

    assert state(taken_back).cleanup.since == {"mps": 10.5}


def test_a_lease_of_another_plugin_does_not_end_a_cleanup() -> None:
    """A lease of another plugin does not end the cleanup of a GPU."""
    other = FRACTIONS[0].id
    seen = LeasesObserved(
        {other: Holder("team", "eve", "main")}, at=21, resources={other: ResourceName("x/y")}
    )
    snapshot = after(seen, since=DIRTY)

    assert state(snapshot).owner == UNKNOWN_BACKEND
    assert state(snapshot).cleanup.since == {"mps": 20}
    gone = after(LeasesObserved({}, at=22), since=snapshot)
    assert state(gone).owner == "mps"
    assert conflicting_shares(state(gone)) == {part.id for part in FRACTIONS}


def test_a_backend_that_leaves_is_waited_for_no_more() -> None:
    """A detached backend has no setup and no cleanup, now or later."""
    left = BackendDetached(A.id, "mps", at=30)

    assert state(after(left, since=DIRTY)).owner is None
    assert conflicting_shares(state(after(left, since=DIRTY))) == frozenset()
    assert state(after(left, since=BEGUN)).suspended == {}

    released = after(left, SharesReleased(UNITS[:1], at=31), since=HELD)
    assert state(released).owner is None


def test_a_cleaning_outlives_the_offer() -> None:
    """A GPU with new shares during a cleanup stays with its owner until the end."""
    recut = after(offer(*FRACTIONS), since=DIRTY)

    assert conflicting_shares(state(recut)) == {part.id for part in FRACTIONS}
    granted_beside = after(offer(*FRACTIONS), SharesReleased(UNITS[:1], at=20), since=HELD)
    assert conflicting_shares(state(granted_beside)) == {part.id for part in FRACTIONS}
    clean = after(CleanupFinished(A.id, "mps", since=20, at=25), since=recut)
    assert conflicting_shares(state(clean)) == frozenset()


# --- cordon ---------------------------------------------------------------------------------------


def test_a_cordon_closes_shares_without_a_lease() -> None:
    """A cordoned GPU grants nothing new; its leased shares stay listed as they were."""
    snapshot, events = reduce(HELD, GpuCordoned(A.id, "riser", at=12))

    assert state(snapshot).cordon == Pause("riser", since=12)
    assert availability_of(state(snapshot)).unlisted == {
        part.id for part in (*FRACTIONS, *UNITS)
    } - {UNITS[0].id}
    assert count_free(state(snapshot), MPS) == 0
    assert not open_to(state(snapshot), "mps")
    assert snapshot.gpus[B.id] is HELD.gpus[B.id]
    assert events == (GpuCordoned(A.id, "riser", at=12),)

    lifted = after(GpuUncordoned(A.id, at=15), since=snapshot)
    assert state(lifted) == state(HELD)


def test_a_repeated_cordon_takes_its_new_reason() -> None:
    """A cordon has its first time and its latest reason."""
    snapshot = after(GpuCordoned(A.id, "riser", at=12), GpuCordoned(A.id, "fan", at=14), since=NODE)

    assert state(snapshot).cordon == Pause("fan", since=12)


def test_a_source_lifts_its_own_cordon_alone() -> None:
    """The end of a driver upgrade leaves an operator's cordon, and the other way round."""
    upgrade = CordonSource.DRIVER_UPGRADE
    both = after(
        GpuCordoned(A.id, "upgrade", 12, upgrade), GpuCordoned(A.id, "fan", at=14), since=NODE
    )
    upgraded = after(GpuUncordoned(A.id, 15, upgrade), since=both)
    repaired = after(GpuUncordoned(A.id, 15), since=both)

    assert state(both).cordon == state(upgraded).cordon == Pause("fan", since=14)
    assert state(repaired).cordon == Pause("upgrade", since=12)
    assert not open_to(state(repaired), "mps")
    assert after(GpuUncordoned(A.id, 16, upgrade), since=repaired).gpus == NODE.gpus


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
    ("never kept", NODE, BackendDetached(A.id, "slice", at=9)),
    ("not being cleaned", NODE, CleanupFinished(A.id, "mps", since=1, at=9)),
    ("cleaned by another", DIRTY, CleanupFinished(A.id, "fraction", since=20, at=21)),
    ("an unknown GPU", NODE, GpuCordoned(gpu(7).id, "riser", at=9)),
]


@pytest.mark.parametrize(
    ("snapshot", "fact"), [row[1:] for row in STALE], ids=[row[0] for row in STALE]
)
def test_nothing_new_gives_the_same_object(snapshot: Snapshot, fact: Fact) -> None:
    """A fact without a change returns the same snapshot object and no events."""
    following, events = reduce(snapshot, fact)

    assert following is snapshot
    assert events == ()


def test_a_fault_and_a_suspension_do_not_mix() -> None:
    """A GPU that recovers is as suspended and cordoned as before."""
    snapshot = after(GpuFaulted(A.id, "XID 79", at=9), since=PAUSED)

    assert state(snapshot).suspended == state(PAUSED).suspended
    assert state(snapshot).cordon == state(PAUSED).cordon
    assert state(after(SharesOffered((), ()), since=snapshot)).cordon == state(PAUSED).cordon


# --- provisioned state ----------------------------------------------------------------------------

PROVISIONED = ProvisionedState(
    {UNITS[0].id: HardwareDevice("MIG-x", 1, 0)}, blocked={"m01": "somebody is there"}
)


def test_provisioned_state_is_known_until_its_backend_leaves() -> None:
    """A backend's report replaces the last one, and is dropped with the backend."""
    reported = after(ProvisioningReported(A.id, "mps", PROVISIONED, at=7), since=NODE)
    again, no_events = reduce(reported, ProvisioningReported(A.id, "mps", PROVISIONED, at=8))
    less = after(ProvisioningReported(A.id, "mps", ProvisionedState(), at=9), since=reported)

    assert state(reported).provisioned == {"mps": PROVISIONED}
    assert conflicting_shares(state(reported)) == {unit.id for unit in UNITS}
    assert again is reported
    assert no_events == ()
    assert state(less) == state(NODE)
    assert state(after(BackendDetached(A.id, "mps", at=9), since=reported)).provisioned == {}


def test_an_idle_or_leased_device_blocks_no_share() -> None:
    """An idle device leaves its share available; a leased one is its holder's."""
    devices = ProvisionedState({UNITS[0].id: HardwareDevice("MIG-x", 1, 0)})
    idle = ProvisionedState({UNITS[0].id: HardwareDevice("MIG-x", 1, 0, idle=True)})

    assert conflicting_shares(
        state(after(ProvisioningReported(A.id, "mps", devices, at=7), since=NODE))
    ) == {UNITS[0].id}
    assert not conflicting_shares(
        state(after(ProvisioningReported(A.id, "mps", idle, at=7), since=NODE))
    )
    held = after(ProvisioningReported(A.id, "mps", devices, at=7), since=HELD)
    assert conflicting_shares(state(held)) == {fraction.id for fraction in FRACTIONS}


def test_paused_shares_are_unhealthy_with_and_without_a_lease() -> None:
    """A paused share is listed Unhealthy and conflicts with no other share."""
    paused = ProvisionedState(paused={UNITS[0].id: "it hangs"})
    idle = state(after(ProvisioningReported(A.id, "mps", paused, at=7), since=NODE))
    held = state(after(ProvisioningReported(A.id, "mps", paused, at=7), since=HELD))

    assert availability_of(idle).unlisted == {UNITS[0].id}
    assert not conflicting_shares(idle)
    assert idle.paused_shares == {UNITS[0].id: "it hangs"}
    assert UNITS[0].id in held.leases
    assert availability_of(held).unlisted == conflicting_shares(held) | {UNITS[0].id}


def test_mig_devices_of_other_plugins_are_known_from_the_kubelet() -> None:
    """MIG devices of other plugins are remembered; other devices are ignored."""
    held = {ShareId("MIG-x"): HOLDER, ShareId("rdma0"): HOLDER}

    assert state(NODE).kubelet.mig_devices_of_other_plugins is None
    assert (
        state(after(LeasesObserved({}, at=9), since=NODE)).kubelet.mig_devices_of_other_plugins
        == frozenset()
    )
    assert state(
        after(LeasesObserved(held, at=9), since=NODE)
    ).kubelet.mig_devices_of_other_plugins == frozenset(["MIG-x"])


# --- verdicts on MIG devices ----------------------------------------------------------------------

DEVICES = ("MIG-a", "MIG-b", "MIG-c")
MANY = tuple(share(A, number, backend="mig", resource="x/mig") for number in range(4))
ON_OFFER = after(GpusFound((A, B), at=1), offer(*MANY))

provisionings = st.dictionaries(
    st.sampled_from([other.id for other in MANY]), st.sampled_from(DEVICES)
).map(
    lambda devices: ProvisioningReported(
        A.id,
        "mig",
        ProvisionedState(
            {i: HardwareDevice(device, 1, 0, idle=True) for i, device in devices.items()}
        ),
        at=5,
    )
)
verdicts = st.builds(
    lambda kind, device: kind(A.id, device, "XID 94", at=6),
    st.sampled_from((InstanceFaulted, InstanceRecovered)),
    st.sampled_from(DEVICES),
)


@given(st.lists(provisionings | verdicts, max_size=20))
def test_a_fault_of_a_device_is_of_its_shares_alone(facts: list[Fact]) -> None:
    """A fault of a MIG device makes its share alone Unhealthy, in any order of facts."""
    devices: dict[ShareId, str] = {}
    ill: set[str] = set()
    for fact in facts:
        match fact:
            case ProvisioningReported():
                devices = {i: device.device for i, device in fact.provisioned.devices.items()}
            case InstanceFaulted():
                ill.add(fact.device)
            case InstanceRecovered():
                ill.discard(fact.device)

    snapshot = after(*facts, since=ON_OFFER)
    expected = {i for i, device in devices.items() if device in ill}
    assert availability_of(state(snapshot)).unlisted == expected
    assert shares_on_faulty_devices(state(snapshot)) == expected
    assert state(snapshot).verdict.healthy
    assert snapshot.gpus[B.id] is ON_OFFER.gpus[B.id]
    assert all(
        (state(snapshot).device_fault(other.id) is None) == (other.id not in expected)
        for other in MANY
    )


def test_the_first_fault_of_a_device_stands() -> None:
    """A second fault, one that is over, and one of an unknown device change nothing."""
    first = InstanceFaulted(A.id, "MIG-a", "XID 94", at=6)
    faulted = after(first, since=ON_OFFER)

    assert reduce(faulted, InstanceFaulted(A.id, "MIG-a", "XID 31", at=7)) == (faulted, ())
    assert reduce(faulted, InstanceRecovered(A.id, "MIG-b", "gone", at=7)) == (faulted, ())
    assert state(faulted).mig_faults["MIG-a"].reason == "XID 94"


def test_a_leased_share_on_a_faulty_device_is_unhealthy() -> None:
    """A share on a faulty device is Unhealthy for its holder too."""
    devices = ProvisionedState({MANY[0].id: HardwareDevice("MIG-a", 1, 0)})
    snapshot = after(
        ProvisioningReported(A.id, "mig", devices, at=5),
        SharesClaimed(MANY[:1], at=6),
        InstanceFaulted(A.id, "MIG-a", "XID 94", at=7),
        since=ON_OFFER,
    )

    assert availability_of(state(snapshot)).unlisted == {MANY[0].id}
    assert state(snapshot).leases

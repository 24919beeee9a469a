"""Whose an instance is, and what follows: the ledger alone, its time given by the test."""

import pytest

from metagpu.backends.mig import ledger
from metagpu.backends.mig.ledger import GRACE, LOOK, POLL
from metagpu.backends.mig.telling import stock
from metagpu.core.facts import SharesAwaited, SharesGranted, StockTold
from tests.backends.mig.gpus import instance
from tests.backends.mig.ledgers import (
    GPU,
    NOBODY,
    POD,
    TWO,
    it_uuid,
    ledger_of,
    observed,
    ours,
    share,
    state,
)


def test_what_appears_without_us_is_foreign() -> None:
    """After the first look, an instance that we did not make blocks its slots, for good."""
    it = ledger_of(observed())
    it.take_in([TWO], 100)
    it.see(NOBODY, 100 + 10 * GRACE)

    assert stock(it, alone=True).made == {}
    assert stock(it, alone=True).blocked == dict.fromkeys(
        ("s4", "s5"), "instance 2g.10gb@4 is there, which metagpu did not make"
    )
    assert not it.loose
    assert not it.unwanted(1e9)


def test_a_pod_whose_instance_is_gone_waits_when_it_starts_again() -> None:
    """Not before, as it may have been told a uuid; and after a failure not until its next start."""
    it = ledger_of(observed("2g.10gb@4"))
    it.take_in([], 6)
    assert not list(it.waiting())

    for at in (7, 8):
        it.state = state(observed("2g.10gb@4"), SharesAwaited((share("2g.10gb@4"),), at=at))
        [lease] = it.waiting()
        assert (lease.holder, lease.since) == (POD, at)
        it.note_failed(lease, "no")
        assert not list(it.waiting())


def test_what_is_found_at_the_start_is_ours_after_a_while() -> None:
    """It is blocked meanwhile, then idle; the kubelet must have told of all pods before."""
    it = ledger_of(looked=False)
    it.take_in([TWO], 0)
    it.see(NOBODY, 2 * GRACE)
    assert it.found == {"2g.10gb@4": 2 * GRACE}
    assert "was found here" in stock(it, alone=True).blocked["s4"]

    it.state = state(observed())
    it.see(NOBODY, 3 * GRACE - 1)
    assert it.found
    it.see(NOBODY, 3 * GRACE)
    assert [made.idle for made in stock(it, alone=True).made.values()] == [True]


def test_a_program_keeps_what_was_found_from_being_ours() -> None:
    """Who runs a program on it may have made it: its time begins anew with the program's end."""
    it = ledger_of(observed(), looked=False)
    it.take_in([TWO], 0)
    it.see({5: [77]}, GRACE)
    it.see(NOBODY, 2 * GRACE - 1)

    assert it.found
    it.see(NOBODY, 2 * GRACE)
    assert not it.found


@pytest.mark.parametrize(
    "found",
    [
        instance(GPU, "4g.20gb@0"),
        instance(GPU, "2g.10gb@4", computes=2),
    ],
    ids=["a profile that is not allowed", "cut further"],
)
def test_what_we_never_make_is_not_ours(found: object) -> None:
    """What has another profile, or is cut further, is somebody else's from the beginning."""
    it = ledger_of(observed(), looked=False)
    it.take_in([found], 0)  # type: ignore[list-item]
    it.see(NOBODY, 10 * GRACE)

    assert not it.ours
    assert stock(it, alone=True).blocked


def test_what_another_plugin_gave_is_not_ours() -> None:
    """An instance that a pod holds by its uuid belongs to who gave it, idle as it may be."""
    it = ledger_of(observed(others=[it_uuid()]), looked=False)
    it.take_in([TWO], 0)
    it.see(NOBODY, 10 * GRACE)

    assert not it.ours
    assert "did not make" in stock(it, alone=True).blocked["s4"]


def test_a_pods_share_says_that_an_instance_is_ours() -> None:
    """After a restart the id of the share is enough: the instance is the pod's, and stays."""
    it = ledger_of(observed("2g.10gb@4"), looked=False)
    it.take_in([TWO], 0)
    it.see(NOBODY, 0)

    [made] = stock(it, alone=True).made.values()
    assert (made.device, made.gpu_instance, made.idle) == (it_uuid(), 5, False)
    assert not stock(it, alone=True).blocked
    assert not it.unwanted(1e9)


def test_a_claim_is_no_proof() -> None:
    """A container that is being admitted has no instance yet: what is there is not its own."""
    it = ledger_of(SharesGranted((share("2g.10gb@4"),), at=1))
    it.take_in([TWO], 2)

    assert not it.ours
    assert [lease.share.id for lease in it.waiting()] == [share("2g.10gb@4").id]


def test_what_came_too_late_is_ours() -> None:
    """What NVML made after its deadline is known by its place, at the next look and no later."""
    it = ledger_of()
    it.late.add("2g.10gb@4")
    it.take_in([TWO], 1)
    assert it.ours

    other = ledger_of()
    other.late.add("2g.10gb@4")
    other.take_in([], 1)
    other.take_in([TWO], 2)
    assert not other.ours


def test_what_was_being_made_under_another_configuration_is_ours() -> None:
    """What the driver was asked for is handed on: nobody takes its instance for somebody else's."""
    before = ledger_of(SharesGranted((share("2g.10gb@4"),), at=1))
    before.making.add("2g.10gb@4")
    told = StockTold(GPU.id, "mig", stock(before, alone=True), at=2)
    assert told.stock.making == {"2g.10gb@4"}

    it = ledger_of(SharesGranted((share("2g.10gb@4"),), at=1), told, looked=False)
    it.take_in([TWO, instance(GPU, "1g.5gb@0", 7)], 3)
    assert it.is_ours("2g.10gb@4")
    assert not list(it.waiting())
    assert not it.is_ours("1g.5gb@0")
    assert stock(it, alone=True).making == frozenset()


def test_idle_instances_go_after_a_while() -> None:
    """Warm for as long as the pool says, and no longer; an unfinished one goes at once."""
    it = ledger_of(observed(), keep_warm=10)
    ours(it)
    it.see(NOBODY, 100)

    assert it.unwanted(109.9) == []
    assert it.pause(101) == 9
    assert it.unwanted(110) == ["2g.10gb@4"]

    half = ledger_of(observed())
    half.ours.add("GPU instance 5")
    half.take_in([instance(GPU, "2g.10gb@4", computes=0)], 1)
    half.see(NOBODY, 100)
    assert half.unwanted(100) == ["2g.10gb@4"]
    assert not stock(half, alone=True).made


def test_a_program_keeps_an_instance() -> None:
    """What a program runs on is not idle, whoever left it there; its slots are blocked by name."""
    it = ledger_of(observed())
    ours(it)
    it.see({5: [9, 7]}, 100)

    assert it.unwanted(1e9) == []
    assert it.pause(100) == POLL
    assert stock(it, alone=True).blocked["s5"] == (
        "instance 2g.10gb@4 was given back, and process 7, process 9 still runs on it"
    )
    it.see(NOBODY, 200)
    assert it.idle == {"2g.10gb@4": 200}


def test_what_stays_is_tried_again_later_and_later() -> None:
    """The pause doubles up to that between two looks, and the reason is told meanwhile."""
    it = ledger_of(observed(), keep_warm=0)
    ours(it)
    it.see(NOBODY, 0)
    pauses = []
    now = 0.0
    for first in (True, False, False, False, False, False):
        assert it.note_stuck("2g.10gb@4", "In use", now) == first
        pauses.append(it.pause(now))
        assert it.unwanted(now) == []
        now += pauses[-1]
        assert it.unwanted(now) == ["2g.10gb@4"]

    assert pauses == [POLL, 2 * POLL, 4 * POLL, 8 * POLL, LOOK, LOOK]
    assert stock(it, alone=True).blocked["s4"].endswith("cannot be removed: In use")


def test_a_failure_is_about_one_lease() -> None:
    """Who asks again later is not told why an earlier one failed."""
    first = SharesGranted((share("2g.10gb@4"),), at=1)
    it = ledger_of(first)
    [lease] = it.waiting()
    it.note_failed(lease, "no")
    assert [*it.waiting()] == []
    assert [failure.reason for failure in stock(it, alone=True).failed.values()] == ["no"]

    it.state = state(SharesGranted((share("2g.10gb@4"),), at=2))
    assert len([*it.waiting()]) == 1
    assert stock(it, alone=True).failed == {}


def test_an_instance_that_is_gone_is_not_made_for_its_pod_again() -> None:
    """A pod that was told could not use another one; its share counts as lost."""
    it = ledger_of(observed("2g.10gb@4"))
    it.take_in([], 1)

    assert it.lost == {share("2g.10gb@4").id}
    assert [*it.waiting()] == []


def test_a_quiet_gpu_is_looked_at_now_and_then() -> None:
    """Nothing to do means a look every `LOOK` seconds; what was found is looked at more often."""
    assert ledger_of().pause(0) == LOOK == ledger.LOOK
    it = ledger_of(looked=False)
    it.take_in([TWO], 0)
    assert it.pause(0) == POLL

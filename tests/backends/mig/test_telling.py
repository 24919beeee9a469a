"""What is told of a GPU's instances: their names, what they are for and in the way of."""

from msgspec.structs import replace

from metagpu.backends.mig.telling import stock
from tests.backends.mig.ledgers import GPU, NOBODY, TWO, it_uuid, ledger_of, observed, ours, state


def test_every_device_has_a_name_and_ours_one_of_its_place() -> None:
    """By CDI a device goes by its uuid, whoever made it; ours by its place too, made or remade."""
    it = ledger_of()
    it.take_in([TWO], 1)
    assert list(stock(it, alone=True).named) == [it_uuid()]

    it.ours.add(it_uuid())
    named = stock(it, alone=True).named
    assert list(named) == [it_uuid(), f"{GPU.id}::2g.10gb:4"]
    assert {(made.device, made.gpu_instance) for made in named.values()} == {(it_uuid(), 5)}

    it.busy.add("2g.10gb@4")  # it is about to go
    assert not stock(it, alone=True).named


def test_a_pod_keeps_the_name_of_its_place_under_a_layout() -> None:
    """Told before, when instances were made on demand, it has to stand for what is held still."""
    it = ledger_of(observed("2g.10gb@4"))
    it.terms = replace(it.terms, fixed=frozenset(("2g.10gb@4",)))
    ours(it)
    assert list(stock(it, alone=True).named) == [it_uuid(), f"{GPU.id}::2g.10gb:4"]

    it.state = state(observed())
    assert list(stock(it, alone=True).named) == [it_uuid()]


def test_what_was_held_may_be_had_again_until_somebody_looks() -> None:
    """Known before the lease ends, so that no list in between says otherwise; then it is idle."""
    it = ledger_of(observed("2g.10gb@4"))
    ours(it)
    flags = [[(m.again, m.idle) for m in stock(it, alone=True).made.values()]]
    it.state = state(observed())
    flags.append([(m.again, m.idle) for m in stock(it, alone=True).made.values()])
    it.see({5: [77]}, 10)
    flags.append([(m.again, m.idle) for m in stock(it, alone=True).made.values()])
    it.see(NOBODY, 20)
    flags.append([(m.again, m.idle) for m in stock(it, alone=True).made.values()])

    assert flags == [[(True, False)], [(True, False)], [(False, False)], [(False, True)]]


def test_what_is_busy_is_in_nobodys_stock() -> None:
    """What is being made or removed is neither given nor blocked: who wants it waits."""
    it = ledger_of(observed())
    ours(it)
    it.see(NOBODY, 0)
    it.busy.add("2g.10gb@4")

    told = stock(it, alone=True)
    assert (dict(told.made), dict(told.blocked)) == ({}, {})
    assert it.unwanted(1e9) == []


def test_a_profile_that_is_not_known_blocks_its_slices() -> None:
    """An instance of a kind that NVML did not tell is foreign, and where it is nothing is given."""
    it = ledger_of(observed())
    it.state = state(observed())
    odd = type(TWO)(5, 99, TWO.placement, TWO.computes)
    it.take_in([odd], 1)

    assert stock(it, alone=True).blocked.keys() == {"s4", "s5"}

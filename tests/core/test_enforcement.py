"""What is done about who uses too much memory: when, to whom, and to whom never."""

from collections.abc import Sequence
from signal import Signals

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.enforcement import (
    QUIET,
    Enforcement,
    Excess,
    Policy,
    Ruling,
    Victims,
    limit_of,
    rule,
)
from metagpu.core.gpu import MIB
from metagpu.core.host import Identity
from metagpu.core.model import FOREIGN, Holder
from metagpu.core.units import Bytes, Duration
from metagpu.core.usage import Process, Usage
from metagpu.sim.host import container_of
from tests.build import gpu, share

A = replace(gpu(0), reserved=620 * MIB)
ALICE = Holder("team", "alice", "main")
LIMIT = 1000
TERM, KILL = Signals.SIGTERM, Signals.SIGKILL
TERMS = Enforcement(policy=Policy.KILL, grace=Duration(2), stop_timeout=Duration(5))


def process(pid: int, memory: int | None, *, seen: bool = True) -> Process:
    """Make a process of alice's container."""
    return Process(pid, memory, Identity(pid, pid, container_of(ALICE)) if seen else None)


def usage(*processes: Process) -> Usage:
    """Make alice's usage of a GPU of which she holds a tenth."""
    return Usage(A.id, ALICE, "uid", (share(A, 0),), processes)


def course(terms: Enforcement, *looks: tuple[float, Usage]) -> Sequence[Ruling]:
    """Look several times, each at a time and a usage; give what followed from each."""
    excess: Excess | None = None
    rulings = []
    for at, seen in looks:
        ruling = rule(seen, LIMIT, excess, terms, at)
        excess = ruling.excess
        rulings.append(ruling)
    return rulings


def sent(ruling: Ruling) -> list[tuple[int, Signals]]:
    """Say who gets which signal."""
    return [(process.pid, signal) for process, signal in ruling.signals]


# --- the limit ------------------------------------------------------------------------------------


def test_the_limit_is_the_part_of_usable_memory_and_the_headroom() -> None:
    """A quarter of what programs can have of 40960 MiB, and 512 MiB more."""
    quarter = replace(usage(), shares=tuple(share(A, n, memory_mib=1024) for n in range(10)))

    assert limit_of(quarter, A, 512 * MIB) == (10240 * (40960 - 620) * MIB // 40960) + 512 * MIB


def test_the_limit_is_never_less_than_was_told() -> None:
    """Who keeps to the memory that the container was told is never too large."""
    half = replace(usage(), shares=(share(A, 0, memory_mib=20480),))

    assert limit_of(half, A, 0) == 20480 * MIB


@pytest.mark.parametrize("odd", [share(A, 0, backend=FOREIGN), share(A, 0, memory_mib=0)])
def test_an_unknown_share_has_no_limit(odd: object) -> None:
    """Nobody is judged by a share of which nobody knows the size."""
    assert limit_of(replace(usage(), shares=(odd,)), A, 512 * MIB) is None


# --- warnings -------------------------------------------------------------------------------------


def test_who_keeps_to_the_limit_is_left_alone() -> None:
    """At the limit is not above it."""
    [ruling] = course(TERMS, (0, usage(process(1, LIMIT))))

    assert ruling == Ruling()


def test_an_excess_is_told_once() -> None:
    """As long as it lasts, or comes back within a minute, it is one excess and one warning."""
    terms = Enforcement(policy=Policy.WARN)
    over, within = usage(process(1, LIMIT + 1)), usage(process(1, LIMIT))
    looks = [(0, over), (1, over), (2, within), (30, over), (31, within), (31 + QUIET, within)]
    rulings = course(terms, *looks, (32 + QUIET, over))

    assert [ruling.warn for ruling in rulings] == [True, *[False] * 5, True]
    assert not any(ruling.signals for ruling in rulings)


def test_processes_count_together() -> None:
    """Two that are small alone are too large together."""
    [ruling] = course(TERMS, (0, usage(process(1, 600), process(2, 600))))

    assert ruling.warn


def test_unknown_memory_makes_nobody_too_large() -> None:
    """A process whose memory the driver does not say weighs nothing, and is never ended."""
    alone = course(TERMS, (0, usage(process(1, None))), (9, usage(process(1, None))))
    beside = usage(process(1, LIMIT + 1), process(2, None))
    _, both = course(replaced(TERMS, victims=Victims.ALL), (0, beside), (9, beside))

    assert [ruling.warn for ruling in alone] == [False, False]
    assert sent(both) == [(1, TERM)]


def test_without_a_limit_nobody_is_judged() -> None:
    """Where nobody knows what a container may use, it may use anything."""
    assert rule(usage(process(1, 10**15)), None, None, TERMS, 0) == Ruling()


# --- signals --------------------------------------------------------------------------------------


def test_signals_come_in_their_order_and_time() -> None:
    """After the grace SIGTERM, after the stop timeout SIGKILL, and then nothing more."""
    over = usage(process(1, LIMIT + 1))
    times = (0, 1.9, 2, 4, 6.9, 7, 8, 60)
    rulings = course(TERMS, *((at, over) for at in times))

    assert [sent(ruling) for ruling in rulings] == [
        [], [], [(1, TERM)], [], [], [(1, KILL)], [], [],
    ]  # fmt: skip
    assert [ruling.due for ruling in rulings[:4]] == [2, pytest.approx(0.1), 5, 3]


def test_the_grace_begins_anew_after_a_break() -> None:
    """Who came back within its limit has the whole grace again, and is no more on its way out."""
    over, within = usage(process(1, LIMIT + 1)), usage(process(1, LIMIT))
    looks = [(0, over), (2, over), (3, within), (4, over), (5.9, over), (6, over)]
    rulings = course(TERMS, *looks)

    assert [sent(ruling) for ruling in rulings] == [[], [(1, TERM)], [], [], [], [(1, TERM)]]


def test_the_largest_goes_first_and_the_next_only_if_that_was_not_enough() -> None:
    """One process at a time is ended; while it is on its way out the others stay."""
    big, mid, small = process(1, 900), process(2, 800), process(3, 300)
    looks = [
        (0, usage(big, mid, small)),
        (2, usage(big, mid, small)),
        (3, usage(big, mid, small)),
        (4, usage(mid, small)),
        (5, usage(small)),
    ]
    rulings = course(TERMS, *looks)

    assert [sent(ruling) for ruling in rulings] == [[], [(1, TERM)], [], [(2, TERM)], []]


def test_all_may_have_to_go() -> None:
    """With `victims: all` every process of the container is ended, also one that comes later."""
    terms = replaced(TERMS, victims=Victims.ALL)
    first, second, third = process(1, 900), process(2, 800), process(3, 300)
    looks = [
        (0, usage(first, second)),
        (2, usage(first, second)),
        (3, usage(first, second, third)),
        (7, usage(first, second, third)),
        (8, usage(first, second, third)),
    ]
    rulings = course(terms, *looks)

    assert [sent(ruling) for ruling in rulings] == [
        [],
        [(1, TERM), (2, TERM)],
        [(3, TERM)],
        [(1, KILL), (2, KILL)],
        [(3, KILL)],
    ]


def test_another_process_with_the_pid_begins_anew() -> None:
    """A signal to one process is not held against a later one of its pid."""
    reused = Process(1, LIMIT + 1, Identity(1, 99, container_of(ALICE)))
    looks = [(0, usage(process(1, LIMIT + 1))), (2, usage(process(1, LIMIT + 1)))]
    *_, ruling = course(TERMS, *looks, (8, usage(reused)))

    assert sent(ruling) == [(1, TERM)]


@pytest.mark.parametrize("policy", [Policy.OFF, Policy.REPORT, Policy.WARN])
def test_only_kill_kills(policy: Policy) -> None:
    """No other policy sends a signal, however long it lasts."""
    over = usage(process(1, LIMIT + 1))
    rulings = course(replaced(TERMS, policy=policy), *((at, over) for at in range(20)))

    assert not any(ruling.signals for ruling in rulings)


AMOUNTS = st.none() | st.integers(0, 700)
PEOPLE = st.lists(st.tuples(st.integers(1, 5), AMOUNTS, st.booleans()), max_size=5)


@given(st.lists(PEOPLE, max_size=12), st.sampled_from(Victims))
def test_who_is_signalled_is_known_and_of_a_container_above_its_limit(
    story: list[list[tuple[int, int | None, bool]]], victims: Victims
) -> None:
    """No signal goes to who keeps to the limit or is not seen, and SIGTERM comes first."""
    terms = replaced(TERMS, victims=victims)
    termed: set[Identity] = set()
    excess: Excess | None = None

    for at, people in enumerate(story):
        unique = {pid: process(pid, memory, seen=seen) for pid, memory, seen in people}
        now = usage(*sorted(unique.values(), key=lambda it: -(it.memory or 0)))
        ruling = rule(now, LIMIT, excess, terms, float(at))
        excess = ruling.excess

        assert now.memory > LIMIT or not ruling.signals
        for it, signal in ruling.signals:
            assert it.who is not None
            assert signal is TERM or it.who in termed
            assert signal is KILL or it.memory
            termed.add(it.who)


# --- settings -------------------------------------------------------------------------------------


def replaced(terms: Enforcement, **changes: object) -> Enforcement:
    """Change some settings."""
    values = {name: getattr(terms, name) for name in terms.__struct_fields__}
    return Enforcement(**{**values, **changes})


def test_by_default_nobody_is_ended_and_a_kill_takes_less_than_two_seconds() -> None:
    """The defaults only warn; with `policy: kill` alone, SIGKILL follows 1.5 s after an excess."""
    defaults = Enforcement()

    assert defaults.policy is Policy.WARN
    assert defaults.headroom == Bytes(512 * MIB)
    assert defaults.period + defaults.grace + defaults.stop_timeout <= 1.5


def test_without_a_pause_there_is_no_period() -> None:
    """A period of zero would do nothing but look."""
    with pytest.raises(ValueError, match="period must be longer than 0"):
        Enforcement(period=Duration(0))


def test_off_may_be_written_without_quotes() -> None:
    """YAML makes false of `off`; that is what was meant, and `on` means nothing."""
    assert Enforcement(policy=False) == Enforcement(policy=Policy.OFF)
    assert Enforcement(policy=False).policy is Policy.OFF
    with pytest.raises(ValueError, match="policy is no switch; allowed: off, report, warn, kill"):
        Enforcement(policy=True)

"""The policy of memory enforcement: times, processes and signals."""

from collections.abc import Sequence
from signal import Signals

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.config.memory import EnforcementPolicy, MemoryEnforcement, VictimSelection
from metagpu.core.config.units import Bytes, Duration
from metagpu.core.contracts.host import ProcessIdentity
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import UNKNOWN_BACKEND, Holder
from metagpu.core.usage.accounting import ContainerUsage, ProcessUsage
from metagpu.core.usage.policy import (
    QUIET,
    EnforcementDecision,
    LimitViolation,
    decide,
    memory_limit,
)
from metagpu.sim.machine.containers import container_of
from tests.rigs.build import gpu, share

A = replace(gpu(0), reserved=620 * MIB)
ALICE = Holder("team", "alice", "main")
LIMIT = 1000
TERM, KILL = Signals.SIGTERM, Signals.SIGKILL
SETTINGS = MemoryEnforcement(
    policy=EnforcementPolicy.KILL, grace=Duration(2), stop_timeout=Duration(5)
)


def process(pid: int, memory: int | None, *, seen: bool = True) -> ProcessUsage:
    """Create a process of alice's container."""
    return ProcessUsage(
        pid, memory, ProcessIdentity(pid, pid, container_of(ALICE)) if seen else None
    )


def usage(*processes: ProcessUsage) -> ContainerUsage:
    """Create alice's usage of a GPU of which she holds a tenth."""
    return ContainerUsage(A.id, ALICE, "uid", (share(A, 0),), processes)


def course(
    settings: MemoryEnforcement, *observations: tuple[float, ContainerUsage]
) -> Sequence[EnforcementDecision]:
    """Decide several times, each with a time and a usage; return all decisions."""
    excess: LimitViolation | None = None
    decisions = []
    for at, seen in observations:
        decision = decide(seen, LIMIT, excess, settings, at)
        excess = decision.violation
        decisions.append(decision)
    return decisions


def sent(decision: EnforcementDecision) -> list[tuple[int, Signals]]:
    """Return pairs of process and signal."""
    return [(process.pid, signal) for process, signal in decision.signals]


# --- the limit ------------------------------------------------------------------------------------


def test_the_limit_is_the_part_of_usable_memory_and_the_headroom() -> None:
    """A limit is a quarter of the 40960 MiB that programs can have, and 512 MiB more."""
    quarter = replace(usage(), shares=tuple(share(A, n, memory_mib=1024) for n in range(10)))

    assert memory_limit(quarter, A, 512 * MIB) == (10240 * (40960 - 620) * MIB // 40960) + 512 * MIB


def test_the_limit_is_never_less_than_the_grant() -> None:
    """A container within the memory of its grant is never above its limit."""
    half = replace(usage(), shares=(share(A, 0, memory_mib=20480),))

    assert memory_limit(half, A, 0) == 20480 * MIB


@pytest.mark.parametrize("odd", [share(A, 0, backend=UNKNOWN_BACKEND), share(A, 0, memory_mib=0)])
def test_an_unknown_share_has_no_limit(odd: object) -> None:
    """A share of unknown size has no limit."""
    assert memory_limit(replace(usage(), shares=(odd,)), A, 512 * MIB) is None


# --- warnings -------------------------------------------------------------------------------------


def test_an_excess_is_reported_once() -> None:
    """An excess that lasts, or returns within a minute, is one excess with one warning."""
    settings = MemoryEnforcement(policy=EnforcementPolicy.WARN)
    over, within = usage(process(1, LIMIT + 1)), usage(process(1, LIMIT))
    observations = [
        (0, over),
        (1, over),
        (2, within),
        (30, over),
        (31, within),
        (31 + QUIET, within),
    ]
    decisions = course(settings, *observations, (32 + QUIET, over))

    assert [decision.warn for decision in decisions] == [True, *[False] * 5, True]
    assert not any(decision.signals for decision in decisions)


@pytest.mark.parametrize(("quiet", "is_new"), [(59.9, False), (60.0, True)])
def test_a_violation_ends_after_a_minute_within_the_limit(quiet: float, *, is_new: bool) -> None:
    """Exactly 60 s after it was last seen above its limit, a container is warned again."""
    settings = MemoryEnforcement(policy=EnforcementPolicy.WARN)
    over, within = usage(process(1, LIMIT + 1)), usage(process(1, LIMIT))

    *_, last = course(settings, (0, over), (quiet, within), (quiet, over))

    assert last.warn is is_new


def test_unknown_memory_counts_nothing() -> None:
    """A process of unknown memory counts nothing, and is never ended."""
    alone = course(SETTINGS, (0, usage(process(1, None))), (9, usage(process(1, None))))
    beside = usage(process(1, LIMIT + 1), process(2, None))
    _, both = course(replaced(SETTINGS, victims=VictimSelection.ALL), (0, beside), (9, beside))

    assert [decision.warn for decision in alone] == [False, False]
    assert sent(both) == [(1, TERM)]


def test_without_a_limit_no_container_is_above_it() -> None:
    """A container without a known limit may use any memory."""
    assert decide(usage(process(1, 10**15)), None, None, SETTINGS, 0) == EnforcementDecision()


# --- signals --------------------------------------------------------------------------------------


def test_signals_come_in_their_order_and_time() -> None:
    """SIGTERM follows the grace, SIGKILL the stop timeout, and nothing follows them."""
    over = usage(process(1, LIMIT + 1))
    times = (0, 1.9, 2, 4, 6.9, 7, 8, 60)
    decisions = course(SETTINGS, *((at, over) for at in times))

    assert [sent(decision) for decision in decisions] == [
        [], [], [(1, TERM)], [], [], [(1, KILL)], [], [],
    ]  # fmt: skip
    assert [decision.next_check for decision in decisions[:4]] == [2, pytest.approx(0.1), 5, 3]


def test_the_grace_begins_again_after_a_break() -> None:
    """A container that was within its limit again has the whole grace again."""
    over, within = usage(process(1, LIMIT + 1)), usage(process(1, LIMIT))
    observations = [(0, over), (2, over), (3, within), (4, over), (5.9, over), (6, over)]
    decisions = course(SETTINGS, *observations)

    assert [sent(decision) for decision in decisions] == [[], [(1, TERM)], [], [], [], [(1, TERM)]]


def test_the_largest_go_first_and_the_next_only_if_that_was_not_enough() -> None:
    """As many of the largest as cover the excess are ended; the others stay meanwhile."""
    big, mid, small = process(1, 900), process(2, 300), process(3, 200)
    observations = [
        (0, usage(big, mid, small)),
        (2, usage(big, mid, small)),
        (3, usage(big, process(2, 700), process(4, 500), small)),
        (4, usage(process(2, 700), process(4, 500), small)),
        (5, usage(process(4, 500), small)),
    ]
    decisions = course(SETTINGS, *observations)

    assert [sent(decision) for decision in decisions] == [[], [(1, TERM)], [(2, TERM)], [], []]


@pytest.mark.parametrize(
    ("memories", "ended"),
    [
        ((1001,), 1),
        ((900, 101), 1),  # the first frees 900
        ((500, 500, 500), 1),  # an excess of 500 is covered by one
        ((500, 500, 500, 500), 2),
        ((300,) * 60, 57),  # three of 300 are within the limit
        ((None, 600, 600), 1),  # unknown memory is none
    ],
)
def test_so_many_of_the_largest_end_at_once_as_cover_the_excess(
    memories: tuple[int | None, ...], ended: int
) -> None:
    """Workers that obey SIGTERM are within the limit after one grace, however many they are."""
    ordered = sorted(enumerate(memories, 1), key=lambda pair: -(pair[1] or 0))
    workers = [process(pid, memory) for pid, memory in ordered]
    _, decision = course(SETTINGS, (0, usage(*workers)), (2, usage(*workers)))

    assert len(decision.signals) == ended
    gone = {pid for pid, _ in sent(decision)}
    left = usage(*(worker for worker in workers if worker.pid not in gone))
    assert left.memory <= LIMIT
    *_, after = course(SETTINGS, (0, usage(*workers)), (2, usage(*workers)), (2.1, left))
    assert not after.signals


def test_new_processes_do_not_outrun_the_signals() -> None:
    """Four new processes a second that ignore SIGTERM stay bounded, by the rate and the delays."""
    settings = MemoryEnforcement(policy=EnforcementPolicy.KILL)
    violation: LimitViolation | None = None
    alive: dict[int, ProcessUsage] = {}
    started, most, check = 0, 0, 0.0

    while check < 25:
        while started / 4 <= check:
            started += 1
            alive[started] = process(started, 300)
        seen = usage(*alive.values())
        decision = decide(seen, LIMIT, violation, settings, check)
        violation, most = decision.violation, max(most, seen.memory)
        for pid, signal in sent(decision):
            if signal is KILL:
                del alive[pid]
        pause = settings.period if decision.next_check is None else decision.next_check
        check += min(settings.period, pause)

    assert started > 90
    # Those of the period before a check, the grace, and the stop timeout.
    assert most <= LIMIT + 4 * 300 * (settings.period + settings.grace + settings.stop_timeout)


def test_a_process_that_stays_listed_after_sigkill_protects_no_other() -> None:
    """The next ones are signalled a stop timeout after SIGKILL, if the first is still listed."""
    zombie, mid, small = process(1, 900), process(2, 600), process(3, 300)
    now = usage(zombie, mid, small)
    decisions = course(SETTINGS, *((at, now) for at in (0, 2, 7, 11.9, 12, 17, 22)))

    assert [sent(decision) for decision in decisions] == [
        [], [(1, TERM)], [(1, KILL)], [], [(2, TERM), (3, TERM)], [(2, KILL), (3, KILL)], [],
    ]  # fmt: skip
    assert decisions[3].next_check == pytest.approx(0.1)


def test_all_may_have_to_go() -> None:
    """With `victims: all` every process of the container is ended, also a later one."""
    settings = replaced(SETTINGS, victims=VictimSelection.ALL)
    first, second, third = process(1, 900), process(2, 800), process(3, 300)
    observations = [
        (0, usage(first, second)),
        (2, usage(first, second)),
        (3, usage(first, second, third)),
        (7, usage(first, second, third)),
        (8, usage(first, second, third)),
    ]
    decisions = course(settings, *observations)

    assert [sent(decision) for decision in decisions] == [
        [],
        [(1, TERM), (2, TERM)],
        [(3, TERM)],
        [(1, KILL), (2, KILL)],
        [(3, KILL)],
    ]


def test_another_process_with_the_pid_begins_again() -> None:
    """A later process of the same pid gets SIGTERM first."""
    reused = ProcessUsage(1, LIMIT + 1, ProcessIdentity(1, 99, container_of(ALICE)))
    observations = [(0, usage(process(1, LIMIT + 1))), (2, usage(process(1, LIMIT + 1)))]
    *_, decision = course(SETTINGS, *observations, (8, usage(reused)))

    assert sent(decision) == [(1, TERM)]


@pytest.mark.parametrize(
    "policy", [EnforcementPolicy.OFF, EnforcementPolicy.REPORT, EnforcementPolicy.WARN]
)
def test_only_kill_kills(policy: EnforcementPolicy) -> None:
    """No other policy sends a signal, however long an excess lasts."""
    over = usage(process(1, LIMIT + 1))
    decisions = course(replaced(SETTINGS, policy=policy), *((at, over) for at in range(20)))

    assert not any(decision.signals for decision in decisions)


AMOUNTS = st.none() | st.integers(0, 700)
PEOPLE = st.lists(st.tuples(st.integers(1, 5), AMOUNTS, st.booleans()), max_size=5)


@given(st.lists(PEOPLE, max_size=12), st.sampled_from(VictimSelection))
def test_a_signalled_process_is_known_and_of_a_container_above_its_limit(
    story: list[list[tuple[int, int | None, bool]]], victims: VictimSelection
) -> None:
    """Signals go to present processes of a container above its limit, SIGTERM first."""
    settings = replaced(SETTINGS, victims=victims)
    termed: set[ProcessIdentity] = set()
    excess: LimitViolation | None = None

    for at, people in enumerate(story):
        unique = {pid: process(pid, memory, seen=seen) for pid, memory, seen in people}
        now = usage(
            *sorted(
                unique.values(), key=lambda live_process_usage: -(live_process_usage.memory or 0)
            )
        )
        decision = decide(now, LIMIT, excess, settings, float(at))
        excess = decision.violation

        assert now.memory > LIMIT or not decision.signals
        for process_usage, signal in decision.signals:
            assert process_usage.identity is not None
            assert signal is TERM or process_usage.identity in termed
            assert signal is KILL or process_usage.memory
            termed.add(process_usage.identity)


# --- settings -------------------------------------------------------------------------------------


def replaced(settings: MemoryEnforcement, **changes: object) -> MemoryEnforcement:
    """Replace some settings."""
    values = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return MemoryEnforcement(**{**values, **changes})


def test_by_default_no_process_is_ended_and_a_kill_takes_two_seconds() -> None:
    """The defaults only warn; with `policy: kill` alone, SIGKILL follows 2 s after an excess."""
    defaults = MemoryEnforcement()

    assert defaults.policy is EnforcementPolicy.WARN
    assert defaults.headroom == Bytes(512 * MIB)
    assert 2 * defaults.period + defaults.grace + defaults.stop_timeout <= 2


def test_without_a_pause_there_is_no_period() -> None:
    """A period of zero is refused: it would only check."""
    with pytest.raises(ValueError, match="period must be 10 ms or more"):
        MemoryEnforcement(period=Duration(0))


def test_off_may_be_written_without_quotes() -> None:
    """An unquoted `off`, which YAML reads as false, is accepted; `on` is refused."""
    assert MemoryEnforcement(policy=False) == MemoryEnforcement(policy=EnforcementPolicy.OFF)
    assert MemoryEnforcement(policy=False).policy is EnforcementPolicy.OFF
    with pytest.raises(ValueError, match="policy is no switch; allowed: off, report, warn, kill"):
        MemoryEnforcement(policy=True)


def test_the_limit_of_a_gpu_of_unknown_memory() -> None:
    """The limit on a GPU of unknown memory is the configured amount and the headroom."""
    held = usage()
    assert held.share_memory is not None
    unknown = replace(A, memory=None, reserved=None)
    assert memory_limit(held, unknown, 50 * MIB) == held.share_memory + 50 * MIB

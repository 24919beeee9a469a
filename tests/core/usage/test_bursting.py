"""Bursting: who borrows GPU memory, who gives it back, and how long a neighbour waits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals

import anyio
import pytest
from anyio.abc import Process
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.config.memory import Burst, EnforcementPolicy, MemoryEnforcement, VictimSelection
from metagpu.core.config.units import Bytes, Duration
from metagpu.core.contracts.host import Container, ProcessIdentity
from metagpu.core.model.shares import Holder
from metagpu.core.usage.accounting import ContainerUsage, ProcessUsage
from metagpu.core.usage.policy import (
    QUIET,
    Account,
    EffectiveLimit,
    LimitViolation,
    Reclaim,
    borrowed_memory,
    reclaim,
)
from metagpu.sim.machine.gpu import SimError
from tests.core.usage.enforcer_rig import ALICE, BOB, LONG, PERCENT, Ground, ground, terms
from tests.rigs.build import gpu, share
from tests.rigs.host import running
from tests.rigs.waiting import becomes, skip

A = gpu(0)
TERM, KILL = Signals.SIGTERM, Signals.SIGKILL
LENDING = MemoryEnforcement(
    policy=EnforcementPolicy.KILL, grace=Duration(2), stop_timeout=Duration(5), burst=Burst()
)
KEEPING_10 = replace(LENDING, burst=Burst(reserve=Bytes(10)))
ALL = replace(LENDING, victims=VictimSelection.ALL)
WARNED_ONLY = MemoryEnforcement(policy=EnforcementPolicy.WARN)


def account(
    name: str,
    request: int | None,
    *memories: int | None,
    pids: int = 0,
    shares: Sequence[int] = (),
    terms: MemoryEnforcement = LENDING,
) -> Account:
    """Create a container, `POD` or `POD/CONTAINER`; its name numbers its shares and processes."""
    pod, _, container = name.partition("/")
    first = pids or 10 * (ord(name[-1]) - ord("a") + 1)
    processes = [
        ProcessUsage(pid, memory, ProcessIdentity(pid, pid, Container(pod, name)))
        for pid, memory in enumerate(memories, first)
    ]
    held = tuple(share(A, number) for number in shares or (first,))
    usage = ContainerUsage(A.id, Holder("team", pod, container), pod, held, tuple(processes))
    return usage, EffectiveLimit(terms, None if request is None else 10 * request, request)


def course(
    settings: MemoryEnforcement, *checks: tuple[float, int | None, Sequence[Account]]
) -> Sequence[Reclaim]:
    """Decide several times, each with a time, the free memory, and the containers."""
    found = [Reclaim()]
    for at, free, accounts in checks:
        found.append(reclaim(accounts, free, settings, found[-1], at))
    return found[1:]


def warned(decision: Reclaim) -> list[str]:
    """Return the pods that are warned."""
    return [usage.holder.pod for usage, _ in decision.warn]


def sent(decision: Reclaim) -> Mapping[int, Signals]:
    """Return the signal of each pid."""
    return {process.pid: signal for _, process, signal in decision.signals}


NEIGHBOUR = account("n", 50, 20)


@pytest.mark.parametrize(
    ("settings", "free", "accounts", "told", "ended"),
    [
        # whether somebody needs memory
        (LENDING, 29, [NEIGHBOUR, account("a", 25, 60)], ["a"], [10]),
        (LENDING, 30, [NEIGHBOUR, account("a", 25, 60)], [], []),
        (KEEPING_10, 10, [NEIGHBOUR, account("a", 25, 60)], [], []),
        (KEEPING_10, 9, [NEIGHBOUR, account("a", 25, 60)], ["a"], [10]),
        (KEEPING_10, 4, [account("n", 50, 46), account("a", 25, 60)], [], []),
        (LENDING, 0, [account("n", 50, 50), account("a", 25, 60)], [], []),
        (LENDING, 0, [account("a", 25, 60)], [], []),
        (LENDING, 10, [account("n", 50), account("a", 25, 60)], ["a"], [10]),
        # unknown is unknown
        (LENDING, None, [NEIGHBOUR, account("a", 25, 60)], [], []),
        (LENDING, 0, [account("n", 50, None), account("a", 25, 60)], [], []),
        (LENDING, 0, [account("n", None, 20), account("a", 25, 60)], [], []),
        (LENDING, 0, [NEIGHBOUR, account("a", None, 60)], [], []),
        (LENDING, 0, [NEIGHBOUR, account("a", 25, None, 26)], ["a"], [11]),
        # the largest loan first, until the reserve is there
        (LENDING, 20, [NEIGHBOUR, account("a", 9, 20), account("b", 5, 18)], ["b", "a"], [20]),
        (LENDING, 10, [NEIGHBOUR, account("a", 9, 20), account("b", 5, 18)], ["b", "a"], [20, 10]),
        (LENDING, 10, [NEIGHBOUR, account("a", 9, 30), account("b", 5, 18)], ["a", "b"], [10]),
        (LENDING, 20, [NEIGHBOUR, account("a", 9, 20), account("b", 9, 20)], ["b", "a"], [20]),
        (LENDING, 20, [NEIGHBOUR, account("a", 5, 8, 6, 4)], ["a"], [10, 11]),
        (LENDING, 28, [NEIGHBOUR, account("a", 5, 8, 6, 4)], ["a"], [10]),
        (ALL, 28, [NEIGHBOUR, account("a", 5, 8, 6, 4)], ["a"], [10, 11, 12]),
        (ALL, 22, [NEIGHBOUR, account("a", 9, 12, 8), account("b", 5, 8)], ["a", "b"], [10, 11]),
        # nobody within its request
        (LENDING, 0, [NEIGHBOUR, account("a", 25, 25)], [], []),
        (LENDING, 0, [account("n", 50, 20), account("a/x", 9, 12), account("a/y", 9, 6)], [], []),
        (LENDING, 0, [NEIGHBOUR, account("a", 20, 15, 8, 2)], ["a"], [10]),
        (
            LENDING,
            0,
            [NEIGHBOUR, account("a/x", 10, 15), account("a/y", 10, 14), account("a/z", 10, 5)],
            ["a", "a"],
            [240],
        ),
        # an init container has shares of its pod, and pods may share a claim
        (LENDING, 0, [NEIGHBOUR, *(account(f"a/{c}", 9, *used, shares=[1]) for c, used in
            (("i", [12]), ("m", [])))], ["a"], [90]),
        (LENDING, 9, [account("a", 25, 60), *(account(pod, 50, 25, shares=[1]) for pod in "mn")],
            [], []),
        # another policy, by an annotation
        (LENDING, 0, [NEIGHBOUR, account("a", 25, 60, terms=WARNED_ONLY)], [], []),
    ],
)  # fmt: skip
def test_borrowers_give_back_what_others_need(
    settings: MemoryEnforcement,
    free: int | None,
    accounts: Sequence[Account],
    told: list[str],
    ended: list[int],
) -> None:
    """Borrowers are warned at once; after the grace the largest end, until it is enough."""
    first, second = course(settings, (0, free, accounts), (2, free, accounts))

    assert (warned(first), sent(first)) == (told, {})
    assert (warned(second), sent(second)) == ([], dict.fromkeys(ended, TERM))


def test_signals_come_in_their_order_and_time() -> None:
    """SIGTERM follows the grace, SIGKILL the stop timeout; a zombie protects nobody else."""
    now = [NEIGHBOUR, account("a", 14, 24, 6), account("b", 9, 20)]
    found = course(LENDING, *((at, 10, now) for at in (0, 1.9, 2, 6.9, 7, 12, 17)))

    assert [sent(decision) for decision in found] == [
        {}, {}, {10: TERM}, {}, {10: KILL}, {11: TERM, 20: TERM}, {11: KILL, 20: KILL},
    ]  # fmt: skip
    assert [decision.next_check for decision in found[:4]] == pytest.approx([2, 0.1, 5, 0.1])


def test_borrowers_that_take_turns_have_one_grace() -> None:
    """The memory that one gives back and another takes at once was short all the time."""
    one = [NEIGHBOUR, account("a", 9, 20), account("b", 9, 9)]
    other = [NEIGHBOUR, account("a", 9, 9), account("b", 9, 20)]
    found = course(LENDING, (0, 20, one), (1, 20, other), (2, 20, one))

    assert [warned(decision) for decision in found] == [["a"], ["b"], []]
    assert sent(found[-1]) == {10: TERM}


def test_who_gives_back_in_time_is_warned_again_after_a_minute() -> None:
    """A shortage that returns within a minute is one, with the whole grace and no new warning."""
    short, over = [NEIGHBOUR, account("a", 9, 20)], [NEIGHBOUR, account("a", 9, 9)]
    found = course(
        LENDING, (0, 20, short), (1, 30, over), (30, 20, short), (31, 30, over),
        (31 + QUIET, 30, over), (32 + QUIET, 20, short),
    )  # fmt: skip

    assert [warned(decision) for decision in found] == [["a"], [], [], [], [], ["a"]]
    assert not any(decision.signals for decision in found)


def test_a_container_that_ends_for_its_limit_is_counted() -> None:
    """No other borrower ends for memory that a container above its limit frees already."""
    accounts = [NEIGHBOUR, account("a", 1, 20), account("b", 9, 20)]
    [process] = accounts[1][0].processes
    assert process.identity is not None
    ending = LimitViolation(0, 0, {process.identity: (TERM, 2.0)})
    first = reclaim(accounts, 20, LENDING, Reclaim(), 0)
    assert sent(reclaim(accounts, 20, LENDING, first, 2)) == {10: TERM}
    assert sent(reclaim(accounts, 20, LENDING, first, 2, violations=[ending])) == {}


PODS = st.lists(
    st.tuples(
        st.sampled_from(["a/x", "a/y", "b/z", "c/w"]),
        st.none() | st.integers(0, 40),
        st.lists(st.none() | st.integers(0, 30), max_size=3),
    ),
    max_size=4,
    unique_by=lambda container: container[0],
)


@given(st.lists(st.tuples(PODS, st.none() | st.integers(0, 90)), max_size=6), st.booleans())
def test_no_container_and_no_pod_within_its_request_loses_a_process(
    story: list[tuple[list[tuple[str, int | None, list[int | None]]], int | None]],
    whole: bool,  # noqa: FBT001 - drawn
) -> None:
    """Signals go to known processes of containers above their request, SIGTERM first."""
    decision, termed = Reclaim(), set()
    for at, (pods, free) in enumerate(story):
        accounts = [
            account(name, request, *sorted(memories, key=lambda memory: -(memory or 0)))
            for name, request, memories in pods
        ]
        decision = reclaim(accounts, free, ALL if whole else LENDING, decision, 2.0 * at)
        for lent, process, signal in decision.signals:
            pod = [each for each in accounts if each[0].holder.pod == lent[0].holder.pod]
            assert borrowed_memory(lent) > 0
            assert sum(each.memory for each, _ in pod) > sum(own.request or 0 for _, own in pod)
            assert process.memory
            assert signal is TERM or process.identity in termed
            termed.add(process.identity)


# --- real processes -------------------------------------------------------------------------------

FULL, MINE = 98, 45
"""Percent of a GPU that programs can have, and that the neighbour wants of its 50."""


async def test_a_neighbour_within_its_request_waits_for_the_borrower_to_end(tmp_path: Path) -> None:
    """A neighbour gets the reserve at once, and the rest as soon as the borrower has ended."""
    settings = replace(terms(), burst=Burst(reserve=Bytes(5 * PERCENT)))
    async with ground(tmp_path, settings) as node, running() as neighbour:
        node.hold(ALICE, 25)
        node.hold(BOB, 50)
        for _ in range(20):
            node.put(neighbour, 1, of=BOB)
            waited = await wait_for_memory(node, neighbour)
            assert waited < LONG
        assert neighbour.returncode is None


async def test_a_shortage_before_bursting_was_off_shortens_no_grace(tmp_path: Path) -> None:
    """A pool that lends again gives its borrowers the whole grace, and warns of them first."""
    lending = replace(terms(), grace=LONG, burst=Burst())
    async with ground(tmp_path, lending) as node, running() as borrower:
        node.hold(ALICE, 25)
        node.hold(BOB, 50)
        node.put(borrower, FULL)
        await becomes(lambda: node.enforcer.record.warnings == 1)
        node.terms = replace(WARNED_ONLY, period=lending.period, grace=LONG)
        await node.looked()
        skip(2 * LONG)
        await node.looked()
        warnings = node.enforcer.record.warnings
        node.terms = lending
        await becomes(lambda: node.enforcer.record.warnings > warnings)
        await node.looked()
        assert node.enforcer.record.signals[TERM] == 0


async def wait_for_memory(node: Ground, neighbour: Process, gpu: int = 0) -> float:
    """Start a borrower that leaves 5 %; return the seconds until the neighbour has its memory."""
    async with running() as borrower:
        node.put(borrower, FULL - 1 - 5, gpu=gpu)
        await anyio.sleep(0.1)
        assert borrower.returncode is None
        node.put(neighbour, 1 + 5, gpu=gpu, of=BOB)
        since = anyio.current_time()
        with pytest.raises(SimError):
            node.put(neighbour, MINE, gpu=gpu, of=BOB)
        assert await borrower.wait() == -TERM
        node.node.end_process(node.node.gpu(gpu), borrower.pid)
        node.put(neighbour, MINE, gpu=gpu, of=BOB)
        return anyio.current_time() - since

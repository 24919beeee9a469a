"""Every process on a GPU is given to the container whose it is, or to nobody."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.driver import GpuProcess
from metagpu.core.facts import GpusFound, LeasesObserved, SharesGranted
from metagpu.core.gpu import MIB
from metagpu.core.host import Container, Identity
from metagpu.core.model import Holder, ShareId
from metagpu.core.snapshot import GpuState
from metagpu.core.usage import Account, account
from metagpu.sim.host import container_of
from tests.build import after, gpu, laid_out

A = gpu(0)
ALICE, BOB = Holder("team", "alice", "main"), Holder("team", "bob", "main")
SIDE = Holder("team", "alice", "side")


def held(**counts: int) -> GpuState:
    """Give a GPU in ten shares, so many of which each of `alice` and `bob` holds."""
    layout = laid_out(A)
    names = [holder for holder in (ALICE, BOB) for _ in range(counts.get(holder.pod, 0))]
    shares = [share.id for share in layout.shares]
    holders = dict(zip(shares, names, strict=False))
    return after(GpusFound((A,), at=0), layout.offered, LeasesObserved(holders, at=1)).gpus[A.id]


def identified(*housed: tuple[int, Container | None]) -> dict[int, Identity]:
    """Make identities of pids and their containers."""
    return {pid: Identity(pid, 1000 + pid, container) for pid, container in housed}


def names(*holders: Holder, life: int = 0) -> dict[Container, Holder]:
    """Name the containers of some holders."""
    return {container_of(holder, life): holder for holder in holders}


def pids(processes: Iterable[object]) -> list[int]:
    """List the pids."""
    return [process.pid for process in processes]  # type: ignore[attr-defined]


def test_all_processes_of_a_container_count_together() -> None:
    """A container's memory on a GPU is the sum over its processes, beside its share of it."""
    processes = [GpuProcess(1, 1000 * MIB), GpuProcess(2, 3000 * MIB), GpuProcess(3, 500 * MIB)]
    known = identified((1, container_of(ALICE)), (2, container_of(ALICE)), (3, container_of(BOB)))
    alice, bob = account(held(alice=3, bob=1), processes, known, names(ALICE, BOB)).usages

    assert (alice.holder, alice.memory, alice.share) == (ALICE, 4000 * MIB, 12288 * MIB)
    assert pids(alice.processes) == [2, 1]
    assert (bob.holder, bob.memory, bob.share) == (BOB, 500 * MIB, 4096 * MIB)


def test_a_container_that_uses_nothing_is_there() -> None:
    """Who holds shares has a usage of zero, as long as no process tells otherwise."""
    [alice] = account(held(alice=2), [], {}, {}).usages

    assert (alice.holder, alice.memory, alice.pod_uid) == (ALICE, 0, None)


def test_instances_of_a_process_are_one() -> None:
    """What a process has in several MIG instances is its own together."""
    processes = [GpuProcess(1, 10, 1, 0), GpuProcess(1, 20, 2, 0), GpuProcess(1, None, 3, 0)]
    known = identified((1, container_of(ALICE)))
    [alice] = account(held(alice=1), processes, known, names(ALICE)).usages

    assert [(process.pid, process.memory) for process in alice.processes] == [(1, 30)]


def test_unknown_memory_stays_unknown() -> None:
    """Memory that the driver does not say counts nothing, and is not shown as nothing."""
    processes = [GpuProcess(1, None), GpuProcess(2, 5)]
    known = identified((1, container_of(ALICE)), (2, container_of(ALICE)))
    [alice] = account(held(alice=1), processes, known, names(ALICE)).usages

    assert alice.memory == 5
    assert [process.memory for process in alice.processes] == [5, None]


def test_pods_of_one_name_are_told_apart() -> None:
    """A pod that is being replaced is not charged with what its predecessor still has."""
    processes = [GpuProcess(1, 100), GpuProcess(2, 200)]
    known = identified((1, container_of(ALICE, 0)), (2, container_of(ALICE, 1)))
    both = names(ALICE, life=0) | names(ALICE, life=1)
    usages = account(held(alice=1), processes, known, both).usages

    assert sorted(usage.memory for usage in usages) == [100, 200]
    assert {usage.pod_uid for usage in usages} == {
        container_of(ALICE, life).pod_uid for life in (0, 1)
    }


def test_strangers_are_told_with_the_reason() -> None:
    """A process that belongs to no lease of this GPU is a stranger, and we say how we know."""
    nameless = container_of(BOB)
    known = identified((1, None), (2, nameless), (3, container_of(SIDE)))
    processes = [GpuProcess(pid, 1) for pid in (1, 2, 3, 4)]
    told = account(held(alice=1), processes, known, names(SIDE))

    assert {stranger.process.pid: stranger.why for stranger in told.strangers} == {
        1: "it is in no container of a pod",
        2: f"container {nameless.id[:12]} of the pod {nameless.pod_uid} has no name here",
        3: "team/alice (side) holds no share of this GPU",
        4: "it cannot be seen: it has just ended, or is in another pid namespace",
    }
    assert told.usages[0].processes == ()


def test_a_container_nobody_has_told_of_yet_is_a_stranger() -> None:
    """While the kubelet has not said who a share was granted to, nobody is judged by it."""
    share = laid_out(A).shares[0]
    state = after(GpusFound((A,), at=0), laid_out(A).offered, SharesGranted((share,), at=1))
    known = identified((1, container_of(ALICE)))
    told = account(state.gpus[A.id], [GpuProcess(1, 1)], known, names(ALICE))

    assert told.usages == ()
    assert pids(stranger.process for stranger in told.strangers) == [1]


def test_what_another_plugin_gave_has_no_known_share() -> None:
    """A lease that is not ours says nothing about memory: unknown, and not zero."""
    foreign = ShareId(f"{A.id}::x1")
    state = after(
        GpusFound((A,), at=0), laid_out(A).offered, LeasesObserved({foreign: ALICE}, at=1)
    ).gpus[A.id]
    [alice] = account(state, [], {}, {}).usages

    assert alice.share is None


def test_what_a_container_was_told_counts_where_it_is_known() -> None:
    """Shares that look like today's may have been larger when they were granted."""
    container = container_of(ALICE)
    known, processes = identified((1, container)), [GpuProcess(1, 5)]
    of_alice = {(container.pod_uid, "main", A.id): 9000 * MIB}
    of_others = {
        ("another-uid", "main", A.id): 1,
        (container.pod_uid, "side", A.id): 1,
        (container.pod_uid, "main", gpu(1).id): 1,
    }

    for told, share in ((of_alice | of_others, 9000 * MIB), (of_others, 8192 * MIB)):
        [alice] = account(held(alice=2), processes, known, names(ALICE), told).usages
        assert alice.share == share


HOMES = st.sampled_from([container_of(ALICE), container_of(BOB), container_of(SIDE), None])


@given(
    st.dictionaries(
        st.integers(1, 50), st.tuples(HOMES, st.booleans(), st.none() | st.integers(0, 99))
    )
)
def test_everybody_is_somewhere_once(people: dict[int, tuple[Container | None, bool, int]]) -> None:
    """Each process is in exactly one place, and no memory is lost or counted twice."""
    processes = [GpuProcess(pid, memory) for pid, (_, _, memory) in people.items()]
    seen = [(pid, home) for pid, (home, visible, _) in people.items() if visible]
    told: Account = account(
        held(alice=2, bob=1), processes, identified(*seen), names(ALICE, BOB, SIDE)
    )

    housed = [process for usage in told.usages for process in usage.processes]
    everybody = [*housed, *(stranger.process for stranger in told.strangers)]
    assert sorted(pids(everybody)) == sorted(people)
    assert sum(process.memory or 0 for process in everybody) == sum(
        memory or 0 for _, _, memory in people.values()
    )
    assert {usage.holder for usage in told.usages} == {ALICE, BOB}

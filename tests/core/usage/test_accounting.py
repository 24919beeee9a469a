"""Every process on a GPU belongs to one container, or is unauthorized."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.contracts.host import Container, ProcessIdentity
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder, Lease, ShareId
from metagpu.core.model.snapshot import GpuState
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesClaimed
from metagpu.core.usage.accounting import GpuUsage, attribute_processes
from metagpu.sim.machine.containers import container_of
from tests.rigs.build import after, gpu, layout_of

A = gpu(0)
ALICE, BOB = Holder("team", "alice", "main"), Holder("team", "bob", "main")
SIDE = Holder("team", "alice", "side")


def held(**counts: int) -> GpuState:
    """Return a GPU in ten shares, of which `alice` and `bob` hold so many each."""
    layout = layout_of(A)
    names = [holder for holder in (ALICE, BOB) for _ in range(counts.get(holder.pod, 0))]
    shares = [share.id for share in layout.shares]
    holders = dict(zip(shares, names, strict=False))
    return after(GpusFound((A,), at=0), layout.offer_fact, LeasesObserved(holders, at=1)).gpus[A.id]


def identified(*housed: tuple[int, Container | None]) -> dict[int, ProcessIdentity]:
    """Create identities of pids and their containers."""
    return {pid: ProcessIdentity(pid, 1000 + pid, container) for pid, container in housed}


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
    alice, bob = attribute_processes(
        held(alice=3, bob=1), processes, known, names(ALICE, BOB)
    ).containers

    assert (alice.holder, alice.memory, alice.share_memory) == (ALICE, 4000 * MIB, 12288 * MIB)
    assert pids(alice.processes) == [2, 1]
    assert (bob.holder, bob.memory, bob.share_memory) == (BOB, 500 * MIB, 4096 * MIB)


def test_a_container_that_uses_nothing_is_there() -> None:
    """A holder of shares without a process has a usage of zero."""
    [alice] = attribute_processes(held(alice=2), [], {}, {}).containers

    assert (alice.holder, alice.memory, alice.pod_uid) == (ALICE, 0, None)


def test_containers_that_share_a_claim_are_each_authorized() -> None:
    """Each is judged by its own processes, beside all the shares of the claim."""
    state = held(alice=2)
    shared = {i: replace(lease, sharers=(BOB,)) for i, lease in state.leases.items()}
    processes = [GpuProcess(1, 1000 * MIB), GpuProcess(2, 3000 * MIB)]
    known = identified((1, container_of(ALICE)), (2, container_of(BOB)))
    usage = attribute_processes(
        replace(state, leases=MappingProxyType(shared)), processes, known, names(ALICE, BOB)
    )
    alice, bob = usage.containers
    assert (alice.memory, alice.share_memory) == (1000 * MIB, 8192 * MIB)
    assert (bob.memory, bob.share_memory) == (3000 * MIB, 8192 * MIB)
    assert not usage.unauthorized


def test_instances_of_a_process_are_one() -> None:
    """The memory of a process in several MIG instances is added up."""
    processes = [GpuProcess(1, 10, 1, 0), GpuProcess(1, 20, 2, 0), GpuProcess(1, None, 3, 0)]
    known = identified((1, container_of(ALICE)))
    [alice] = attribute_processes(held(alice=1), processes, known, names(ALICE)).containers

    assert [(process.pid, process.memory) for process in alice.processes] == [(1, 30)]


def test_unknown_memory_stays_unknown() -> None:
    """Memory that the driver does not report counts nothing, and is shown as unknown."""
    processes = [GpuProcess(1, None), GpuProcess(2, 5)]
    known = identified((1, container_of(ALICE)), (2, container_of(ALICE)))
    [alice] = attribute_processes(held(alice=1), processes, known, names(ALICE)).containers

    assert alice.memory == 5
    assert [process.memory for process in alice.processes] == [5, None]


def test_pods_of_one_name_are_kept_apart() -> None:
    """A new pod is not charged with processes of its predecessor of the same name."""
    processes = [GpuProcess(1, 100), GpuProcess(2, 200)]
    known = identified((1, container_of(ALICE, 0)), (2, container_of(ALICE, 1)))
    both = names(ALICE, life=0) | names(ALICE, life=1)
    usages = attribute_processes(held(alice=1), processes, known, both).containers

    assert sorted(usage.memory for usage in usages) == [100, 200]
    assert {usage.pod_uid for usage in usages} == {
        container_of(ALICE, life).pod_uid for life in (0, 1)
    }


def test_a_container_of_unknown_name_counts_for_its_pod() -> None:
    """The pod's only container with shares is charged with processes of unknown containers."""
    pod = Holder("team", "alice", "")
    known = identified((1, container_of(SIDE)), (2, container_of(ALICE)), (3, container_of(BOB)))
    processes = [GpuProcess(1, 100), GpuProcess(2, 200), GpuProcess(3, 300)]
    of = {container_of(SIDE): pod} | names(ALICE, BOB)
    alice, bob = attribute_processes(held(alice=1, bob=1), processes, known, of).containers

    assert (alice.holder, pids(alice.processes), len(alice.shares)) == (ALICE, [2, 1], 1)
    assert (bob.holder, pids(bob.processes)) == (BOB, [3])


def test_a_pod_with_a_container_of_unknown_name_is_judged_as_one() -> None:
    """All shares and processes of a pod count together if several of its containers have shares."""
    layout = layout_of(A)
    holders = dict(zip((share.id for share in layout.shares), (ALICE, SIDE, SIDE), strict=False))
    state = after(GpusFound((A,), at=0), layout.offer_fact, LeasesObserved(holders, at=1)).gpus[
        A.id
    ]
    pod = Holder("team", "alice", "")
    known = identified((1, container_of(SIDE)), (2, container_of(ALICE)))
    of = {container_of(SIDE): pod} | names(ALICE)
    uid = container_of(ALICE).pod_uid
    promised = {(uid, "main", A.id): 5 * MIB, (uid, "side", A.id): 7 * MIB}
    processes = [GpuProcess(1, 100), GpuProcess(2, 200)]
    [alice] = attribute_processes(state, processes, known, of, promised).containers

    assert (alice.holder, pids(alice.processes), len(alice.shares)) == (pod, [2, 1], 3)
    assert alice.share_memory == 12 * MIB


def test_a_pod_of_unknown_containers_without_a_share_is_unauthorized() -> None:
    """A container of unknown name whose pod holds no share is charged to no other pod."""
    known = identified((1, container_of(BOB)))
    of = {container_of(BOB): Holder("team", "bob", "")}
    usage = attribute_processes(held(alice=1), [GpuProcess(1, 1)], known, of)

    assert [process.reason for process in usage.unauthorized] == [
        "team/bob (a container of unknown name) holds no share of this GPU"
    ]


def test_unauthorized_processes_have_a_reason() -> None:
    """A process that belongs to no lease of its GPU is unauthorized, with the reason."""
    nameless = container_of(BOB)
    known = identified((1, None), (2, nameless), (3, container_of(SIDE)))
    processes = [GpuProcess(pid, 1) for pid in (1, 2, 3, 4)]
    gpu_usage = attribute_processes(held(alice=1), processes, known, names(SIDE))

    assert {
        unauthorized.process.pid: unauthorized.reason for unauthorized in gpu_usage.unauthorized
    } == {
        1: "the process runs in no container of a pod",
        2: f"container {nameless.id[:12]} of the pod {nameless.pod_uid} has no known name",
        3: "team/alice (side) holds no share of this GPU",
        4: "the process cannot be seen: it has ended, or is in another pid namespace",
    }
    assert gpu_usage.containers[0].processes == ()


def test_a_container_the_kubelet_has_not_reported_is_unauthorized() -> None:
    """No memory is charged to a share before the kubelet has named its holder."""
    share = layout_of(A).shares[0]
    state = after(GpusFound((A,), at=0), layout_of(A).offer_fact, SharesClaimed((share,), at=1))
    known = identified((1, container_of(ALICE)))
    gpu_usage = attribute_processes(state.gpus[A.id], [GpuProcess(1, 1)], known, names(ALICE))

    assert gpu_usage.containers == ()
    assert pids(unauthorized.process for unauthorized in gpu_usage.unauthorized) == [1]


def test_a_lease_of_another_plugin_has_no_known_share() -> None:
    """A lease of another plugin has an unknown memory share, not zero."""
    foreign = ShareId(f"{A.id}::x1")
    state = after(
        GpusFound((A,), at=0), layout_of(A).offer_fact, LeasesObserved({foreign: ALICE}, at=1)
    ).gpus[A.id]
    [alice] = attribute_processes(state, [], {}, {}).containers

    assert alice.share_memory is None


def test_the_memory_of_the_grant_counts_where_it_is_known() -> None:
    """The memory of the grant counts: equal shares may have been larger then."""
    container = container_of(ALICE)
    known, processes = identified((1, container)), [GpuProcess(1, 5)]
    of_alice = {(container.pod_uid, "main", A.id): 9000 * MIB}
    of_others = {
        ("another-uid", "main", A.id): 1,
        (container.pod_uid, "side", A.id): 1,
        (container.pod_uid, "main", gpu(1).id): 1,
    }

    for promised, share in ((of_alice | of_others, 9000 * MIB), (of_others, 8192 * MIB)):
        [alice] = attribute_processes(
            held(alice=2), processes, known, names(ALICE), promised
        ).containers
        assert alice.share_memory == share


HOMES = st.sampled_from([container_of(ALICE), container_of(BOB), container_of(SIDE), None])


@given(
    st.dictionaries(
        st.integers(1, 50), st.tuples(HOMES, st.booleans(), st.none() | st.integers(0, 99))
    )
)
def test_processes_are_counted_once(people: dict[int, tuple[Container | None, bool, int]]) -> None:
    """Each process is in exactly one place, and no memory is lost or counted twice."""
    processes = [GpuProcess(pid, memory) for pid, (_, _, memory) in people.items()]
    seen = [(pid, home) for pid, (home, visible, _) in people.items() if visible]
    gpu_usage: GpuUsage = attribute_processes(
        held(alice=2, bob=1), processes, identified(*seen), names(ALICE, BOB, SIDE)
    )

    housed = [process for usage in gpu_usage.containers for process in usage.processes]
    everybody = [*housed, *(unauthorized.process for unauthorized in gpu_usage.unauthorized)]
    assert sorted(pids(everybody)) == sorted(people)
    assert sum(process.memory or 0 for process in everybody) == sum(
        memory or 0 for _, _, memory in people.values()
    )
    assert {usage.holder for usage in gpu_usage.containers} == {ALICE, BOB}


def test_an_init_container_has_the_shares_that_the_checkpoint_names() -> None:
    """The kubelet lists no init container: its processes count against what it was given."""
    state = held(bob=1)
    init, container = Holder("team", "alice", "prepare"), container_of(ALICE)
    ids = [share.id for share in state.shares[4:7]]
    containers = {i: frozenset([(container.pod_uid, "prepare")]) for i in ids}
    state = replace(state, allocated=MappingProxyType(containers))
    processes = [GpuProcess(1, 20000 * MIB), GpuProcess(2, 500 * MIB)]
    known = identified((1, container), (2, container_of(BOB)))
    usage = attribute_processes(state, processes, known, {container: init} | names(BOB))

    alice, bob = usage.containers
    assert (alice.holder, alice.memory, alice.share_memory) == (init, 20000 * MIB, 12288 * MIB)
    assert (bob.holder, bob.share_memory) == (BOB, 4096 * MIB)
    assert usage.unauthorized == ()


def test_an_init_container_keeps_its_limit_after_a_reload() -> None:
    """A share that is offered smaller under its id, or not at all, is what it was when granted."""
    state, container = held(alice=2), container_of(ALICE)
    pairs = frozenset([(container.pod_uid, "main"), (container.pod_uid, "prepare")])
    state = replace(state, allocated=MappingProxyType(dict.fromkeys(state.leases, pairs)))
    init = {container: Holder("team", "alice", "prepare")}
    processes, known = [GpuProcess(1, 6000 * MIB)], identified((1, container))

    for shares in (tuple(replace(each, memory=400 * MIB) for each in state.shares), ()):
        usage = attribute_processes(replace(state, shares=shares), processes, known, init)
        assert usage.unauthorized == ()
        assert usage.containers[-1].share_memory == 8192 * MIB


def test_a_pod_judged_as_one_has_each_of_its_shares_once() -> None:
    """A main container goes on with the shares of an init container."""
    state, container = held(alice=2), container_of(ALICE)
    pairs = frozenset([(container.pod_uid, "main"), (container.pod_uid, "prepare")])
    state = replace(state, allocated=MappingProxyType(dict.fromkeys(state.leases, pairs)))
    cut = Holder("team", "alice", "")
    [alice] = attribute_processes(
        state, [GpuProcess(1, MIB)], identified((1, container)), {container: cut}
    ).containers

    assert (alice.holder, alice.share_memory) == (cut, 8192 * MIB)


def test_a_check_of_unchanged_leases_reads_no_lease() -> None:
    """While nothing changes, a check costs what its containers cost, not what their leases do."""
    read = 0

    class Counted(dict[ShareId, Lease]):
        def values(self) -> Any:  # noqa: ANN401 - a view of dict
            nonlocal read
            read += 1
            return super().values()

    state = held(a=3, b=2)
    state = replace(state, leases=MappingProxyType(Counted(state.leases)))
    first, second = (attribute_processes(state, (), {}, {}) for _ in range(2))

    assert read == 1
    assert first.containers == second.containers

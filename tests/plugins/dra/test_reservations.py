"""Claims of bound pods have their shares before the kubelet asks, where a pool has both fronts."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import ResourceClaimRef, Share
from metagpu.core.state.facts import PodsListed, SharesClaimed
from tests.plugins.dra.rig import CONFIG, DRIVER, DraNode, turns
from tests.rigs.build import gpu
from tests.rigs.waiting import becomes

BOTH = CONFIG.replace("[dra]", "[device-plugin, dra]")


@pytest.fixture
def node(tmp_path: Path) -> DraNode:
    """Return a node of two GPUs under both fronts."""
    node = DraNode(tmp_path)
    node.offer([gpu(0), gpu(1)], BOTH)
    return node


def bind(node: DraNode, *claims: ResourceClaimRef) -> None:
    """Report the pods of the node: one for each of these claims."""
    pods = [
        KnownPod(f"u-{it.name}", it.namespace, it.name, claims={"main": frozenset([(it.name, "")])})
        for it in claims
    ]
    node.registry.apply(PodsListed(tuple(pods)))


async def test_a_claim_is_leased_when_its_pod_is_bound(node: DraNode) -> None:
    """The kubelet's call finds its shares, also where all others are taken meanwhile."""
    claim = node.allocate("early", node.fraction(gpu(0), 40))
    async with node.running():
        bind(node, claim)
        await becomes(lambda: len(node.leased(claim)) == 40)
        shares, state = node.leased(claim), node.registry.snapshot.gpus[gpu(0).id]
        others = [it for it in state.shares if it.backend == "fraction" and it.id not in shares]
        node.registry.apply(SharesClaimed(tuple(others), at=1))

        assert not (await node.prepare(claim))[claim.uid].error
        assert node.leased(claim) == shares
        assert await node.unprepare(claim) == {claim.uid: ""}
        assert node.leased(claim) == []


async def test_the_lease_of_a_pod_that_never_started_ends_with_it(node: DraNode) -> None:
    """The kubelet unprepares nothing that it did not prepare."""
    gone = node.allocate("gone", node.fraction(gpu(0), 40))
    kept = node.allocate("kept", node.fraction(gpu(0), 40))
    async with node.running():
        bind(node, gone, kept)
        await becomes(lambda: node.leased(gone) and node.leased(kept))
        await node.prepare(kept)
        bind(node)
        await becomes(lambda: not node.leased(gone))
        assert len(node.leased(kept)) == 40

        bind(node, gone)  # another pod of the same name
        await becomes(lambda: node.leased(gone))


async def test_what_cannot_be_leased_is_left_to_the_kubelets_call(node: DraNode) -> None:
    """The API server may be away, or the shares taken: the call says why, or succeeds."""
    away = node.allocate("away", node.fraction(gpu(0), 40))
    taken = node.allocate("taken", node.result(gpu(1), "gpu"))
    share = next(it for it in node.layout.shares if it.gpu == gpu(1).id)
    node.registry.apply(SharesClaimed((share,), at=1))
    async with node.running():
        node.unanswered = 1
        bind(node, away, taken)
        await becomes(lambda: node.reads == 2)
        await anyio.wait_all_tasks_blocked()
        assert node.leased(away) == node.leased(taken) == []
        assert not (await node.prepare(away))[away.uid].error
        assert "is in use by fraction" in (await node.prepare(taken))[taken.uid].error


async def test_the_kubelets_account_ends_no_lease_that_it_was_not_asked_for(
    node: DraNode,
) -> None:
    """A claim that it has forgotten ends; one that it has never known is of a bound pod."""
    early = node.allocate("early", node.fraction(gpu(0), 40))
    forgotten = node.allocate("forgotten", node.fraction(gpu(1), 40))
    node.front.account.period = 0.01
    async with node.running():
        bind(node, early)
        await becomes(lambda: node.leased(early))
        await node.prepare(forgotten)
        node.write_account({})
        await becomes(lambda: not node.leased(forgotten))
        later = node.allocate("later", node.fraction(gpu(1), 40))
        await node.prepare(later)
        await becomes(lambda: not node.leased(later))  # two looks more
        assert len(node.leased(early)) == 40


async def test_by_dra_alone_nothing_is_read_before_the_kubelet_asks(tmp_path: Path) -> None:
    """The scheduler keeps claims apart, and nobody else is there."""
    node = DraNode(tmp_path)
    node.offer([gpu(0)])
    claim = node.allocate("early", node.fraction(gpu(0), 40))
    async with node.running():
        bind(node, claim)
        await anyio.wait_all_tasks_blocked()
        assert (node.reads, node.leased(claim)) == (0, [])


async def test_a_claim_that_the_kubelet_was_answered_keeps_its_lease(node: DraNode) -> None:
    """A pod may go, or a pool get one front, while the kubelet's call is under way."""
    claim = node.allocate("early", node.fraction(gpu(0), 40))
    async with node.running():
        bind(node, claim)
        await becomes(lambda: node.leased(claim))
        node.answering = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(node.prepare, claim)
            await becomes(lambda: node.reads == 2)
            bind(node)
            await anyio.wait_all_tasks_blocked()
            node.answering.set()
        await anyio.wait_all_tasks_blocked()
        assert len(node.leased(claim)) == 40
        assert node.edits(claim)
        assert await node.unprepare(claim) == {claim.uid: ""}
        assert node.leased(claim) == []


async def test_a_claim_that_is_being_prepared_delays_no_other(node: DraNode) -> None:
    """Nor does one that the API server is slow to return; the leases of gone pods end."""
    slow, gone, other = (node.allocate(it, node.fraction(gpu(0), 10)) for it in ("a", "b", "c"))
    async with node.running():
        bind(node, gone)
        await becomes(lambda: node.leased(gone))
        node.answering, answered = anyio.Event(), node.answering
        async with anyio.create_task_group() as group:
            group.start_soon(node.prepare, slow)
            await becomes(lambda: node.reads == 2)
            bind(node, slow)
            await becomes(lambda: node.reads == 3)
            waiting, node.answering = node.answering, answered
            bind(node, slow, other)
            await becomes(lambda: node.leased(other) and not node.leased(gone))
            assert node.leased(slow) == []
            waiting.set()


async def test_a_failure_of_one_claim_is_its_own(
    node: DraNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend of somebody else may raise anything; the driver goes on."""
    bad, good = (
        node.allocate("a", node.result(gpu(0), "timeslice")),
        node.allocate("b", node.fraction(gpu(1), 4)),
    )
    backend = next(it for it in node.layout.backends.values() if it.name == "timeslice")

    def fail(*_: object) -> list[Share]:
        raise ZeroDivisionError

    monkeypatch.setattr(type(backend), "prefer", fail)
    async with node.running():
        with capture_logs() as logs:
            bind(node, bad, good)
            await becomes(lambda: node.leased(good))
        assert [it["claim"] for it in logs if it["event"] == "resource claim not reserved"] == [
            "default/a"
        ]
        assert node.leased(bad) == []
        assert (await node.get_info()).name == DRIVER


async def test_no_reservation_outlives_the_front(node: DraNode) -> None:
    """The next one finds the pods again, and nobody else would end the leases."""
    claim = node.allocate("early", node.fraction(gpu(0), 40))
    async with node.running():
        bind(node, claim)
        await becomes(lambda: node.leased(claim))
    assert node.leased(claim) == []
    node.front = node.new_front()
    async with node.running():
        await becomes(lambda: node.leased(claim))


async def test_claims_of_other_drivers_leave_nothing(node: DraNode) -> None:
    """Pods of NICs may be many, and the node's life is long."""
    foreign = {**node.fraction(gpu(0), 1), "driver": "nic.example.com"}
    claims = [node.allocate(f"nic-{number}", foreign) for number in range(20)]
    async with node.running():
        bind(node, *claims)
        await becomes(lambda: node.reads == 20)
        await anyio.wait_all_tasks_blocked()
        assert len(node.front.preparer.states._locks) == 0


SMALL = CONFIG.replace("sharesPerGpu: 100", "sharesPerGpu: 4")
CALLS = st.sampled_from(
    ("prepare", "prepare", "pod gone", "pod bound", "unprepare", "one front", "end")
)


@given(calls=st.lists(st.tuples(CALLS, st.integers(0, 12)), max_size=5), delay=st.integers(0, 3))
def test_no_order_of_calls_takes_the_lease_of_a_prepared_claim(
    calls: Sequence[tuple[str, int]], delay: int
) -> None:
    """Nor its CDI file; without a bound pod and an answer there is neither."""

    async def run(node: DraNode) -> None:
        claim = node.allocate("early", node.fraction(gpu(0), 3))
        preparer, answered = node.front.preparer, list[object]()
        following = anyio.CancelScope()

        async def follow() -> None:
            with following:
                await node.front.reservations.run()

        async def call(what: str, start: int) -> None:
            await turns(start)
            if what == "prepare":
                answered.append(await preparer.prepare(claim))
            elif what == "unprepare":
                await preparer.unprepare(claim)
            elif what == "one front":
                node.offer([gpu(0)], SMALL)
            elif what == "end":  # of the daemon: calls that have begun are answered
                following.cancel()
            else:
                bind(node, *((claim,) if what == "pod bound" else ()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            bind(node, claim)
            await turns()
            node.delay = delay
            async with anyio.create_task_group() as group:
                for each in calls:
                    group.start_soon(call, *each)
            await turns()
            prepared = claim in preparer.states.prepared
            names = [what for what, _ in calls]
            assert prepared or not answered or "unprepare" in names
            assert len(node.leased(claim)) in ({3} if prepared else {0, 3})
            assert not prepared or node.edits(claim)
            bind(node)
            await turns()
            assert len(node.leased(claim)) == (3 if prepared else 0)
            following.cancel()

    with TemporaryDirectory() as folder:
        node = DraNode(Path(folder))
        node.offer([gpu(0)], SMALL.replace("[dra]", "[device-plugin, dra]"))
        anyio.run(run, node)

"""Claims of bound pods have their shares before the kubelet asks, where a pool has both fronts."""

from pathlib import Path

import anyio
import pytest

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.state.facts import PodsListed, SharesClaimed
from tests.plugins.dra.rig import CONFIG, DraNode
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
    node.front.account_period = 0.01
    async with node.running():
        bind(node, early)
        await becomes(lambda: node.leased(early))
        await node.prepare(forgotten)
        node.write_account({})
        await becomes(lambda: not node.leased(forgotten))
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

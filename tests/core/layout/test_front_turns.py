"""A pool with both fronts: what pods of the device plugin API see, and what ResourceClaims see."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from metagpu.core.devices.slices import HELD, OUT_OF_TURN, gpu_slices, slices_of
from metagpu.core.layout.offer_turns import TurnTiming
from metagpu.core.layout.turn_runner import TurnRunner
from metagpu.core.model.offers import Front
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import BY_CLAIMS, Holder, OfferTurn, ResourceClaimRef, Share
from metagpu.core.state.facts import (
    GpusFound,
    LeasesObserved,
    PodsListed,
    SharesClaimed,
    SharesReleased,
    SlicesPublished,
    TurnsChanged,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.node_object import allocatable_of
from tests.rigs.build import METAGPU, config, gpu, layout_of
from tests.rigs.waiting import becomes, skip

TEXT = """
version: metagpu/v1
pools:
  - name: all
    fronts: [device-plugin, dra]{more}
    backends: [{{backend: fraction}}]
"""
CLAIM = ResourceClaimRef("team", "half", "uid-1")
TIMING = TurnTiming().between_fronts


class BothFronts:
    """GPUs in fractions under both fronts, and the runner of the turns."""

    def __init__(self, count: int = 1, more: str = "", text: str = TEXT) -> None:
        gpus, text = [gpu(index) for index in range(count)], text.format(more=more)
        self.registry = Registry()
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        layout, read = layout_of(*gpus, text=text), config(text)
        self.shares = layout.shares
        self.registry.apply(layout.offer_fact)
        self.runner = TurnRunner(self.registry, lambda: layout.gpus_in_turns(read))
        self.written = True
        """Whether the API server answers at once."""

    @property
    def allocatable(self) -> int:
        """The number of the Node."""
        return allocatable_of(self.registry.snapshot)[METAGPU]

    @property
    def healthy(self) -> int:
        """The shares that the kubelet's list has as Healthy."""
        states = self.registry.snapshot.gpus.values()
        return sum(it.id not in state.unhealthy_shares for state in states for it in state.shares)

    def device(self, index: int = 0) -> tuple[int, set[str]]:
        """Return the capacity of a GPU's device of fractions, and its taints."""
        *_, spec = slices_of(self.registry.snapshot, "n1", "gpu.metagpu.io")[gpu(index).id]
        (device,) = (it for it in spec["devices"] if it["name"].endswith("-fraction"))
        value = int(device["capacity"]["shares"]["value"])
        return value, {it["key"] for it in device.get("taints", ())}

    @property
    def open_to_claims(self) -> list[int]:
        """The GPUs of which ResourceClaims can be allocated, by index."""
        return [it for it in range(len(self.registry.snapshot.gpus)) if not self.device(it)[1]]

    def hold(self, shares: int, by: ResourceClaimRef | None = None, at: int = 0) -> None:
        """Begin leases, of a claim or of a pod."""
        chosen = self.shares[at : at + shares]
        self.registry.apply(SharesClaimed(tuple(chosen), at=1, resource_claim=by))

    def publish(self, *, tainted: bool = True) -> None:
        """Note that the API server has the slices of now; before all turns they are tainted."""
        for it, state in self.registry.snapshot.gpus.items():
            shown = state.open_to_claims and not (state.turn is None and tainted)
            self.registry.apply(SlicesPublished(it, shown))

    async def follow_slices(self) -> None:
        """Publish slices as the turns change, at once."""
        view = self.registry.watch(lambda now: [it.open_to_claims for it in now.gpus.values()])
        async for _ in view:
            if self.written:
                self.publish()

    def give(self, turn: OfferTurn | None) -> None:
        """Begin a turn of the first GPU."""
        self.registry.apply(TurnsChanged({gpu(0).id: turn}))


async def becomes_after(seconds: float, is_so: Callable[[], object]) -> None:
    """Skip time until a predicate holds: the next turn may be of the same front."""
    for _ in range(20):
        await anyio.wait_all_tasks_blocked()
        if is_so():
            return
        skip(seconds)
    await becomes(is_so)


@asynccontextmanager
async def taking_turns(pool: BothFronts) -> AsyncIterator[BothFronts]:
    """Run the turns until the block ends; the slices of before are those of no turn."""
    async with anyio.create_task_group() as group:
        if pool.written:
            pool.publish()
        group.start_soon(pool.runner.run)
        group.start_soon(pool.follow_slices)
        await anyio.wait_all_tasks_blocked()
        yield pool
        group.cancel_scope.cancel()


async def test_idle_gpus_are_divided_between_the_fronts() -> None:
    """Each front has a part of the idle GPUs at once, and no GPU counts for both."""
    async with taking_turns(BothFronts(4)) as pool:
        assert pool.allocatable == 200
        assert len(pool.open_to_claims) == 2


async def test_a_single_gpu_goes_from_one_front_to_the_other() -> None:
    """Between the two nothing new is bound, and what was bound before is still granted."""
    async with taking_turns(BothFronts()) as pool:
        for _ in range(4):
            await becomes_after(TIMING.longest_turn, lambda: pool.allocatable == 100)
            assert pool.open_to_claims == []
            await becomes_after(TIMING.longest_turn, lambda: pool.allocatable == 0)
            assert pool.open_to_claims == []
            assert pool.healthy == 100
            await becomes_after(TIMING.grace, lambda: pool.open_to_claims == [0])
            assert pool.healthy == 0
            await becomes_after(TIMING.longest_turn, lambda: pool.open_to_claims == [])
            assert pool.healthy == 0


async def test_the_rest_of_a_gpu_in_use_has_turns_and_a_full_gpu_has_none() -> None:
    """Shares of pods stay Healthy and leave the capacity; those of claims leave the list."""
    async with taking_turns(BothFronts()) as pool:
        pool.hold(30)
        pool.hold(20, CLAIM, at=30)
        await becomes_after(
            TIMING.longest_turn, lambda: (pool.allocatable, pool.device()[1]) == (80, {OUT_OF_TURN})
        )
        await becomes_after(
            TIMING.longest_turn, lambda: (pool.allocatable, pool.healthy) == (30, 80)
        )
        await becomes_after(TIMING.grace, lambda: pool.device() == (70, set()))
        assert (pool.allocatable, pool.healthy) == (30, 30)

        pool.hold(50, CLAIM, at=50)
        before = pool.registry.snapshot.gpus[gpu(0).id].turn
        skip(10 * TIMING.longest_turn)
        await anyio.wait_all_tasks_blocked()
        assert pool.registry.snapshot.gpus[gpu(0).id].turn == before


async def test_a_turn_that_ended_while_a_pod_had_the_gpu_ends_once_it_is_free() -> None:
    """Claims come after the Node's number has fallen, which the pod kept up to its end."""
    async with taking_turns(BothFronts()) as pool:
        await becomes_after(TIMING.longest_turn, lambda: pool.allocatable == 100)
        await becomes_after(
            TIMING.longest_turn, lambda: (pool.allocatable, pool.healthy) == (0, 100)
        )
        pool.hold(100)
        skip(10 * TIMING.longest_turn)
        await anyio.wait_all_tasks_blocked()
        pool.registry.apply(SharesReleased(pool.shares, at=2))
        await anyio.wait_all_tasks_blocked()
        assert (pool.allocatable, pool.open_to_claims) == (0, [])
        await becomes_after(TIMING.grace, lambda: pool.open_to_claims == [0])


async def test_out_of_turn_pods_come_and_go_without_a_write() -> None:
    """The taint keeps claims away, whatever is free: the end of the taint has the capacity too."""
    pool = BothFronts()
    pool.give(OfferTurn("fraction", 0))
    before = slices_of(pool.registry.snapshot, "n1", "gpu.metagpu.io")
    pool.hold(30)
    assert slices_of(pool.registry.snapshot, "n1", "gpu.metagpu.io") == before
    assert pool.device() == (100, {OUT_OF_TURN})
    pool.hold(70, at=30)
    assert pool.device() == (100, {HELD})
    pool.registry.apply(SharesReleased(tuple(pool.shares[30:]), at=2))
    pool.give(OfferTurn(BY_CLAIMS, 1))
    assert pool.device() == (70, set())


def test_without_taints_a_capacity_keeps_claims_away() -> None:
    """An API server that drops taints shows what pods have left, whoever's turn it is."""
    pool = BothFronts()
    pool.give(OfferTurn("fraction", 0))
    pool.hold(30)
    *_, spec = gpu_slices(pool.registry.snapshot, gpu(0).id, "n1", "gpu.metagpu.io", tainted=False)
    (device,) = (it for it in spec["devices"] if it["name"].endswith("-fraction"))
    assert device["capacity"]["shares"]["value"] == "70"


async def test_without_turns_both_fronts_see_what_is_free() -> None:
    """With `offer: all` the lease decides: each side sees what the other one holds."""
    async with taking_turns(BothFronts(more="\n    offer: all")) as pool:
        pool.hold(30)
        pool.hold(20, CLAIM, at=30)
        assert (pool.allocatable, pool.device()) == (80, (70, set()))


def test_a_gpu_that_pods_hold_in_full_is_tainted() -> None:
    """No value says that nothing is left."""
    pool = BothFronts()
    pool.hold(100)
    assert pool.device()[1] == {HELD}


def test_what_pods_exclude_stays_tainted_beside_a_claim() -> None:
    """Of a GPU with pods and a claim the claim may end first: nothing else is allocated then."""
    text = TEXT.replace("{{backend: fraction}}", "{{backend: fraction}}, {{backend: whole}}")
    pool = BothFronts(text=text)
    pool.hold(30)
    pool.hold(20, CLAIM, at=30)
    *_, spec = slices_of(pool.registry.snapshot, "n1", "gpu.metagpu.io")[gpu(0).id]
    keys = [{it["key"] for it in device.get("taints", ())} for device in spec["devices"]]
    assert keys == [set(), {HELD}, set()]  # the last is of those who look at GPUs


def test_shares_of_init_containers_are_in_no_capacity() -> None:
    """The kubelet's checkpoint has them while no lease does."""
    pool = BothFronts()
    ids = dict.fromkeys((it.id for it in pool.shares[:10]), METAGPU)
    observed = LeasesObserved({}, at=5, admission_timeout=0, allocated=ids, kubelet_ready=True)
    pool.registry.apply(observed)
    assert pool.device() == (90, set())


def test_shares_of_a_pod_that_ends_are_not_counted_for_the_next_pod() -> None:
    """Once they are free it may be the turn of claims: nobody is bound for them before."""
    pool = BothFronts(more="\n    offer: all")
    pool.hold(30)
    names = {it.id: Holder("team", "a", "main") for it in pool.shares[:30]}
    kinds = dict.fromkeys(names, METAGPU)
    pool.registry.apply(LeasesObserved(names, at=5, admission_timeout=0, resources=kinds))
    pool.give(OfferTurn(BY_CLAIMS, 0))
    assert pool.allocatable == 30
    pool.registry.apply(PodsListed((KnownPod("u", "team", "a", terminating=True),)))
    assert pool.allocatable == 0


def test_a_resource_of_both_fronts_is_in_the_offers_of_each() -> None:
    """The endpoints serve it, and slices have its devices."""
    snapshot = BothFronts().registry.snapshot
    assert [list(snapshot.offers_of(it)) for it in Front] == [[METAGPU], [METAGPU]]
    shares: list[Share] = list(snapshot.gpus[gpu(0).id].shares)
    assert len(shares) == 100


async def test_a_turn_waits_for_pods_that_were_bound_in_it() -> None:
    """A busy kubelet may admit a pod, or start a claim's pod, long after it was bound."""
    limited = KnownPod("u", "team", "a", requests={METAGPU: 10}, arriving=True)
    claiming = KnownPod("v", "team", "b", claims={"main": frozenset([("x", "")])}, arriving=True)
    async with taking_turns(BothFronts()) as pool:
        pool.registry.apply(PodsListed((limited,)))
        await becomes_after(
            TIMING.longest_turn, lambda: pool.registry.snapshot.gpus[gpu(0).id].withdrawn_shares
        )
        skip(TIMING.grace)
        await anyio.wait_all_tasks_blocked()
        assert (pool.healthy, pool.open_to_claims) == (100, [])
        pool.registry.apply(PodsListed((claiming,)))
        await becomes_after(TIMING.grace, lambda: pool.open_to_claims == [0])

        await becomes_after(TIMING.longest_turn, lambda: pool.open_to_claims == [])
        skip(TIMING.claims_grace)
        await anyio.wait_all_tasks_blocked()
        assert pool.healthy == 0
        skip(TIMING.longest_arrival)  # it waits for no pod for ever
        await becomes(lambda: pool.healthy == 100)


async def test_pods_are_not_bound_before_the_api_server_has_the_end_of_a_claims_turn() -> None:
    """At a start that is the turn of an earlier daemon; nobody waits for an answer for ever."""
    pool = BothFronts(2)
    pool.written = False
    async with taking_turns(pool):
        skip(TIMING.claims_grace)
        await anyio.wait_all_tasks_blocked()
        assert (pool.healthy, pool.open_to_claims) == (0, [0])
        pool.publish()
        await anyio.wait_all_tasks_blocked()
        assert pool.healthy == 0  # a claim may have been allocated a moment before
        await becomes_after(TIMING.claims_grace, lambda: pool.healthy == 100)

        await becomes_after(TIMING.longest_turn, lambda: pool.open_to_claims == [])
        await becomes_after(TIMING.claims_grace, lambda: pool.open_to_claims == [1])
        await anyio.wait_all_tasks_blocked()
        assert pool.healthy == 0
        skip(TIMING.longest_write)
        await becomes(lambda: pool.healthy == 100)

"""One pool under both fronts, in any order of events, checked against the test's own account.

Real backends, registry, service and preparer: a kubelet allocates ids that it takes for free, the
scheduler allocates devices of claims, either may be late, calls overlap, and the daemon starts
again in between.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from metagpu.core.devices.slices import HELD, OUT_OF_TURN, slices_of
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import (
    BY_CLAIMS,
    Holder,
    OfferTurn,
    ResourceClaimRef,
    Share,
    ShareId,
)
from metagpu.core.model.sharing import conflicts, without_conflict
from metagpu.core.state.facts import LeasesObserved, PodsListed, TurnsChanged
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.answer import PreparedDevice
from metagpu.plugins.kubelet import messages as wire
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1
from tests.plugins.dra.rig import DRIVER, NODE, DraNode, turns
from tests.rigs.build import gpu

GPUS: Final = (gpu(0), gpu(1))
BOTH: Final = """\
version: metagpu/v1
pools:
  - name: all
    fronts: [device-plugin, dra]
    backends:
      - {backend: fraction, sharesPerGpu: 4, split: accept}
      - {backend: timeslice, replicas: 2}
      - {backend: whole}
"""
TYPES: Final = {"fraction": "fraction", "timeslice": "timeslice", "gpu": "whole"}
"""The backend of each type of device."""
HOLDER: Final = Holder("team", "pod", "main")
WHICH: Final = st.sampled_from((GPUS[0], *GPUS))
TURNS: Final = st.one_of(
    st.none(),
    st.builds(
        OfferTurn,
        st.sampled_from((BY_CLAIMS, *TYPES.values())),
        st.just(0.0),
        withdrawn=st.booleans(),
    ),
)


class BothFronts(RuleBasedStateMachine):
    """A node, and the test's account of what pods and ResourceClaims hold.

    Attributes:
        plugin: the shares that the kubelet's device manager has given to pods.
        claimed: the shares of each prepared claim, by the CDI names that its pods got.
        bound: the shares of each claim whose pod is bound, and that the kubelet has not asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.node = DraNode(Path(self.folder.name))
        self.node.offer(list(GPUS), BOTH)
        self.plugin: dict[ShareId, Share] = {}
        self.claimed: dict[ResourceClaimRef, tuple[PreparedDevice, ...]] = {}
        self.bound: dict[ResourceClaimRef, frozenset[ShareId]] = {}
        self.following = self.loop.run(self.follow_pods())
        self.made = 0
        self.now = 0.0

    def teardown(self) -> None:
        """Close the loop."""
        self.following.cancel()
        self.loop.close()
        self.folder.cleanup()

    # --- what happens ----------------------------------------------------------------------------

    @rule(data=st.data(), of=WHICH)
    def start_pod(self, data: st.DataObject, of: Gpu) -> None:
        """Ask for shares of a resource that the kubelet has given to nobody, listed or not."""
        layout = self.node.layout
        resource = data.draw(st.sampled_from(list(layout.backends)))
        free = [
            it
            for it in layout.shares
            if it.resource == resource and it.gpu == of.id and it.id not in self.plugin
        ]
        if not free:
            return
        asked = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
        held = self.held
        possible = not any(conflicts(a, b) for a in asked for b in held.values())

        assert self.granted(asked) == possible
        if possible:
            self.plugin.update((it.id, it) for it in asked)

    @rule(data=st.data(), of=WHICH)
    def start_claim(self, data: st.DataObject, of: Gpu) -> None:
        """Allocate a device, also one that has no room any more, and prepare the claim."""
        ref, amount, possible = self.allocate(data, of)
        try:
            devices = self.loop.run(self.node.front.preparer.prepare(ref))
        except RequestError:
            assert not possible
        else:
            assert possible
            self.claimed[ref] = devices
            assert len(self.shares_of(ref)) == amount

    @rule(data=st.data(), of=WHICH)
    def bind_pod_with_claim(self, data: st.DataObject, of: Gpu) -> None:
        """Bind a pod with a claim: its shares are leased before the kubelet asks."""
        ref, amount, possible = self.allocate(data, of)
        before = self.held.keys()
        self.list_pods(*self.bound, ref)
        leased = self.bound[ref] = frozenset(self.node.leased(ref))
        assert len(leased) == (amount if possible else 0)
        assert not leased & before

    @precondition(lambda self: self.bound)
    @rule(
        data=st.data(),
        delay=st.integers(0, 4),
        order=st.permutations(("prepare", "prepare", "pod gone", "unprepare")),
        starts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    )
    def call_at_once(
        self, data: st.DataObject, delay: int, order: Sequence[str], starts: Sequence[int]
    ) -> None:
        """Prepare a claim, often twice, while its pod goes or its end is asked for."""
        ref = data.draw(st.sampled_from(sorted(self.bound, key=str)))
        calls = order[: len(starts)]
        self.node.delay = delay
        answers = self.loop.run(self.call_all(ref, list(zip(calls, starts, strict=True))))
        self.node.delay = 0
        ended = "unprepare" in calls
        if ended:  # whichever call came last
            self.loop.run(self.node.front.preparer.unprepare(ref))
            self.claimed.pop(ref, None)
        elif "prepare" in calls and self.bound[ref]:
            assert answers or "pod gone" in calls
        if ended or answers:
            self.bound[ref] = frozenset()
        if answers and not ended:
            self.claimed[ref] = answers[-1]
        if "pod gone" in calls:
            del self.bound[ref]

    @precondition(lambda self: self.plugin)
    @rule(data=st.data())
    def end_pods(self, data: st.DataObject) -> None:
        """Report that some pods of the device plugin API are gone."""
        for gone in data.draw(st.sets(st.sampled_from(sorted(self.plugin)), min_size=1)):
            del self.plugin[gone]
        self.observe()

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def end_claim(self, data: st.DataObject) -> None:
        """Unprepare a claim."""
        ref = data.draw(st.sampled_from(sorted(self.claimed, key=str)))
        self.loop.run(self.node.front.preparer.unprepare(ref))
        del self.claimed[ref]
        self.list_pods(*(it for it in self.bound if it != ref))
        self.bound.pop(ref, None)

    @rule(of=WHICH, turn=TURNS)
    def turn(self, of: Gpu, turn: OfferTurn | None) -> None:
        """Offer the free shares of a GPU to others: what is asked for late is still granted."""
        self.node.registry.apply(TurnsChanged({of.id: turn}))

    @rule()
    def restart(self) -> None:
        """Start another daemon: it has the kubelet's two accounts, the pods, and nothing else."""
        self.following.cancel()
        self.node.write_account({ref: list(map(_sent, it)) for ref, it in self.claimed.items()})
        self.node.registry = Registry()
        self.node.offer(list(GPUS), BOTH)
        self.node.front = self.node.new_front()
        self.loop.run(self.node.front.account.restore())
        self.observe()
        self.following = self.loop.run(self.follow_pods())
        self.list_pods(*self.bound)
        self.bound = {ref: self.reserved(ref) for ref in self.bound}

    # --- what must be true -----------------------------------------------------------------------

    @invariant()
    def nothing_is_held_twice(self) -> None:
        """Check that the daemon knows what is held, and that no two held shares conflict."""
        leases = {
            share_id: lease.share
            for state in self.node.registry.snapshot.gpus.values()
            for share_id, lease in state.leases.items()
        }
        assert leases == self.held
        by_claims = sum(map(len, map(self.shares_of, self.claimed)))
        assert len(self.held) == len(self.plugin) + by_claims + sum(map(len, self.bound.values()))
        assert not any(conflicts(a, b) for a, b in combinations(self.held.values(), 2))

    @invariant()
    def the_kubelet_sees_claims(self) -> None:
        """Check that what a claim holds, or excludes, is Unhealthy, and what a pod holds is not."""
        by_claims = [it for id_, it in self.held.items() if id_ not in self.plugin]
        healthy = self.healthy()
        for share in self.node.layout.shares:
            if share.id in self.plugin:
                assert share.id in healthy
            elif any(it.id == share.id or conflicts(it, share) for it in by_claims):
                assert share.id not in healthy

    @invariant()
    def the_scheduler_sees_pods(self) -> None:
        """Check that what pods hold is in no capacity, and that a share is offered by one front."""
        snapshot = self.node.registry.snapshot
        healthy = self.healthy()
        for of in GPUS:
            state = snapshot.gpus[of.id]
            pods = [it for it in self.plugin.values() if it.gpu == of.id]
            free = healthy - self.plugin.keys()
            for device in self.devices(of):
                backend = TYPES[device["attributes"]["type"]["string"]]
                its = [it for it in state.shares if it.backend == backend]
                taints = {it["key"] for it in device.get("taints", ())}
                left = without_conflict(its, pods)
                assert (HELD in taints) == (not left)
                if not taints and (capacity := device.get("capacity")) and backend != "whole":
                    [amount] = capacity.values()
                    assert int(amount["value"]) == len(left)
                if state.turn is not None:
                    open_to_pods = any(it.id in free for it in state.shares)
                    assert taints & {HELD, OUT_OF_TURN} or not open_to_pods

    # --- the node --------------------------------------------------------------------------------

    @property
    def held(self) -> dict[ShareId, Share]:
        """Return all held shares of both accounts."""
        offered = {it.id: it for it in self.node.layout.shares}
        by_claims = {it.id: it for ref in self.claimed for it in self.shares_of(ref)}
        reserved = {id_: offered[id_] for its in self.bound.values() for id_ in its}
        return by_claims | reserved | self.plugin

    def allocate(self, data: st.DataObject, of: Gpu) -> tuple[ResourceClaimRef, int, bool]:
        """Allocate a device; return the claim, its amount, and whether there is room for it."""
        kind = data.draw(st.sampled_from(sorted(TYPES)))
        amount = 1 if kind == "gpu" else data.draw(st.integers(1, 4 if kind == "fraction" else 2))
        capacity = {"fraction": "shares", "timeslice": "slices"}.get(kind)
        consumed = {capacity: str(amount)} if capacity else {}
        self.made += 1
        result = self.node.result(of, kind, consumedCapacity=consumed)
        ref = self.node.allocate(f"claim-{self.made}", result, uid=self.made)
        its = [
            it for it in self.node.layout.shares if it.backend == TYPES[kind] and it.gpu == of.id
        ]
        there = [it for it in self.held.values() if it.gpu == of.id]
        return ref, amount, len(without_conflict(its, there)) >= amount

    async def call_all(
        self, ref: ResourceClaimRef, calls: Sequence[tuple[str, int]]
    ) -> list[tuple[PreparedDevice, ...]]:
        """Call for a claim at several turns of the loop; return the devices of all answers."""
        preparer, answers = self.node.front.preparer, list[tuple[PreparedDevice, ...]]()

        async def call(what: str, start: int) -> None:
            await turns(start)
            if what == "pod gone":
                self.apply_pods(*(it for it in self.bound if it != ref))
            elif what == "unprepare":
                await preparer.unprepare(ref)
            else:
                with suppress(RequestError):
                    answers.append(await preparer.prepare(ref))

        async with anyio.create_task_group() as group:
            for each in calls:
                group.start_soon(call, *each)
        await turns()
        return answers

    async def follow_pods(self) -> "asyncio.Task[None]":
        """Begin to follow the pods of the node, between all calls."""
        return asyncio.create_task(self.node.front.reservations.run())

    def list_pods(self, *claims: ResourceClaimRef) -> None:
        """Report the pods that are bound, each by its claim; wait for what follows."""
        self.apply_pods(*claims)
        self.loop.run(turns())

    def apply_pods(self, *claims: ResourceClaimRef) -> None:
        """Report the pods that are bound."""
        pods = [
            KnownPod(it.uid, it.namespace, it.name, claims={"main": frozenset([(it.name, "")])})
            for it in claims
        ]
        self.node.registry.apply(PodsListed(tuple(pods)))

    def reserved(self, ref: ResourceClaimRef) -> frozenset[ShareId]:
        """Return the shares of a claim that the kubelet has not asked for."""
        leased = self.node.leased(ref)
        return frozenset() if ref in self.claimed else frozenset(leased)

    def shares_of(self, ref: ResourceClaimRef) -> Sequence[Share]:
        """Return the shares of a claim, by the CDI names that its pods got."""
        offered = {it.id: it for it in self.node.layout.shares}
        named = [it.claimed for it in self.claimed[ref] if it.claimed is not None]
        return [offered[share] for it in named for share in it.share_ids]

    def granted(self, shares: Sequence[Share]) -> bool:
        """Ask as the kubelet does; return whether the shares were granted."""
        backends = self.node.layout.backends
        service = DevicePluginService(
            shares[0].resource, self.node.registry, backends.__getitem__, self.tick
        )
        container = v1beta1.ContainerAllocateRequest(devices_ids=[str(it.id) for it in shares])
        request = bytes(v1beta1.AllocateRequest(container_requests=[container]))
        try:
            self.loop.run(service._allocate(request))
        except RequestError:
            return False
        return True

    def observe(self) -> None:
        """Report the kubelet's lists of pods, and its checkpoint, to the daemon."""
        holders = dict.fromkeys(self.plugin, HOLDER)
        names = {share_id: share.resource for share_id, share in self.plugin.items()}
        at = self.tick()
        self.node.registry.apply(
            LeasesObserved(holders, at=at, admission_timeout=0, resources=names, allocated=names)
        )

    def tick(self) -> float:
        """Advance the time."""
        self.now += 10
        return self.now

    def healthy(self) -> set[ShareId]:
        """Read the lists as the kubelet does; return the healthy shares."""
        found = set()
        for resource in self.node.layout.backends:
            made = wire.DeviceList(resource)
            data = made.encode(made.view(self.node.registry.snapshot))
            for it in v1beta1.ListAndWatchResponse.parse(data).devices:
                if it.health == "Healthy":
                    found.add(ShareId(it.id))
        return found

    def devices(self, of: Gpu) -> Sequence[dict[str, Any]]:
        """Return the published devices of a GPU that can be held."""
        specs = slices_of(self.node.registry.snapshot, NODE, DRIVER)[of.id]
        found = (it for spec in specs for it in spec.get("devices", ()))
        return [it for it in found if it["attributes"]["type"]["string"] != "monitor"]


def _sent(device: PreparedDevice) -> v1.Device:
    return v1.Device(
        request_names=list(device.requests),
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=list(device.cdi_names),
    )


@pytest.mark.long
def test_nothing_is_held_twice_under_both_fronts() -> None:
    """In any order of pods, claims, turns, calls at once and restarts; each sees the other."""
    run_state_machine_as_test(
        BothFronts,
        settings=settings(
            max_examples=settings().max_examples // 8,
            stateful_step_count=30,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )

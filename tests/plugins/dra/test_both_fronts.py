"""One pool under both fronts, in any order of events, checked against the test's own account.

Real backends, registry, service and preparer: a kubelet allocates ids that it takes for free, the
scheduler allocates devices of claims, either may be late, and the daemon starts again in between.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

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
from metagpu.core.errors import RequestError
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import (
    BY_CLAIMS,
    Holder,
    OfferTurn,
    ResourceClaimRef,
    Share,
    ShareId,
)
from metagpu.core.model.sharing import conflicts, without_conflict
from metagpu.core.state.facts import LeasesObserved, TurnsChanged
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.answer import PreparedDevice
from metagpu.plugins.kubelet import messages as wire
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1
from tests.plugins.dra.rig import DRIVER, NODE, DraNode
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
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.node = DraNode(Path(self.folder.name))
        self.node.offer(list(GPUS), BOTH)
        self.plugin: dict[ShareId, Share] = {}
        self.claimed: dict[ResourceClaimRef, tuple[PreparedDevice, ...]] = {}
        self.made = 0
        self.now = 0.0

    def teardown(self) -> None:
        """Close the loop."""
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
        possible = len(without_conflict(its, there)) >= amount
        try:
            devices = self.loop.run(self.node.front.preparer.prepare(ref))
        except RequestError:
            assert not possible
        else:
            assert possible
            self.claimed[ref] = devices
            assert len(self.shares_of(ref)) == amount

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

    @rule(of=WHICH, turn=TURNS)
    def turn(self, of: Gpu, turn: OfferTurn | None) -> None:
        """Offer the free shares of a GPU to others: what is asked for late is still granted."""
        self.node.registry.apply(TurnsChanged({of.id: turn}))

    @rule()
    def restart(self) -> None:
        """Start a daemon anew: it has the kubelet's two accounts, and nothing else."""
        self.node.write_account({ref: list(map(_sent, it)) for ref, it in self.claimed.items()})
        self.node.registry = Registry()
        self.node.offer(list(GPUS), BOTH)
        self.node.front = self.node.new_front()
        self.loop.run(self.node.front.restore())
        self.observe()

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
        assert len(self.held) == len(self.plugin) + sum(map(len, map(self.shares_of, self.claimed)))
        assert not any(conflicts(a, b) for a, b in combinations(self.held.values(), 2))

    @invariant()
    def the_kubelet_is_told(self) -> None:
        """Check that what a claim holds, or excludes, is Unhealthy, and what a pod holds is not."""
        by_claims = [it for ref in self.claimed for it in self.shares_of(ref)]
        healthy = self.healthy()
        for share in self.node.layout.shares:
            if share.id in self.plugin:
                assert share.id in healthy
            elif any(it.id == share.id or conflicts(it, share) for it in by_claims):
                assert share.id not in healthy

    @invariant()
    def the_scheduler_is_told(self) -> None:
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
        by_claims = {it.id: it for ref in self.claimed for it in self.shares_of(ref)}
        return by_claims | self.plugin

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


def test_nothing_is_held_twice_under_both_fronts() -> None:
    """In any order of pods, claims, turns and restarts; each front is told of the other."""
    run_state_machine_as_test(
        BothFronts,
        settings=settings(
            max_examples=settings().max_examples // 8,
            stateful_step_count=30,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )

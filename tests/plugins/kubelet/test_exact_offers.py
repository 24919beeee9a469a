"""The promise of exact offers: a request that counts as free is granted.

Real backends, registry and service; the kubelet's choice among healthy ids is the test's own.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from metagpu.core.availability.exact import free_parts, largest_request, with_held_back
from metagpu.core.availability.reasons import availability_of, count_free
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.offers import RequestRule
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import Holder, OfferTurn, ResourceName, Share, ShareId
from metagpu.core.state.facts import (
    BackendResumed,
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    GpuUncordoned,
    KubeletStarted,
    LeasesObserved,
    PodsListed,
    SharesClaimed,
    TurnsChanged,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.node_object import allocatable_of, healthy_shares_of
from metagpu.plugins.kubelet.device_plugin import DeviceList, DevicePluginService
from metagpu.plugins.kubelet.pb import v1beta1
from tests.rigs.build import config, gpu, layout_of

EQUAL: Final = "{backend: fraction, sharesPerGpu: 4}"
BY_MEMORY: Final = "{backend: fraction, memoryUnit: 8Gi}"
SPREAD: Final = "{backend: fraction, sharesPerGpu: 3, placement: spread}"
ACCEPTING: Final = "{backend: fraction, sharesPerGpu: 4, split: accept}"
EVERYTHING: Final = "{backend: fraction, sharesPerGpu: 4, offer: all}"
MPS: Final = "{backend: mps, unitsPerGpu: 4, maxClients: 2}"
POOLS: Final = (
    *([EQUAL], [BY_MEMORY], [SPREAD], [ACCEPTING], [EVERYTHING], [MPS], [BY_MEMORY]),
    *([EQUAL, MPS], [BY_MEMORY, "{backend: timeslice, replicas: 2}", "{backend: whole}"]),
)
MODELS: Final = st.lists(st.sampled_from((16384, 24576, 40960)), min_size=1, max_size=8)
EXACT: Final = (RequestRule.WHOLE_GPUS, RequestRule.ONE_GPU)


class Offers(RuleBasedStateMachine):
    """A node, and the shares that the kubelet has allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.registry = Registry()
        self.layout = Layout((), {}, ())
        self.now = 0.0
        self.held: dict[ShareId, tuple[Share, Holder]] = {}

    def teardown(self) -> None:
        """Close the loop."""
        self.loop.close()

    # --- what happens ----------------------------------------------------------------------------

    @initialize(memory=MODELS, backends=st.sampled_from(POOLS), second=st.sampled_from(POOLS[:5]))
    def begin(self, memory: Sequence[int], backends: list[str], second: list[str]) -> None:
        """Offer a configuration; a second pool has the second half of the GPUs."""
        gpus = [gpu(index, memory_mib=mib) for index, mib in enumerate(memory)]
        half = len(gpus) // 2 if backends[0].startswith("{backend: fraction") else 0
        pools = [f"{{name: b, gpus: {{index: '0-{half - 1}'}}, backends: {_list(second)}}}"] * (
            half > 0
        )
        text = f"version: metagpu/v1\npools: [{', '.join([*pools, _pool('a', backends)])}]\n"
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        self.layout = build_layout(config(text), gpus, Injection())
        self.registry.apply(self.layout.offer_fact)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Ask for a number of shares that counts as free, as the scheduler and kubelet do."""
        resource = data.draw(st.sampled_from(sorted(self.layout.backends)))
        if not (free := self.promised(resource)):
            return
        size = data.draw(st.integers(1, free))
        granted = self.start_pod(resource, size)
        assert granted or self.rule_of(resource) not in EXACT, f"{size} of {free} refused"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), announced=st.booleans())
    def end(self, data: st.DataObject, *, announced: bool) -> None:
        """End one pod, which the API server may report before."""
        pods = sorted({holder.pod for _, holder in self.held.values()})
        gone = data.draw(st.sampled_from(pods))
        if announced:
            self.registry.apply(PodsListed(tuple(_known(pod, ending=pod == gone) for pod in pods)))
        self.held = {i: held for i, held in self.held.items() if held[1].pod != gone}
        self.observe()

    @rule(data=st.data(), well=st.booleans())
    def judge(self, data: st.DataObject, *, well: bool) -> None:
        """Apply a fault or a recovery of a GPU."""
        of, at = data.draw(self.which()), self.tick()
        self.registry.apply(GpuRecovered(of, "", at=at) if well else GpuFaulted(of, "XID 79", at))

    @rule(data=st.data(), free=st.booleans())
    def cordon(self, data: st.DataObject, *, free: bool) -> None:
        """Cordon or uncordon a GPU."""
        of, at = data.draw(self.which()), self.tick()
        self.registry.apply(GpuUncordoned(of, at) if free else GpuCordoned(of, "riser", at))

    @rule(data=st.data(), ready=st.booleans())
    def suspend(self, data: st.DataObject, *, ready: bool) -> None:
        """Suspend or resume a backend on a GPU."""
        of, at = data.draw(self.which()), self.tick()
        name = data.draw(st.sampled_from(sorted({share.backend for share in self.layout.shares})))
        fact: Fact = BackendResumed(of, name, at) if ready else BackendSuspended(of, name, "", at)
        self.registry.apply(fact)

    # --- what must be true -----------------------------------------------------------------------

    @invariant()
    def all_that_counts_as_free_can_be_had_at_once(self) -> None:
        """Check every size by the backend's rule, and the largest through Allocate."""
        for resource, backend in self.layout.backends.items():
            if self.rule_of(resource) not in EXACT:
                continue
            promised, offered = self.promised(resource), self.offered(resource)
            for size in range(1, promised + 1):
                chosen = backend.prefer(offered, [], size, self.registry.snapshot)
                backend.check(chosen, self.registry.snapshot)
            if promised:
                probe = Registry()
                probe.snapshot = self.registry.snapshot
                assert self.request(probe, resource, promised) is not None

    @invariant()
    def no_more_is_held_back_than_must_be(self) -> None:
        """Check that one share more would break the promise, and what the largest request is."""
        for resource in self.layout.backends:
            state = self.registry.snapshot
            grantable = [share for share in self.free(resource) if share.id not in self.refused]
            fits = [
                0,
                *(n for n in range(1, len(grantable) + 1) if self.fits(resource, grantable, n)),
            ]
            offer = state.offers[resource]
            largest = largest_request(offer.rule.requests, free_parts(state, offer))
            if self.rule_of(resource) in EXACT:
                assert largest == fits[-1]
                unbroken = next(n for n in range(len(grantable) + 2) if n not in fits) - 1
                promised = self.promised(resource)
                whole = max(map(len, offer.by_gpu.values()), default=0)
                assert promised == unbroken or promised == whole == unbroken
            else:
                assert len(self.offered(resource)) == len(grantable)

    @invariant()
    def what_counts_as_free_at_an_end_can_be_had(self) -> None:
        """Check each end, and all at once, as the scheduler and kubelet see it before metagpu.

        By the list alone: the kubelet writes the Node's number from it whenever it likes.
        """
        pods = {holder.pod for _, holder in self.held.values()}
        each = [{pod} for pod in pods]
        for ending, ended in [(group, group) for group in [*each, pods]] + [
            (pods, group) for group in each
        ]:
            known = tuple(_known(pod, ending=pod in ending) for pod in pods)
            self.registry.apply(PodsListed(known))
            snapshot = self.registry.snapshot
            amounts = allocatable_of(snapshot)
            assert amounts == healthy_shares_of(snapshot)
            for resource, backend in self.layout.backends.items():
                if self.rule_of(resource) not in EXACT:
                    continue
                stays = [s for s, holder in self.held.values() if holder.pod not in ended]
                used = sum(share.resource == resource for share in stays)
                kept = {share.id for share in stays}
                available = [share for share in self.healthy(resource) if share.id not in kept]
                sizes = map(len, snapshot.offers[resource].by_gpu.values())
                largest = max(sizes, default=0)
                promised = amounts[resource] - used
                if self.rule_of(resource) is RequestRule.ONE_GPU:
                    promised = min(promised, largest)
                for size in range(1, promised + 1):
                    backend.check(backend.prefer(available, [], size, snapshot), snapshot)
        self.registry.apply(PodsListed(tuple(_known(pod, ending=False) for pod in pods)))

    @invariant()
    def hidden_shares_are_those_of_now(self) -> None:
        """Check that no earlier state hides shares: nothing would show them until another fact."""
        snapshot = self.registry.snapshot
        assert with_held_back(snapshot) is snapshot

    @invariant()
    def held_shares_are_healthy_unless_their_gpu_is_not(self) -> None:
        """Check that nothing that a pod holds is listed Unhealthy because it is held back."""
        for state in self.registry.snapshot.gpus.values():
            available = availability_of(state)
            for row, shares in available.found:
                if row.name == "held-back":
                    assert not shares & self.held.keys()

    # --- the node --------------------------------------------------------------------------------

    def which(self) -> st.SearchStrategy[GpuId]:
        """Choose a GPU."""
        return st.sampled_from(list(self.registry.snapshot.gpus))

    def rule_of(self, resource: ResourceName) -> RequestRule:
        """Return the rule of a resource's requests."""
        return self.registry.snapshot.offers[resource].rule.requests

    def promised(self, resource: ResourceName) -> int:
        """Return the largest request that the offer promises; no request spans GPUs under MPS."""
        offered = len(self.offered(resource))
        if self.rule_of(resource) is not RequestRule.ONE_GPU:
            return offered
        sizes = map(len, self.registry.snapshot.offers[resource].by_gpu.values())
        return min(offered, max(sizes, default=0))

    def free(self, resource: ResourceName) -> list[Share]:
        """Return the shares that the kubelet has not allocated."""
        shares = self.registry.snapshot.offers[resource].shares.values()
        return [share for share in shares if share.id not in self.held]

    def offered(self, resource: ResourceName) -> list[Share]:
        """Return the free shares that the list calls healthy."""
        return [share for share in self.healthy(resource) if share.id not in self.held]

    def healthy(self, resource: ResourceName) -> list[Share]:
        """Return the shares that the list calls healthy."""
        made = DeviceList(resource)
        data = made.encode(made.view(self.registry.snapshot))
        devices = v1beta1.ListAndWatchResponse.parse(data).devices
        healthy = {device.id for device in devices if device.health == "Healthy"}
        shares = self.registry.snapshot.offers[resource].shares.values()
        return [share for share in shares if share.id in healthy]

    @property
    def refused(self) -> set[ShareId]:
        """Return the shares that would be refused one by one."""
        states = self.registry.snapshot.gpus.values()
        sick = {share.id for state in states if not state.verdict.healthy for share in state.shares}
        return sick.union(*(availability_of(state).refused for state in states))

    def fits(self, resource: ResourceName, among: Sequence[Share], size: int) -> bool:
        """Return whether the backend places a request among some shares."""
        backend, snapshot = self.layout.backends[resource], self.registry.snapshot
        try:
            backend.check(backend.prefer(among, [], size, snapshot), snapshot)
        except RequestError:
            return False
        return True

    def request(self, registry: Registry, resource: ResourceName, size: int) -> list[Share] | None:
        """Ask as the kubelet does, with our preference; return the shares, `None` if refused."""
        service = DevicePluginService(
            resource, registry, lambda name: self.layout.backends[name], self.tick
        )
        available = [str(share.id) for share in self.offered(resource)]
        wanted = v1beta1.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, allocation_size=size
        )
        request = v1beta1.PreferredAllocationRequest(container_requests=[wanted])
        answer = self.loop.run(service.chooser.answer(bytes(request)))
        [preferred] = v1beta1.PreferredAllocationResponse.parse(answer).container_responses
        ids = preferred.device_i_ds
        assert len(set(ids)) == size
        assert set(ids) <= set(available)

        shares = registry.snapshot.offers[resource].shares
        chosen = [shares[ShareId(share_id)] for share_id in ids]
        return chosen if self.granted(registry, resource, chosen) else None

    def start_pod(self, resource: ResourceName, size: int) -> bool:
        """Start a pod; return whether it got its shares."""
        if (granted := self.request(self.registry, resource, size)) is None:
            return False
        holder = Holder("team", f"pod-{self.tick():.0f}", "main")
        self.held |= {share.id: (share, holder) for share in granted}
        self.observe()
        return True

    def granted(self, registry: Registry, resource: ResourceName, shares: Sequence[Share]) -> bool:
        """Allocate shares as the kubelet does; return whether they were granted."""
        service = DevicePluginService(
            resource, registry, lambda name: self.layout.backends[name], self.tick
        )
        container = v1beta1.ContainerAllocateRequest(
            devices_ids=[str(share.id) for share in shares]
        )
        request = v1beta1.AllocateRequest(container_requests=[container])
        try:
            self.loop.run(service._allocate(bytes(request)))
        except RequestError:
            return False
        return True

    def observe(self) -> None:
        """Report the holders, as the kubelet's list of pods."""
        holders = {share_id: holder for share_id, (_, holder) in self.held.items()}
        names = {share_id: share.resource for share_id, (share, _) in self.held.items()}
        self.registry.apply(
            LeasesObserved(holders, at=self.tick(), admission_timeout=0, resources=names)
        )

    def tick(self) -> float:
        """Advance the time."""
        self.now += 10
        return self.now


def _known(name: str, *, ending: bool) -> KnownPod:
    return KnownPod(name, "team", name, "Running", terminating=ending)


def _list(backends: Sequence[str]) -> str:
    return f"[{', '.join(backends)}]"


def _pool(name: str, backends: Sequence[str]) -> str:
    return f"{{name: {name}, backends: {_list(backends)}}}"


@pytest.mark.long
def test_every_request_that_counts_as_free_is_granted() -> None:
    """A single request up to the number of free healthy shares is placed and granted."""
    run_state_machine_as_test(
        Offers,
        settings=settings(
            max_examples=settings().max_examples // 2,
            stateful_step_count=20,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )


def test_the_shares_of_a_pod_that_was_about_to_end_are_offered_at_its_end() -> None:
    """The end of a pod's leases offers the GPU that is free then, with nothing after it."""
    gpus = gpu(0), gpu(1)
    registry = Registry()
    registry.apply(GpusFound(gpus, at=0))
    registry.apply(layout_of(*gpus).offer_fact)
    [(resource, offer)] = registry.snapshot.offers.items()
    first, second = offer.by_gpu.values()
    holders = {share.id: Holder("team", "first", "main") for share in first[1:]}
    others = {share.id: Holder("team", "second", "main") for share in second[:1]}
    registry.apply(LeasesObserved(holders | others, at=1))
    for ending in (False, True):
        pods = _known("first", ending=ending), _known("second", ending=False)
        registry.apply(PodsListed(pods))

    registry.apply(LeasesObserved(others, at=2))

    assert healthy_shares_of(registry.snapshot)[resource] == len(first) + len(second)


def test_a_pod_that_is_about_to_end_is_healthy_for_each_kubelet_that_starts() -> None:
    """Two kubelets start before one lists the pod; the second would fail it for its shares."""
    registry = Registry()
    registry.apply(GpusFound((gpu(0),), at=0))
    registry.apply(layout_of(gpu(0)).offer_fact)
    [(resource, offer)] = registry.snapshot.offers.items()
    holders = dict.fromkeys(offer.shares, Holder("team", "train", "main"))
    registry.apply(LeasesObserved(holders, at=1))
    registry.apply(PodsListed((_known("train", ending=False),)))
    registry.apply(KubeletStarted((1, 1, 1)))
    registry.apply(PodsListed((_known("train", ending=True),)))
    assert healthy_shares_of(registry.snapshot)[resource] == 0

    registry.apply(KubeletStarted((1, 2, 2)))

    assert healthy_shares_of(registry.snapshot)[resource] == len(holders)


def test_the_shares_of_an_init_container_stay_healthy_while_its_pod_runs() -> None:
    """The kubelet counts them for the pod to its end, also when their lease has ended."""
    node = Offers()
    node.begin([40960, 40960], [EQUAL], [EQUAL])
    [resource] = node.layout.backends
    [(first, shares), (_, others)] = node.registry.snapshot.offers[resource].by_gpu.items()
    node.registry.apply(SharesClaimed((*shares, *others[:1]), node.tick()))
    alice, bob = Holder("team", "alice", "main"), Holder("team", "bob", "main")
    holders = {share.id: alice for share in shares[:2]} | {share.id: bob for share in others[:1]}
    allocated = dict.fromkeys((share.id for share in (*shares, *others[:1])), resource)

    def listed(ended: Sequence[Share] = ()) -> set[ShareId]:
        gone, at = frozenset(share.id for share in ended), node.tick() + 200
        node.registry.apply(LeasesObserved(holders, at, allocated=allocated, ended=gone))
        return {share.id for share in shares} & {share.id for share in node.offered(resource)}

    assert listed() == {share.id for share in shares}
    state = node.registry.snapshot.gpus[first]
    assert state.leases.keys() == {share.id for share in shares[:2]}
    assert count_free(state, resource) == 0
    assert listed(ended=shares[2:]) == {share.id for share in shares[:2]}
    assert count_free(node.registry.snapshot.gpus[first], resource) == 2
    node.teardown()


def test_the_shares_of_an_init_container_stay_healthy_in_the_turn_of_others() -> None:
    """A pod whose init container alone held shares runs on, on a GPU that is idle by now."""
    node = Offers()
    node.begin([40960], [EQUAL, "{backend: whole}"], [])
    resource, _ = node.layout.backends
    [(gpu_id, shares)] = node.registry.snapshot.offers[resource].by_gpu.items()
    node.registry.apply(SharesClaimed(shares[:1], node.tick()))
    allocated = {shares[0].id: resource}
    node.registry.apply(LeasesObserved({}, node.tick() + 200, allocated=allocated))
    node.registry.apply(TurnsChanged({gpu_id: OfferTurn("whole", node.tick())}))

    assert node.registry.snapshot.gpus[gpu_id].leases == {}
    assert [share.id for share in node.offered(resource)] == [shares[0].id]
    node.teardown()


def test_a_share_held_back_is_granted_when_the_kubelet_asks_for_it() -> None:
    """The kubelet may have an older list: what is held back can be had, if it is asked for."""
    node = Offers()
    node.begin([40960, 40960], [EQUAL], [EQUAL])
    [resource] = node.layout.backends
    assert node.start_pod(resource, 3)
    assert node.start_pod(resource, 2)

    held_back = [
        share
        for state in node.registry.snapshot.gpus.values()
        for share in state.shares
        if (row := availability_of(state).reason(share.id)) and row.name == "held-back"
    ]
    assert len(held_back) == 1
    assert not set(held_back) & set(node.offered(resource))
    assert node.granted(node.registry, resource, held_back)
    node.teardown()

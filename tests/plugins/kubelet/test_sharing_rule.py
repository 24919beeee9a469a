"""The one rule of sharing, in any sequence of events, checked against the test's own account.

Real backends, registry and service; pods, faults, operators, backends and reloads in any order.
"""

import asyncio
from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar, Final

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

from metagpu.backends.timeslice.backend import TimesliceBackend
from metagpu.core.availability.conflict import conflicts
from metagpu.core.config.config import parse
from metagpu.core.contracts.backend import Backend
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import (
    Holder,
    ProvisionedState,
    ResourceName,
    Share,
    ShareId,
)
from metagpu.core.state.facts import (
    BackendAttached,
    BackendDetached,
    BackendResumed,
    BackendSuspended,
    CleanupFinished,
    Fact,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    GpuUncordoned,
    LeasesObserved,
    ProvisioningReported,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.device_plugin import DeviceList, DevicePluginService
from metagpu.plugins.kubelet.pb import v1beta1
from tests.rigs.build import BACKENDS, gpu

GPUS: Final = (gpu(0), gpu(1))
HOLDER: Final = Holder("team", "alice", "main")


class Careful(TimesliceBackend):
    """Time-slices with setup and cleanup."""

    name: ClassVar[str] = "careful"
    needs_setup: ClassVar[bool] = True
    needs_cleanup: ClassVar[bool] = True

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Divide GPUs as time-slices do, with slots of their own."""
        return [
            Share(
                ShareId(f"{gpu.id}::c{one.number}"),
                gpu.id,
                one.resource,
                self.name,
                one.number,
                frozenset((f"c{one.number}",)),
                one.memory,
            )
            for one in super().shares(gpu)
        ]


KINDS: Final[dict[str, type[Backend]]] = {**BACKENDS, "careful": Careful}
FRACTION: Final = "{backend: fraction, sharesPerGpu: 3, split: accept}"
ANEW: Final = "{backend: fraction, sharesPerGpu: 2, split: accept}"
SLICES: Final = "{backend: timeslice, replicas: 2, resource: x.y/slices}"
CAREFUL: Final = "{backend: careful, replicas: 2, resource: x.y/careful}"
WHOLE: Final = "{backend: whole}"
LAYOUTS: Final = [
    ", ".join(cuts)
    for cuts in ((FRACTION, SLICES, CAREFUL, WHOLE), (ANEW, CAREFUL), (FRACTION, WHOLE))
]
WHICH: Final = st.sampled_from((GPUS[0], *GPUS))
"""Mostly the first: a long story of one GPU tells more than two short ones."""
OFTEN: Final = st.sampled_from((True, True, False))


class Sharing(RuleBasedStateMachine):
    """A node, and the test's account of holders and of reasons that block a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.registry = Registry()
        self.layout = Layout((), {}, ())
        self.now = 0.0
        self.held: dict[ShareId, Share] = {}
        self.sick: set[GpuId] = set()
        self.cordoned: set[GpuId] = set()
        self.suspended: set[GpuId] = set()
        self.paused: set[ShareId] = set()
        self.cleaning: dict[GpuId, float] = {}
        self.kept: set[GpuId] = set()

    def teardown(self) -> None:
        """Close the loop."""
        self.loop.close()

    # --- what happens ----------------------------------------------------------------------------

    @initialize(text=st.sampled_from(LAYOUTS))
    def begin(self, text: str) -> None:
        """Find the GPUs and offer the first configuration."""
        self.apply(GpusFound(GPUS, at=0))
        self.reload(text)

    @rule(text=st.sampled_from(LAYOUTS))
    def reload(self, text: str) -> None:
        """Offer another configuration, as the layout manager does."""
        pool = f"version: metagpu/v1\npools:\n  - {{name: all, backends: [{text}]}}\n"
        self.layout = build_layout(parse(pool, "test", KINDS), GPUS, Injection())

        for one in self.wanted - self.kept:
            self.apply(
                BackendAttached(
                    one, "careful", needs_setup=True, needs_cleanup=True, at=self.tick()
                )
            )
            self.suspended.add(one)
        self.kept |= self.wanted
        self.apply(self.layout.offer_fact)
        for one in self.kept - self.wanted:
            if not self.carefully_held(one) and one not in self.cleaning:
                self.leave(one)

    @rule(data=st.data(), anywhere=st.booleans())
    def ask(self, data: st.DataObject, *, anywhere: bool) -> None:
        """Ask for any shares of a resource as the kubelet, on offer or not."""
        resource = data.draw(st.sampled_from(list(self.layout.backends)))
        where = data.draw(WHICH).id
        shares = [
            share
            for share in self.layout.shares
            if share.resource == resource and (anywhere or share.gpu == where)
        ]
        asked = data.draw(st.lists(st.sampled_from(shares), min_size=1, unique=True))
        possible = all(map(self.may_be_given, asked))

        assert self.granted(resource, asked) == possible
        if possible:
            self.hold(asked)

    @precondition(lambda self: self.possible)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Ask for a share that may be given, as the kubelet."""
        resources = sorted({share.resource for share in self.possible})
        resource = data.draw(st.sampled_from(resources))
        share = data.draw(
            st.sampled_from([other for other in self.possible if other.resource == resource])
        )

        assert self.granted(resource, [share])
        self.hold([share])

    @precondition(lambda self: self.held)
    @rule()
    def end_all(self) -> None:
        """Report from the kubelet that no pod holds a share any more."""
        self.end_these(set(self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Report from the kubelet that some pods are gone."""
        self.end_these(data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1)))

    def end_these(self, gone: set[ShareId]) -> None:
        """Report from the kubelet that these shares are not held any more."""
        before = {one.id for one in GPUS if self.carefully_held(one.id)}
        for share_id in gone:
            del self.held[share_id]

        at = self.tick()
        holders = dict.fromkeys(self.held, HOLDER)
        names = {share_id: share.resource for share_id, share in self.held.items()}
        self.apply(LeasesObserved(holders, at=at, admission_timeout=0, resources=names))

        for one in before & self.kept:
            if not self.carefully_held(one):
                self.cleaning[one] = at

    @rule(which=WHICH, well=OFTEN)
    def judge(self, which: Gpu, *, well: bool) -> None:
        """Apply a fault or a recovery of a GPU."""
        if well:
            self.sick.discard(which.id)
            self.apply(GpuRecovered(which.id, "mended", at=self.tick()))
        else:
            self.sick.add(which.id)
            self.apply(GpuFaulted(which.id, "XID 79", at=self.tick()))

    @rule(which=WHICH, free=OFTEN)
    def cordon(self, which: Gpu, *, free: bool) -> None:
        """Cordon or uncordon a GPU."""
        if free:
            self.cordoned.discard(which.id)
            self.apply(GpuUncordoned(which.id, at=self.tick()))
        else:
            self.cordoned.add(which.id)
            self.apply(GpuCordoned(which.id, "riser", at=self.tick()))

    @precondition(lambda self: self.kept)
    @rule(which=WHICH, ready=OFTEN)
    def ready(self, which: Gpu, *, ready: bool) -> None:
        """Report that a backend is ready, or is not."""
        if which.id not in self.kept:
            return
        if ready:
            self.suspended.discard(which.id)
            self.apply(BackendResumed(which.id, "careful", at=self.tick()))
        else:
            self.suspended.add(which.id)
            self.apply(BackendSuspended(which.id, "careful", "died", at=self.tick()))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """Suspend some of a backend's shares, or release all."""
        one = data.draw(st.sampled_from(sorted(self.kept)))
        its = [ShareId(f"{one}::c{number}") for number in range(2)]
        which = data.draw(st.sets(st.sampled_from(its)))
        self.paused = (self.paused - set(its)) | which
        provisioned_state = ProvisionedState(paused=dict.fromkeys(which, "its helper died"))
        self.apply(ProvisioningReported(one, "careful", provisioned_state, at=self.tick()))

    @precondition(lambda self: self.cleaning)
    @rule(data=st.data(), late=st.booleans())
    def clean(self, data: st.DataObject, *, late: bool) -> None:
        """Report a finished cleanup, or one of before the GPU was used again."""
        one = data.draw(st.sampled_from(sorted(self.cleaning)))
        since = self.cleaning[one] - (1 if late else 0)
        self.apply(CleanupFinished(one, "careful", since, at=self.tick()))
        if not late:
            del self.cleaning[one]
            if one not in self.wanted:
                self.leave(one)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """End a backend for good, with its shares still on offer."""
        self.leave(data.draw(st.sampled_from(sorted(self.kept))))

    # --- what must be true -----------------------------------------------------------------------

    @invariant()
    def nothing_is_given_twice(self) -> None:
        """Check that no two held shares conflict, and that the daemon knows all held shares."""
        leases = {
            share_id: lease.share
            for state in self.registry.snapshot.gpus.values()
            for share_id, lease in state.leases.items()
        }
        assert leases == self.held
        assert not any(conflicts(a, b) for a, b in combinations(self.held.values(), 2))
        for one in GPUS:
            assert self.held_memory(one.id) <= (one.memory or 0)

    @invariant()
    def every_share_is_listed_as_it_is(self) -> None:
        """Check that each share is listed once, healthy if it is held or may be given."""
        devices = self.lists()
        listed = dict(devices)
        assert len(listed) == len(devices)
        assert listed == {
            share.id: "Healthy" if self.may_be_given(share, listed=True) else "Unhealthy"
            for share in self.layout.shares
        }

    @invariant()
    def nothing_healthy_excludes_what_is_held(self) -> None:
        """Check that no healthy free share conflicts with a held one."""
        healthy = {share_id for share_id, health in self.lists() if health == "Healthy"}
        for share in self.layout.shares:
            if share.id in healthy:
                others = [other for other in self.held.values() if other.id != share.id]
                assert not any(conflicts(share, other) for other in others)

    @invariant()
    def an_owner_has_leases_or_cleans(self) -> None:
        """Check that a GPU's owner has its leases or cleans it up; an idle GPU has none."""
        for state in self.registry.snapshot.gpus.values():
            one = state.gpu.id
            owners = {share.backend for share in self.held.values() if share.gpu == one}
            if not owners and one in self.cleaning:
                owners = {"careful"}
            assert ({state.owner} if state.owner else set()) == owners

    # --- the account -----------------------------------------------------------------------------

    @property
    def wanted(self) -> set[GpuId]:
        """Return the GPUs that the layout gives to the careful backend."""
        return {
            cut.gpu.id for cut in self.layout.backend_assignments if cut.backend.name == "careful"
        }

    @property
    def possible(self) -> list[Share]:
        """Return the shares of the first GPU that are free and may be given."""
        return [
            share
            for share in self.layout.shares
            if share.gpu == GPUS[0].id and share.id not in self.held and self.may_be_given(share)
        ]

    def may_be_given(self, share: Share, *, listed: bool = False) -> bool:
        """Return whether a share may be given; `listed`, whether it is listed as healthy."""
        held = [other for other in self.held.values() if other.gpu == share.gpu]
        others = [other for other in held if other.id != share.id]
        not_offered = [other for other in held if self.offered.get(other.id) != other]
        spared = listed and share.id in self.held

        return not (
            share.gpu in self.sick
            or (share.gpu in self.cordoned and not spared)
            or (share.backend == "careful" and share.gpu in self.suspended)
            or share.id in self.paused
            or (share.backend != "careful" and share.gpu in self.cleaning)
            or (not_offered and not self.fits_beside(share, not_offered))
            or any(conflicts(share, other) for other in others)
        )

    @property
    def offered(self) -> dict[ShareId, Share]:
        """Return the shares of the layout by id: an old cut may have another of the id."""
        return {share.id: share for share in self.layout.shares}

    def held_memory(self, one: GpuId) -> int:
        """Return the memory of a GPU that fractions hold."""
        return sum(
            share.memory
            for share in self.held.values()
            if share.gpu == one and share.backend == "fraction"
        )

    def fits_beside(self, share: Share, old: Sequence[Share]) -> bool:
        """Return whether a fraction is free beside fractions of an old cut; the last ones wait."""
        if {other.backend for other in (*old, share)} != {"fraction"}:
            return False
        if share.id in self.held:
            return True
        mine = [
            other
            for other in self.layout.shares
            if (other.gpu, other.backend) == (share.gpu, "fraction")
        ]
        free = [other for other in mine if other.id not in self.held]
        [total] = [other.memory or 0 for other in GPUS if other.id == share.gpu]
        return free.index(share) < (total - self.held_memory(share.gpu)) // share.memory

    def hold(self, shares: Sequence[Share]) -> None:
        """Record that shares are held."""
        for share in shares:
            self.held[share.id] = share
            if share.backend == "careful":
                self.cleaning.pop(share.gpu, None)

    def leave(self, one: GpuId) -> None:
        """Detach the careful backend from a GPU."""
        self.apply(BackendDetached(one, "careful", at=self.tick()))
        self.kept.discard(one)
        self.suspended.discard(one)
        self.paused = {share_id for share_id in self.paused if not share_id.startswith(one)}
        self.cleaning.pop(one, None)

    def carefully_held(self, one: GpuId) -> bool:
        """Return whether the careful backend has leases of a GPU."""
        return any(share.gpu == one and share.backend == "careful" for share in self.held.values())

    # --- the daemon ------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        """Apply a fact to the registry twice: the second time changes nothing."""
        self.registry.apply(fact)
        known = self.registry.snapshot
        assert not self.registry.apply(fact)
        assert self.registry.snapshot is known

    def tick(self) -> float:
        """Advance the time."""
        self.now += 10
        return self.now

    def granted(self, resource: ResourceName, shares: Sequence[Share]) -> bool:
        """Ask as the kubelet does; return whether the shares were granted."""
        service = DevicePluginService(
            resource, self.registry, lambda name: self.layout.backends[name], self.tick
        )
        ids = [str(share.id) for share in shares]
        container = v1beta1.ContainerAllocateRequest(devices_ids=ids)
        request = bytes(v1beta1.AllocateRequest(container_requests=[container]))
        try:
            self.loop.run(service._allocate(request))
        except RequestError:
            return False
        return True

    def lists(self) -> list[tuple[str, str]]:
        """Read the lists as the kubelet does."""
        devices: list[v1beta1.Device] = []
        for resource in self.layout.backends:
            made = DeviceList(resource)
            data = made.encode(made.view(self.registry.snapshot))
            devices += v1beta1.ListAndWatchResponse.parse(data).devices
        return [(device.id, device.health) for device in devices]


@pytest.mark.long
def test_no_story_breaks_the_rule_of_sharing() -> None:
    """No two conflicting shares are held or offered, and each share is listed once."""
    run_state_machine_as_test(
        Sharing,
        settings=settings(
            max_examples=settings().max_examples // 2,
            stateful_step_count=50,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )

"""Leases in random schedules of starts, ends, failures and clocks, beside an independent account.

The account is the node's: which containers run, and with which shares. The kubelet of this test
keeps nothing but what a kubelet keeps, and forgets it as one does. The daemon is the real registry,
service and follower of leases, on a clock that the test turns.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count
from pathlib import Path
from typing import ClassVar, Final

import pytest
from anyio import to_thread
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

from metagpu.core.errors import RequestError
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.model.sharing import conflicts
from metagpu.core.state.events import CheckpointRequested
from metagpu.core.state.facts import GpusFound, LeasesObserved, PodsListed
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet import messages as wire
from metagpu.plugins.kubelet import pod_resources
from metagpu.plugins.kubelet.checkpoint import AllocatedIds, read_allocated_ids
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.fast_codec import PreferredAllocation
from metagpu.plugins.kubelet.pb import v1, v1beta1
from metagpu.plugins.kubelet.pod_list import parse_leases
from metagpu.plugins.kubelet.pod_resources import LeaseFollower
from metagpu.plugins.kubelet.timing import TIMING
from tests.rigs.build import gpu, layout_of

GPUS: Final = (gpu(0), gpu(1))
LAYOUT: Final = layout_of(
    *GPUS,
    text="""
version: metagpu/v1
pools:
  - name: all
    backends:
      - {backend: fraction, sharesPerGpu: 3}
      - {backend: timeslice, replicas: 2, resource: x.y/slices}
      - {backend: whole}
""",
)
SHARES: Final = {share.id: share for share in LAYOUT.shares}
UNREADABLE: Final = {
    "error": None,
    "garbage": b"\x00\xff",
    "cut off": b"\n\x05abc",
    "unknown field": b"\xff\xff\xff\x01garbage",
}
"""Answers of PodResources that are none; the last two look like an empty list."""


@dataclass(eq=False)
class Pod:
    """A pod of the node, and the shares that each of its containers got."""

    uid: str
    containers: dict[str, tuple[ResourceName, tuple[ShareId, ...]]] = field(default_factory=dict)

    @property
    def shares(self) -> list[Share]:
        """The shares that its containers use."""
        return [SHARES[it] for _, ids in self.containers.values() for it in ids]


@dataclass
class Kubelet:
    """The memory of a kubelet, and the file that outlives it."""

    pods: dict[str, Pod]
    process: int = 0
    memory: dict[str, dict[str, tuple[ResourceName, tuple[ShareId, ...]]]] = field(
        default_factory=dict
    )
    admitted: set[str] = field(default_factory=set)
    pending: str = ""
    file: AllocatedIds | None = None
    writes: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def ready(self) -> bool:
        """True if it has admitted all pods of the API server."""
        return self.pods.keys() <= self.admitted

    def start(self, *, remembers: bool, keeps_file: bool) -> None:
        """Start again, from the file, without one, or with one that it does not take."""
        self.process = next(self.writes)
        self.memory = {uid: dict(held) for uid, held in self.memory.items() if remembers}
        self.admitted, self.pending = set(), ""
        self.file = self.file if keeps_file else None

    def write(self) -> None:
        """Write the checkpoint."""
        held = {uid: frozenset(_ids(one)) for uid, one in self.memory.items()}
        names = {i: name for one in self.memory.values() for name, ids in one.values() for i in ids}
        self.file = AllocatedIds(held, names, 0, next(self.writes))

    def release_ended(self) -> None:
        """Forget the devices of ended pods, but for the pod of the last admission."""
        if self.ready:
            kept = self.pods.keys() | {self.pending}
            self.memory = {uid: held for uid, held in self.memory.items() if uid in kept}

    def free(self, resource: ResourceName) -> list[ShareId]:
        """Return the ids that it takes for free."""
        held = {i for one in self.memory.values() for i in _ids(one)}
        return [i for i, share in SHARES.items() if share.resource == resource and i not in held]

    def list_pods(self) -> bytes:
        """Answer a list request of PodResources."""
        self.release_ended()
        listed = [uid for uid in self.pods if uid in self.admitted]
        return bytes(v1.ListPodResourcesResponse([self._pod(uid) for uid in listed]))

    def _pod(self, uid: str) -> v1.PodResources:
        held = self.memory.get(uid, {})
        containers = [
            v1.ContainerResources(
                name=name,
                devices=[
                    v1.ContainerDevices(resource_name=held[name][0], device_ids=[i])
                    for i in (held[name][1] if name in held else ())
                ],
            )
            for name in self.pods[uid].containers
        ]
        return v1.PodResources(name=uid, namespace="team", containers=containers)


def _ids(held: Mapping[str, tuple[ResourceName, tuple[ShareId, ...]]]) -> Iterator[ShareId]:
    for _, ids in held.values():
        yield from ids


class Schedules(RuleBasedStateMachine):
    """A node whose daemon and kubelet start, fail and wait in any order."""

    present: ClassVar["Schedules"]
    wall: ClassVar[float] = 0.0

    def __init__(self) -> None:
        super().__init__()
        type(self).present = self
        self.now = 1000.0
        self.runner = asyncio.Runner()
        self.runner.get_loop().time = lambda: self.now  # type: ignore[method-assign]
        self.names = (f"p{number}" for number in count())
        self.pods: dict[str, Pod] = {}
        self.pods["a-proxy"] = Pod("a-proxy")  # every node has such pods
        self.kubelet = Kubelet(self.pods)
        self.answer: bytes | None = None
        self.readable = True
        self.follows_api = False
        self.unreported: list[str] = []
        self.ended: list[str] = []

    def teardown(self) -> None:
        """Close the loop, and set the time of day right."""
        self.runner.close()
        type(self).wall = 0.0

    # --- what happens ----------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Start a kubelet, and the daemon."""
        self.start_daemon("")

    @rule(
        resources=st.lists(st.sampled_from(list(LAYOUT.backends)), min_size=1, max_size=2),
        size=st.sampled_from((1, 1, 2)),
        wait=st.sampled_from((0.0, 0.0, 6.0, 60.0)),
    )
    def admit(self, resources: list[ResourceName], size: int, wait: float) -> None:
        """Admit a pod, whose containers wait for each other's devices."""
        self.readmit()
        pod = Pod(next(self.names))
        self.list_pods(pod.uid)  # the kubelet knows it from there
        self.kubelet.pending = pod.uid
        for number, resource in enumerate(resources):
            name = f"c{number}"
            ids = self.allocate(resource, size)
            if ids is None:  # the pod has failed
                self.pods_in_admission = None
                self.unreported.append(pod.uid)
                return
            pod.containers[name] = resource, ids
            self.kubelet.memory.setdefault(pod.uid, {})[name] = resource, ids
            self.kubelet.write()
            # From here on the pod keeps these shares, though nobody lists it yet.
            self.pods_in_admission = pod
            for _ in range(int(wait / 2)):
                self.look("", 2)
        self.pods_in_admission = None
        self.pods[pod.uid] = pod
        self.kubelet.admitted.add(pod.uid)

    @precondition(lambda self: len(self.pods) > 1)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a pod."""
        uid = data.draw(st.sampled_from(sorted(self.pods)[1:]))
        del self.pods[uid]
        self.unreported.append(uid)

    @rule()
    def report_pods(self) -> None:
        """Report the pods of the API server, the ended ones too."""
        self.follows_api = True
        self.ended, self.unreported = self.unreported, []
        self.list_pods()

    @rule(how=st.sampled_from(("", *UNREADABLE)), times=st.sampled_from((1, 3, 40)))
    def wait(self, how: str, times: int) -> None:
        """Turn the clock while the daemon looks at the kubelet, which answers or does not."""
        for _ in range(times):
            self.look(how, 2)

    @rule(seconds=st.sampled_from((3600.0, -3600.0)))
    def step_clock(self, seconds: float) -> None:
        """Step the time of day."""
        type(self).wall += seconds

    @rule(how=st.sampled_from(("", *UNREADABLE)))
    def start_kubelet(self, how: str) -> None:
        """Start the kubelet again, with its checkpoint."""
        self.start(how, remembers=True, keeps_file=True)

    @precondition(lambda self: not self.claims)
    @rule(how=st.sampled_from(("", *UNREADABLE)), keeps_file=st.booleans())
    def start_forgetful_kubelet(self, how: str, *, keeps_file: bool) -> None:
        """Start the kubelet again without its checkpoint, or with one that it refuses."""
        self.start(how, remembers=False, keeps_file=keeps_file)

    @precondition(lambda self: not self.kubelet.ready)
    @rule()
    def readmit_one(self) -> None:
        """Admit one more of the pods that the kubelet found."""
        uid = min(self.pods.keys() - self.kubelet.admitted)
        self.kubelet.admitted.add(uid)
        self.kubelet.pending = uid

    @precondition(lambda self: self.knows_all)
    @rule(how=st.sampled_from(("", *UNREADABLE)))
    def start_daemon(self, how: str) -> None:
        """Start the daemon, again or for the first time; it looks before it offers."""
        self.registry = Registry()
        self.registry.apply(GpusFound(GPUS, at=0))
        self.registry.apply(LAYOUT.offer_fact)
        self.services = {
            name: DevicePluginService(name, self.registry, LAYOUT.backends.__getitem__)
            for name in LAYOUT.backends
        }
        self.follower = LeaseFollower(
            self.registry, Path("socket"), directory=Path("folder"), node="node-1"
        )
        self.list_pods()
        self.look(how, 0)
        self.register()

    @rule()
    def settle(self) -> None:
        """Repair everything: within some minutes nothing is held but what is used."""
        self.readmit()
        self.kubelet.pending = ""  # a pod without devices was admitted
        used = {it.id for pod in self.pods.values() for it in pod.shares}
        for _ in range(100):
            self.look("", 2)
            if self.leases.keys() == used:
                return
        raise AssertionError(self.leases.keys() ^ used)

    # --- what must be true -----------------------------------------------------------------------

    @invariant()
    def no_two_pods_conflict(self) -> None:
        """Check that no two containers use conflicting shares."""
        used = [share for pod in self.pods.values() for share in pod.shares]
        assert len(used) == len({share.id for share in used})
        assert not any(conflicts(a, b) for a, b in combinations(used, 2))

    @invariant()
    def nothing_is_taken_from_a_pod(self) -> None:
        """Check that the daemon takes no share of a running pod for free."""
        used = {share.id for pod in self.pods.values() for share in pod.shares}
        assert used <= self.leases.keys()

    # --- the node --------------------------------------------------------------------------------

    pods_in_admission: Pod | None = None
    started: float = 0.0

    @property
    def leases(self) -> dict[ShareId, object]:
        """The daemon's leases."""
        return {
            i: it for gpu in self.registry.snapshot.gpus.values() for i, it in gpu.leases.items()
        }

    @property
    def claims(self) -> bool:
        """True if the daemon has leases without a holder.

        Nobody can know those of a kubelet that dies before it lists the pod, and loses its
        checkpoint.
        """
        states = self.registry.snapshot.gpus.values()
        return any(it.holder is None for gpu in states for it in gpu.leases.values())

    @property
    def knows_all(self) -> bool:
        """True if the kubelet knows the shares of all pods: without it, a new daemon cannot."""
        known = {i for held in self.kubelet.memory.values() for i in _ids(held)}
        return {share.id for pod in self.pods.values() for share in pod.shares} <= known

    def start(self, how: str, *, remembers: bool, keeps_file: bool) -> None:
        """Start the kubelet; the daemon registers, and looks."""
        self.started = self.now
        self.kubelet.start(remembers=remembers, keeps_file=keeps_file)
        self.register()
        self.look(how, 0.5)

    def list_pods(self, *coming: str) -> None:
        """Report the pods as the API server knows them, where the daemon follows it."""
        if self.follows_api:
            phases = dict.fromkeys((*self.pods, *self.unreported, *coming), "Running")
            phases |= dict.fromkeys(self.ended, "Succeeded")
            pods = (KnownPod(uid, "team", uid, phase) for uid, phase in phases.items())
            self.registry.apply(PodsListed(tuple(pods)))

    def register(self) -> None:
        """Register the daemon: the kubelet gets its lists, and writes its checkpoint."""
        for service in self.services.values():
            service.greet((0, 0, self.kubelet.process))
        self.kubelet.write()

    def readmit(self) -> None:
        """Admit all earlier pods again: the kubelet does so before it admits a new one."""
        self.kubelet.admitted |= self.pods.keys()
        self.kubelet.release_ended()

    def look(self, how: str, seconds: float) -> None:
        """Turn the clock, then look as the daemon does."""
        self.now += seconds
        if self.now - self.started > TIMING.readiness / 2:
            self.readmit()  # it takes no longer than that
        self.readable = not how
        self.answer = UNREADABLE.get(how)
        self.runner.run(self._look())
        pod = self.pods_in_admission
        assert pod is None or {it.id for it in pod.shares} <= self.leases.keys()

    async def _look(self) -> None:
        with self.registry.events.subscribe(CheckpointRequested, depth=1) as requests:
            await self.follower.look()
            self.registry.events.publish(CheckpointRequested())  # it displaces an earlier one
            if requests.lost:
                self.kubelet.write()

    def allocate(self, resource: ResourceName, size: int) -> tuple[ShareId, ...] | None:
        """Choose shares as the kubelet does, and ask for them; `None` if that fails."""
        service = self.services[resource]
        view = wire.DeviceList(resource)
        listed = v1beta1.ListAndWatchResponse.parse(view.encode(view.view(self.registry.snapshot)))
        healthy = {device.id for device in listed.devices if device.health == "Healthy"}
        free = [i for i in self.kubelet.free(resource) if i in healthy]
        if len(free) < size:
            return None
        chosen = tuple(map(ShareId, service.chooser.choose(PreferredAllocation(free, (), size))))
        container = v1beta1.ContainerAllocateRequest(devices_ids=list(chosen))
        request = bytes(v1beta1.AllocateRequest(container_requests=[container]))
        try:
            self.runner.run(service._allocate(request))
        except RequestError:
            return None
        return chosen

    # --- what the daemon reads -------------------------------------------------------------------

    async def read_leases(self, _socket: Path, asked: float, _deadline: float) -> LeasesObserved:
        """Answer as PodResources."""
        if not self.readable:
            if self.answer is None:
                raise OSError("connection refused")
            return parse_leases(self.answer, asked)
        return parse_leases(self.kubelet.list_pods(), asked)


@pytest.fixture
def on_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what the follower of leases reads by the present schedule's kubelet."""

    async def read(*arguments: object) -> LeasesObserved:
        return await Schedules.present.read_leases(*arguments)  # type: ignore[arg-type]

    async def run_sync(work: Callable[..., object], *_: object) -> object:
        kubelet = Schedules.present.kubelet
        is_file = work is read_allocated_ids
        return kubelet.file if is_file else (0, 0, kubelet.process)

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + Schedules.wall)
    monkeypatch.setattr(pod_resources, "read_leases", read)
    monkeypatch.setattr(pod_resources, "_log_failure", lambda *_: None)  # a schedule has hundreds
    monkeypatch.setattr(to_thread, "run_sync", run_sync)


@pytest.mark.usefixtures("on_a_model")
def test_no_schedule_gives_a_held_share_away() -> None:
    """No start, failure, step of the clock or slow admission takes a share from a running pod."""
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=settings().max_examples // 4,
            stateful_step_count=40,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )

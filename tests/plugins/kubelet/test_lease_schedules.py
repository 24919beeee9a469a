"""Leases in random schedules of starts, ends, failures and clocks, beside an independent account.

The account is the node's: which containers run, and with which shares. The kubelet of this test
keeps nothing but what a kubelet keeps, and forgets it as one does. The daemon is the real registry,
service and follower of leases, with the real backend `mig` on a GPU that has the account too: it
knows which MIG devices are used when one is destroyed. All are on a clock that the test turns.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar, cast

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

from metagpu.backends.common.mps_daemon.control import leftover_devices
from metagpu.core.availability.conflict import conflicts
from metagpu.core.grants.injection import VISIBLE_DEVICES
from metagpu.core.layout.backend_runner import BackendRunner
from metagpu.core.model.mig import is_mig, slot_of
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.state.events import CheckpointRequested
from metagpu.core.state.facts import GpusFound, LeasesObserved, PodsListed
from metagpu.core.state.registry import Registry
from metagpu.host.linux import LinuxHost
from metagpu.plugins.kubelet import pod_resources
from metagpu.plugins.kubelet.checkpoint import AllocatedIds, read_allocated_ids
from metagpu.plugins.kubelet.device_plugin import DeviceList, DevicePluginService
from metagpu.plugins.kubelet.fast_codec import PreferredAllocation
from metagpu.plugins.kubelet.paths import KubeletFiles, find_files
from metagpu.plugins.kubelet.pb import v1, v1beta1
from metagpu.plugins.kubelet.pod_list import parse_leases
from metagpu.plugins.kubelet.pod_resources import LeaseFollower
from metagpu.plugins.kubelet.timing import TIMING
from metagpu.sim.machine.programs import sim_daemons
from metagpu.testing.node import RecordedPrograms
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import gpu, layout_of
from tests.rigs.mig_board import BoardDriver, MigBoard

if TYPE_CHECKING:
    from metagpu.core.contracts.driver import Driver

TaskT = TypeVar("TaskT")

KEEP_WARM: Final = 10
"""The seconds after which an idle MIG instance is removed."""
MIG_GPU: Final = mig_gpu(2)
GPUS: Final = (gpu(0), gpu(1), MIG_GPU)
LAYOUT: Final = layout_of(
    *GPUS,
    text=f"""
version: metagpu/v1
pools:
  - name: all
    gpus: {{index: "0-1"}}
    backends:
      - {{backend: fraction, sharesPerGpu: 3}}
      - {{backend: timeslice, replicas: 2, resource: x.y/slices}}
      - {{backend: whole}}
  - name: mig
    gpus: {{index: 2}}
    backends:
      - {{backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb], keepWarm: {KEEP_WARM}s}}
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
    """A pod of the node, and the shares and MIG devices that its containers got."""

    uid: str
    containers: dict[str, tuple[ResourceName, tuple[ShareId, ...]]] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)

    @property
    def shares(self) -> list[Share]:
        """The shares that its containers use."""
        return [SHARES[share_id] for _, ids in self.containers.values() for share_id in ids]


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


class Admission(NamedTuple):
    """An admission of a pod.

    Attributes:
        resources: the resource of each container.
        size: the number of shares of each.
        wait: seconds after each answer of the daemon.
        how: how PodResources answers meanwhile.
        restart: how the daemon ends and starts again meanwhile: while it creates a MIG instance,
            or else after its first answer.
        blind: the first of the free shares that a kubelet takes which has neither the newest list
            nor a preference.
        pause: seconds before each request.
        turns: the turns of the event loop after the pause, and before a restart: the daemon is in
            the middle of its work then.
    """

    resources: list[ResourceName]
    size: int
    wait: float
    how: str
    restart: str
    blind: int | None
    pause: float
    turns: int


MIG_RESOURCES: Final = [backend for backend in LAYOUT.backends if "mig" in backend]


def admissions_of(resources: Collection[ResourceName]) -> st.SearchStrategy[Admission]:
    """Return admissions of pods that want some of these resources."""
    return st.builds(
        Admission,
        resources=st.lists(st.sampled_from(list(resources)), min_size=1, max_size=2),
        size=st.sampled_from((1, 1, 2)),
        wait=st.sampled_from((0.0, 0.0, 6.0, 60.0)),
        how=st.sampled_from(("", "", *UNREADABLE)),
        restart=st.sampled_from(("", "", "", "", "stop", "kill")),
        blind=st.sampled_from((None, None, None, 0, 3, 8, 13)),
        pause=st.sampled_from((0.0, 0.0, KEEP_WARM)),
        turns=st.integers(0, 40),
    )


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
        self.board = MigBoard(MIG_GPU, self.used_devices)
        self.answer: bytes | None = None
        self.readable = True
        self.follows_api = False
        self.unreported: list[str] = []
        self.ended: list[str] = []

    def teardown(self) -> None:
        """Close the loop, and set the time of day right."""
        self.stop_daemon(kill=True)
        self.runner.close()
        type(self).wall = 0.0

    # --- what happens ----------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Start a kubelet, and the daemon."""
        self.start_daemon("", kill=True, backends_first=True)

    @rule(its=admissions_of(LAYOUT.backends))
    def admit(self, its: Admission) -> None:
        """Admit a pod, whose containers wait for each other's devices."""
        self.restart = its.restart
        self.readmit()
        pod = Pod(next(self.names))
        self.list_pods(pod.uid)  # the kubelet knows it from there
        self.kubelet.pending = pod.uid
        self.kubelet.release_ended()  # of the pod of the last admission too
        for number, resource in enumerate(its.resources):
            name = f"c{number}"
            granted = self.allocate(resource, its)
            if granted is None:  # the pod has failed
                self.pods_in_admission = None
                self.unreported.append(pod.uid)
                return
            ids, devices = granted
            pod.containers[name] = resource, ids
            pod.devices += devices
            self.kubelet.memory.setdefault(pod.uid, {})[name] = resource, ids
            self.kubelet.write()
            # From here on the pod keeps these shares, though nobody lists it yet.
            self.pods_in_admission = pod
            self.restart_if_due(its.how)
            for _ in range(int(its.wait / 2)):
                self.look(its.how, 2)
        self.pods_in_admission = None
        self.pods[pod.uid] = pod
        self.kubelet.admitted.add(pod.uid)

    @rule(its=admissions_of(MIG_RESOURCES))
    def admit_with_instances(self, its: Admission) -> None:
        """Admit a pod with MIG instances."""
        self.admit(its)

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

    @rule(seconds=st.sampled_from((0.0, 3.0, 20.0)))
    def slow_down(self, seconds: float) -> None:
        """Slow the driver down; a creation of 20 s misses its deadline."""
        self.board.delay = seconds

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
    @rule(how=st.sampled_from(("", *UNREADABLE)), kill=st.booleans(), backends_first=st.booleans())
    def start_daemon(self, how: str, *, kill: bool, backends_first: bool) -> None:
        """Start the daemon, again or for the first time; it looks before it offers.

        Its backends may read the GPUs before it has looked.
        """
        self.stop_daemon(kill=kill)
        self.registry = Registry()
        self.registry.apply(GpusFound(GPUS, at=0))
        self.driver = BoardDriver(self.board)
        backends = BackendRunner(
            self.registry,
            cast("Driver", self.driver),
            RecordedPrograms(),
            sim_daemons(),
            LinuxHost(),
        )
        backends.apply(LAYOUT)
        self.services = {
            name: DevicePluginService(name, self.registry, LAYOUT.backends.__getitem__)
            for name in LAYOUT.backends
        }
        self.follower = LeaseFollower(
            self.registry, Path("socket"), directory=Path("folder"), node="node-1"
        )
        self.list_pods()
        if backends_first:
            self.running = self.run_beside(backends.run())
        self.look(how, 0)
        if not backends_first:
            self.running = self.run_beside(backends.run())
        self.register()

    @rule()
    def settle(self) -> None:
        """Repair everything: within some minutes nothing is held or exists but what is used."""
        self.readmit()
        self.board.delay = 0
        self.kubelet.pending = ""  # a pod without devices was admitted
        used = {share.id for pod in self.pods.values() for share in pod.shares}
        for _ in range(100):
            self.look("", 2)
            devices, there = self.used_devices(), self.board.devices
            whole = len(self.board.instances) == len(there)
            if self.leases.keys() == used and set(there) == set(devices) and whole:
                return
        raise AssertionError(self.leases.keys() ^ used, self.board.instances, self.used_devices())

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

    @invariant()
    def no_mig_device_is_taken_from_a_pod(self) -> None:
        """Check that each device of a running pod exists, where its share says, for it alone."""
        assert not self.board.taken
        devices, there = self.used_devices(), self.board.devices
        assert len(devices) == len(set(devices))
        shares = [share.id for pod in self.pods.values() for share in pod.shares]
        assert sorted(there[device] for device in devices) == sorted(
            map(slot_of, filter(is_mig, shares))
        )

    # --- the node --------------------------------------------------------------------------------

    pods_in_admission: Pod | None = None
    started: float = 0.0
    restart: str = ""
    running: asyncio.Task[None] | None = None

    def used_devices(self) -> list[str]:
        """Return the MIG devices that running pods and the one in admission have got."""
        pods = (*self.pods.values(), self.pods_in_admission)
        return [device for pod in pods if pod is not None for device in pod.devices]

    @property
    def leases(self) -> dict[ShareId, object]:
        """The daemon's leases."""
        return {
            i: lease
            for gpu in self.registry.snapshot.gpus.values()
            for i, lease in gpu.leases.items()
        }

    @property
    def claims(self) -> bool:
        """True if the daemon has leases without a holder.

        Nobody can know those of a kubelet that dies before it lists the pod, and loses its
        checkpoint.
        """
        states = self.registry.snapshot.gpus.values()
        return any(lease.holder is None for gpu in states for lease in gpu.leases.values())

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
        assert pod is None or {share.id for share in pod.shares} <= self.leases.keys()

    async def _look(self) -> None:
        await _until_all_wait()
        with self.registry.events.subscribe(CheckpointRequested, depth=1) as requests:
            await self.follower.look()
            self.registry.events.publish(CheckpointRequested())  # it displaces an earlier one
            if requests.lost:
                self.kubelet.write()
        await _until_all_wait()

    def run_beside(self, work: Coroutine[Any, Any, TaskT]) -> asyncio.Task[TaskT]:
        """Start a task of the daemon, which goes on whenever the loop runs."""
        task = self.runner.get_loop().create_task(work)
        self.runner.run(_until_all_wait())
        return task

    def stop_daemon(self, *, kill: bool) -> None:
        """End the daemon, if there is one, in the middle of its work or in good order."""
        if self.running is None:
            return
        if kill:
            self.driver.kill()
        self.running.cancel()
        self.runner.run(_until_all_wait())
        while not self.running.done():
            self.now += 1
            self.runner.run(_until_all_wait())

    def restart_if_due(self, how: str) -> bool:
        """Start the daemon again if the present admission has that; return whether it had."""
        due, self.restart = self.restart if self.knows_all else "", ""
        if due:
            self.start_daemon(how, kill=due == "kill", backends_first=True)
        return bool(due)

    def allocate(
        self, resource: ResourceName, its: Admission
    ) -> tuple[tuple[ShareId, ...], list[str]] | None:
        """Choose shares as the kubelet does, and ask for them; `None` if that fails.

        Returns the shares, and the MIG devices that the answer names.
        """
        self.now += its.pause
        self.runner.run(_run_turns(its.turns))
        service = self.services[resource]
        view = DeviceList(resource)
        listed = v1beta1.ListAndWatchResponse.parse(view.encode(view.view(self.registry.snapshot)))
        healthy = {device.id for device in listed.devices if device.health == "Healthy"}
        free = self.kubelet.free(resource)
        if its.blind is None:
            free = [i for i in free if i in healthy]
        if len(free) < its.size:
            return None
        if its.blind is None:
            preferred = service.chooser.choose(PreferredAllocation(free, (), its.size))
        else:
            preferred = [free[(its.blind + number) % len(free)] for number in range(its.size)]
        chosen = tuple(map(ShareId, preferred))
        container = v1beta1.ContainerAllocateRequest(devices_ids=list(chosen))
        request = bytes(v1beta1.AllocateRequest(container_requests=[container]))
        call = self.runner.get_loop().create_task(service._allocate(request))
        self.runner.run(_run_turns(its.turns))
        while not call.done():
            if self.restart_if_due(its.how):
                call.cancel()
                self.runner.run(_until_all_wait())
                return None
            self.look(its.how, 0.5)
        try:
            answer = v1beta1.AllocateResponse.parse(call.result())
        except RequestError:
            return None
        names = answer.container_responses[0].envs.get(VISIBLE_DEVICES, "").split(",")
        return chosen, [name for name in names if name.startswith("MIG-")]

    # --- what the daemon reads -------------------------------------------------------------------

    async def read_leases(self, _socket: Path, asked: float, _deadline: float) -> LeasesObserved:
        """Answer as PodResources."""
        if not self.readable:
            if self.answer is None:
                raise OSError("connection refused")
            return parse_leases(self.answer, asked)
        return parse_leases(self.kubelet.list_pods(), asked)


async def _run_turns(turns: int) -> None:
    """Run as many turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def _until_all_wait() -> None:
    """Run all tasks until each waits, for an event or for the clock."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while loop._ready:  # type: ignore[attr-defined]  # noqa: ASYNC110 - the loop has no event of it
        await asyncio.sleep(0)


@pytest.fixture
def on_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what the follower of leases reads by the present schedule's kubelet."""

    async def read(*arguments: object) -> LeasesObserved:
        return await Schedules.present.read_leases(*arguments)  # type: ignore[arg-type]

    async def run_sync(work: Callable[..., object], *_: object) -> object:
        kubelet = Schedules.present.kubelet
        answers = {
            read_allocated_ids: kubelet.file,
            find_files: KubeletFiles(((0, 0, kubelet.process),) * 2),
            leftover_devices: (),
        }
        return answers[work]

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + Schedules.wall)
    monkeypatch.setattr(pod_resources, "read_leases", read)
    monkeypatch.setattr(pod_resources, "_log_failure", lambda *_: None)  # a schedule has hundreds
    monkeypatch.setattr(to_thread, "run_sync", run_sync)


@pytest.mark.usefixtures("on_a_model")
@pytest.mark.long
def test_no_schedule_gives_a_held_share_away() -> None:
    """No start, failure, step of the clock or slow admission takes a share from a running pod."""
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=settings().max_examples // 2,
            stateful_step_count=40,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )

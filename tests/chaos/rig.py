"""The rig: daemons as processes on a simulated node, in its cluster, moved by the steps of a story.

The kubelet, the API server and the scheduler run here, the daemons as an operator starts them. A
schedule keeps to what can happen on a node: a kubelet that starts lists its pods late, or some of
them; its checkpoint is damaged while it runs, and what a kubelet without one forgot is deleted
before metagpu restarts (docs/leases.md: nobody could know).
"""

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from resource import RLIMIT_FSIZE, RLIMIT_NOFILE, prlimit
from typing import Any, Final

import anyio
from aiohttp import web
from anyio import to_thread
from anyio.abc import TaskGroup
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.agent.exchange import read_standby
from metagpu.core.model.shares import Holder
from metagpu.plugins.kubelet.pb import v1
from metagpu.sim.apiserver.objects import Object
from metagpu.sim.cluster import paths
from metagpu.sim.cluster.single_node import SingleNodeCluster
from metagpu.sim.kubelet import process as kubelet_process
from metagpu.sim.kubelet.kubelet import (
    AdmissionError,
    ContainerRunOptions,
    KubeletDownError,
    SimPod,
)
from metagpu.sim.kubelet.pod_resources import PodResourcesV1
from metagpu.sim.kubelet.pods import DeviceError
from metagpu.sim.kubelet.process import CHECKPOINT
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.spec import build_node
from tests.chaos.account import Account, Holding
from tests.chaos.chaos import Chaos, claims
from tests.chaos.node import (
    CONFIGURATIONS,
    FRACTION,
    GPUS,
    PARTS,
    SLICED,
    UNITS,
)
from tests.chaos.work import HOST, Place, Work
from tests.rigs.exchange import Daemon, at, at_work

PROBE_S: Final = 30.0
"""Seconds in which a pod that fits runs, and a pod that is deleted has gone."""
LONGEST_BLINDNESS_S: Final = 15.0
"""Seconds for which a kubelet with an older list asks beside one that lists pods late."""
QUICK: Final = """
from msgspec.structs import replace
from metagpu.agent.agent import Agent
from metagpu.agent.timing import AgentTiming
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.inventory import MigTiming

begin, times = Agent.__init__, AgentTiming()
kubelet = replace(times.kubelet, readiness=12.0, poll_period=2.0, contended_period=1.0)
def quickly(self, *given, **named):
    begin(self, *given, **{"timing": replace(times, kubelet=kubelet), **named})
Agent.__init__ = quickly
MigBackend.timing = MigTiming(grace=6.0, scan=2.0, poll=1.0, stagger=0.2)
"""
"""Python that shortens what only takes time, in every daemon: a kubelet is ready after 12 s in
place of 60, twice as long as the longest mood of a schedule."""
NODE: Final = """
import pathlib, time
real, file = time.time, pathlib.Path({clock!r})
time.time = lambda: real() + int(file.read_text() or 0)

import resource
from metagpu.sim.machine.mig_driver import _SavingCondition
save = _SavingCondition._keep
def keep(self):
    disk, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        save(self)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk, most))
_SavingCondition._keep = keep
"""
"""Python that gives a daemon the node's clock, and the simulated driver a disk of its own."""
SLOW_S: Final = 2.0
"""Seconds in which a slow API server answers."""
_ARGUMENTS: Final = "from metagpu.cli.metagpu import main; exit(main())"


@dataclass(kw_only=True)
class SimulatedChaos(Chaos):
    """A simulated node, and what befalls it."""

    folder: Path
    cluster: SingleNodeCluster
    group: TaskGroup
    work: Work
    plant: str = ""
    daemons: list[Daemon] = field(default_factory=list)
    mood: str = "well"
    mood_lasts: float = 0.0
    mood_ends: float | None = None
    damaged: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    api_delay: float = 0.0
    clock: int = 0

    # ---- steps -------------------------------------------------------------------------------

    async def end(self, pod: Object) -> None:
        """Delete a pod; its kubelet ends it when it runs."""
        metadata = pod["metadata"]
        key = ("pods", metadata["namespace"], metadata["name"])
        self.note(f"  deletes {metadata['name']}")
        if not pod["spec"].get("nodeName"):
            self.cluster.api.store.delete(key)
        else:
            patch = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
            self.cluster.api.store.merge(key, patch, status=False, manager="kubectl")

    async def do_force(self, number: int) -> None:
        """Delete a pod by force: it is gone at the API server, whatever its kubelet does."""
        if not (pods := [other for other in self.cluster.api.pods() if not claims(other)]):
            return
        metadata = pods[number % len(pods)]["metadata"]
        self.note(f"  deletes {metadata['name']} by force")
        self.cluster.api.store.delete(("pods", metadata["namespace"], metadata["name"]))
        if pod := self.cluster._sync._pods.pop(metadata["uid"], None):
            await self.cluster.kubelet.delete(pod)

    async def do_kubelet_restart(self, mood: str, seconds: float) -> None:
        """Start the kubelet again."""
        await self._restore()
        self._be(mood, seconds)
        await self._restart_kubelet()

    async def _restart_kubelet(self, **how: bool) -> None:
        self._set_clock(0)
        await self.cluster.restart_kubelet(**how)

    do_kubelet_up = do_kubelet_restart

    async def do_kubelet_down(self) -> None:
        """Kill the kubelet; containers go on."""
        await self._restore()
        await self.cluster.stop_kubelet()

    async def do_forget(self) -> None:
        """Start the kubelet without its checkpoint, beside a daemon that knows all leases."""
        if self._server() is None or not self.cluster.kubelet.is_up:
            return
        await self.rest()
        self.forgotten |= {pod.name for pod in self.cluster.kubelet.pods}
        self._be("well", 0)
        await self._restart_kubelet(forget=True)

    async def do_kill(self, down: float) -> None:
        """Kill the daemon and start it again."""
        await self._stop(signal.SIGKILL)
        await anyio.sleep(down)
        await self.start()

    async def do_terminate(self, down: float) -> None:
        """End the daemon in good order and start it again."""
        await self._stop(signal.SIGTERM)
        await anyio.sleep(down)
        await self.start()

    async def do_kill_beside_late_kubelet(self, mood: str, seconds: float) -> None:
        """Kill the daemon, start the kubelet again, and the daemon."""
        await self._stop(signal.SIGKILL)
        await self.do_kubelet_restart(mood, seconds)
        await self.start()

    async def do_damage(self, how: str, mood: str, seconds: float) -> None:
        """Damage the checkpoint of a running kubelet, and kill the daemon."""
        if not self.cluster.kubelet.is_up or self._is_moody():
            return
        await self._stop(signal.SIGKILL)
        file = self.cluster.kubelet.directory / CHECKPOINT
        text = file.read_text() if file.exists() else ""
        match how:
            case "missing":
                file.unlink(missing_ok=True)
            case "half":
                file.write_text(text[: len(text) // 2])
            case _:
                file.write_text("" if how == "empty" else "\x00{garbage")
        self.damaged = True
        self._be(mood, seconds)
        await self.start()

    async def _restore(self) -> None:
        """Write the checkpoint anew, as the kubelet does after its next change."""
        if self.damaged and (process := self.cluster.kubelet._process) is not None:
            await process.save()
        self.damaged = False

    async def do_exchange(self, at: str = "", by: str = "KILL") -> None:
        """Exchange the daemon by another one, one of which may get a signal on the way."""
        old = self._server()
        if old is None:
            await self.start()
            return
        await self.delete_forgotten()
        await self.start(_at(at, by) if at else "")  # at the last two steps, when it is ended later
        new = self.daemons[-1]
        if at in {"prepare", "standby"}:
            await self.until(lambda: not new.alive, 20)
        else:
            await self.until(self._has_standby, 20)
        await self._end_daemon(old, signal.SIGTERM)
        if at in {"take", "registered"}:
            await self.until(lambda: not new.alive, 20)
        await self._replace_halted()

    async def do_old_list(self, number: int, seconds: float) -> None:
        """Ask for a share that nobody may get now, as a kubelet does that has an older list."""
        ends = time.monotonic() + seconds
        with anyio.move_on_after(LONGEST_BLINDNESS_S):
            while not self.account.broken and (self._is_moody() or time.monotonic() < ends):
                await self._ask_by_an_old_list(number)
                await anyio.sleep(0.1)

    async def _ask_by_an_old_list(self, number: int) -> None:
        process = self.cluster.kubelet._process
        if process is None:
            return
        self.look()
        shares = sorted(
            (name, device) for name, devices in process.state.devices.items() for device in devices
        )
        taken = [share for share in shares if self.account.conflict(self.account.of_device(*share))]
        if not taken:
            return
        name, device = taken[number % len(taken)]
        endpoint = process.state.endpoints.get(name)
        if endpoint is None or endpoint.plugin is None:
            return
        try:
            await endpoint.plugin.allocate([device])
        except DeviceError:
            return
        self.look()
        if reason := self.account.conflict(self.account.of_device(name, device)):
            self.account.add(f"{device} of {name} was granted by an older list: {reason}")

    async def do_work(self, number: int, percent: int, count: int, stubborn: int) -> None:
        """Start processes in a container; together they use some percent of its limit."""
        places = [place for pod in self.cluster.kubelet.pods for place in self._places(pod)]
        if places:
            place = places[number % len(places)]
            self.note(f"  in {place}")
            for _ in range(count):
                self.work.start(
                    place, place.limit * percent // 100 // count, stubborn=bool(stubborn)
                )

    def _places(self, pod: SimPod) -> Iterable[Place]:
        listed = {container.name for container in pod.listed()}
        with suppress(KubeletDownError):
            for name, devices in self.cluster.kubelet.devices(pod).items():
                for resource, ids in devices.items():
                    if name not in listed or resource not in PARTS:
                        continue
                    gpus = [self.account.of_device(resource, one).gpu for one in sorted(ids)]
                    for gpu in sorted(set(gpus)):
                        holder = Holder(pod.namespace, pod.name, name)
                        yield Place(pod.uid, holder, resource, gpu, gpus.count(gpu))

    async def _tell_driver(self) -> None:
        """Report all processes to the driver, which starts with each daemon."""
        while self.work.ended:
            pid, gpu = self.work.ended.pop()
            await self.sim({"do": "process", "change": "end", "gpu": str(gpu), "pid": pid})
        for pid, (_, place, mib) in list(self.work.running.items()):
            process = {"do": "process", "change": "start", "gpu": str(place.gpu), "pid": pid}
            await self.sim({**process, "memory": mib * 2**20})

    def _above(self) -> list[str]:
        """Return who uses more than may be, of what is on offer."""
        return [
            f"{place.holder} uses {mib} MiB of GPU {place.gpu}, not {place.limit}"
            for place, mib in self.work.over().items()
            if self.configuration != "no slices" or place.resource != SLICED
        ]

    async def do_api(self, how: str, seconds: int) -> None:
        """Make the API server fail for some seconds."""
        api = self.cluster.api
        if how == "slow":
            self.api_delay = SLOW_S
        elif how == "away":
            api.failing += [(method, "/") for method in ("GET", "PATCH", "POST", "PUT", "DELETE")]
        else:
            reason = "Expired" if how == "410" else "TooManyRequests"
            api.fail(int(how), 3 * seconds, retry=how == "429", reason=reason)
        api.end_watches()
        self.group.start_soon(self._later, seconds, self._repair_api)

    def _repair_api(self) -> None:
        self.api_delay = 0.0
        self.cluster.api.failing.clear()
        self.cluster.api.failures.clear()

    async def do_stop_at_work(self, at: str, when: str, by: str) -> None:
        """End or stop the daemon at a step of its work, and start another one."""
        await self._stop(signal.SIGTERM)
        await self.start(at_work(at, when, signal.Signals[f"SIG{by}"]))
        armed = self.daemons[-1]
        await self.until(lambda: self._has_lists() or not armed.alive, PROBE_S)
        name = f"pod-{self.number + 1}"
        if at in {"prepare", "unprepare"}:
            await self.do_claim("fraction", 10)
        else:
            resource = {"mps": UNITS, "allocate": FRACTION}.get(at, "nvidia.com/mig-1g.5gb")
            await self.do_pod(resource, 1, "one")
        if at in {"unprepare", "destroy"}:
            key = ("pods", "default", name)
            objects = self.cluster.api.store.objects
            await self.until(lambda: objects[key]["status"]["phase"] != "Pending", 10)
            await self.end(objects[key])
        halted = await self.until(lambda: not armed.alive, 10)
        self.note(f"  the daemon {'has ended or hangs' if halted else 'has not come to this'}")
        if not halted:
            await self._end_daemon(armed, signal.SIGTERM)
        await self._replace_halted()

    def _has_lists(self) -> bool:
        """Return whether the kubelet has lists of a daemon that runs."""
        return all(self.cluster.kubelet.open_streams.get(name) == 1 for name in self.expected(()))

    async def do_clock(self, step: int) -> None:
        """Set the clock of the node forward or back, until a kubelet starts."""
        self._set_clock(self.clock + step)

    def _set_clock(self, ahead: int) -> None:
        self.clock = ahead
        (self.folder / "clock").write_text(str(self.clock))

    def write_checkpoint(self, path: Path, text: str) -> None:
        """Write a kubelet's checkpoint at the time of the node's clock."""
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text)
        at = time.time() + self.clock
        os.utime(fresh, (at, at))
        fresh.replace(path)

    async def do_full_disk(self, seconds: int) -> None:
        """Keep the daemon from writing to any file for some seconds."""
        if daemon := self._server():
            _limit(daemon.process.pid, RLIMIT_FSIZE, 0)
            self.group.start_soon(
                self._later, seconds, partial(_limit, daemon.process.pid, RLIMIT_FSIZE, None)
            )

    async def do_descriptors(self, spare: int, seconds: int) -> None:
        """Limit the files that the daemon can open for some seconds."""
        if daemon := self._server():
            pid = daemon.process.pid
            _limit_files(pid, spare)
            self.group.start_soon(self._later, seconds, partial(_limit_files, pid, None))

    async def _later(self, seconds: float, what: Callable[[], None]) -> None:
        await anyio.sleep(seconds)
        what()

    async def do_remove(self, what: str) -> None:
        """Remove what metagpu has written to a folder of the host, as a clean-up does."""
        folder = {"cdi": paths.cdi_dir(self.folder), "pods": self.folder / "pods"}.get(
            what, paths.kubelet_dir(self.folder)
        )
        for file in folder.glob("**/*"):
            if not file.is_dir() and "kubelet" not in file.name:
                file.unlink(missing_ok=True)

    # ---- rest --------------------------------------------------------------------------------

    async def do_quiet(self) -> None:
        """Judge the processes of a node at rest too."""
        await self.rest()
        await self.until(lambda: not self._above(), PROBE_S)
        for sentence in self._above():
            self.account.add(f"after {PROBE_S:.0f} s of quiet, {sentence}")
        await self.judge()

    async def rest(self) -> None:
        """Wait until kubelet, checkpoint, daemon and GPUs are as they should be."""
        self._be("well", 0)
        self._set_clock(0)
        if not self.cluster.kubelet.is_up:
            await self._restart_kubelet()
        await self._restore()
        await self._replace_halted()
        if daemon := self._server():
            _limit(daemon.process.pid, RLIMIT_FSIZE, None)
        self._repair_api()
        await self.do_reload(self.configuration)
        if self._server() is None:
            await self.start()
        await self.calm()

    def pods(self) -> list[Object]:
        """Return the pods that the API server has."""
        return list(self.cluster.api.pods())

    def allocatable(self) -> Mapping[str, int]:
        """Return how many healthy devices of each resource the kubelet has."""
        return self.cluster.kubelet.allocatable()

    async def see(self) -> None:
        """Take over what is seen now, after a short pause."""
        await anyio.sleep(0.05)
        self.look()

    async def configure(self, text: str) -> None:
        """Write a configuration; the daemon reads it."""
        await anyio.Path(self.folder / "metagpu.yaml").write_text(text)

    async def create(self, kind: str, name: str, content: Object) -> None:
        """Create a pod or a ResourceClaim."""
        self.cluster.api.store.put((kind, "default", name), content)

    # ---- the kubelet -------------------------------------------------------------------------

    def _be(self, mood: str, seconds: float) -> None:
        """Set the kubelet's mood, for some seconds from the first question on."""
        self.mood, self.mood_lasts, self.mood_ends = mood, seconds, None

    def _is_moody(self) -> bool:
        return self.mood != "well" and (self.mood_ends is None or time.monotonic() < self.mood_ends)

    async def list_pods(
        self, service: PodResourcesV1, request: v1.ListPodResourcesRequest
    ) -> v1.ListPodResourcesResponse:
        """Answer PodResources List in the kubelet's present mood."""
        if self.mood_ends is None:
            self.mood_ends = time.monotonic() + self.mood_lasts
        mood = self.mood if self._is_moody() else "well"
        if mood == "late":
            await anyio.sleep(max(0.0, self.mood_ends - time.monotonic()))
        if mood == "erring":
            raise GRPCError(Status.UNAVAILABLE, "the kubelet is starting")
        answer = await _list(service, request)
        if mood in {"empty", "half"}:
            kept = 0 if mood == "empty" else len(answer.pod_resources) // 2
            return v1.ListPodResourcesResponse(pod_resources=answer.pod_resources[:kept])
        return answer

    async def admit(
        self, pod: SimPod, really: Callable[[SimPod], Any]
    ) -> Mapping[str, ContainerRunOptions]:
        """Admit a pod as the kubelet does, and judge the grant."""
        closed = self.account.closed()
        try:
            options: Mapping[str, ContainerRunOptions] = await really(pod)
        except AdmissionError as error:
            self.refused[pod.name] = str(error)
            self.note(f"  {pod.name} is refused: {error}")
            raise
        self.look()
        held = self.account.pods.get(pod.uid, set())
        self.note(
            f"  {pod.name} holds {sorted(f'{each.gpu}:{each.kind}:{each.part}' for each in held)}"
        )
        self.account.granted(pod.name, held, closed & self.account.closed())
        return options

    def look(self) -> None:
        """Add to the account what the kubelet's side shows now."""
        kubelet, running = self.cluster.kubelet, dict[str, tuple[str, set[Holding]]]()
        for pod in kubelet.pods:
            held = set[Holding]()
            with suppress(KubeletDownError):
                for devices in kubelet.devices(pod).values():
                    for resource, ids in devices.items():
                        held |= {self.account.of_device(resource, share_id) for share_id in ids}
            running[pod.uid] = (pod.name, held)
        objects = self.cluster.api.store.objects
        for claim in self.cluster.claims._manager._prepared.values():
            found = objects.get(("resourceclaims", claim.ref.namespace, claim.ref.name), {})
            for uid in claim.pods & running.keys():
                running[uid][1].update(self.account.of_claim(found))
        self.saw(running)

    async def watch(self) -> None:
        """Look at the kubelet's side all the time."""
        while True:
            self.look()
            for sentence in self.work.judge({pod.uid for pod in self.cluster.kubelet.pods}):
                self.account.add(sentence)
            await anyio.sleep(0.05)

    async def tend(self) -> None:
        """Keep the driver informed of the processes."""
        while True:
            await self._tell_driver()
            await anyio.sleep(0.5)

    # ---- daemons -----------------------------------------------------------------------------

    async def start(self, first: str = "") -> None:
        """Start a daemon that takes the node as soon as it is free."""
        places = {
            "--config": self.folder / "metagpu.yaml",
            "--simulate": self.folder / "node.yaml",
            "--run-dir": self.folder,
            "--kubelet-root": self.folder,
            "--kubelet-dir": paths.kubelet_dir(self.folder),
            "--pod-resources": paths.pod_resources(self.folder),
            "--kubeconfig": paths.kubeconfig(self.folder),
            "--dev-root": paths.host_root(self.folder),
            "--cdi-dir": paths.cdi_dir(self.folder),
            "--pod-dir": self.folder / "pods",
            "--node-name": paths.NODE_NAME,
        }
        options = [str(part) for option in places.items() for part in option]
        host = HOST.format(folder=str(self.work.machine.folder))
        node = NODE.format(clock=str(self.folder / "clock"))
        program = [
            sys.executable,
            "-c",
            f"{node}\n{QUICK}\n{host}\n{self.plant}\n{first}\n{_ARGUMENTS}",
            "run",
            "--take-over",
        ]
        daemon = Daemon(await anyio.open_process([*program, *options]))
        self.group.start_soon(daemon.read)
        self.daemons.append(daemon)
        self.by_hand.clear()  # a start takes over what nobody uses

    def _server(self) -> Daemon | None:
        """Return the oldest daemon that runs."""
        return next((daemon for daemon in self.daemons if daemon.process.returncode is None), None)

    def _has_standby(self) -> bool:
        standby = read_standby(self.folder)
        return standby is not None and standby.ready

    async def _stop(self, number: signal.Signals) -> None:
        await self.delete_forgotten()
        for daemon in list(self.daemons):
            await self._end_daemon(daemon, number)

    async def _end_daemon(self, daemon: Daemon, number: signal.Signals) -> None:
        daemon.signal(signal.SIGKILL if daemon.stopped else number)
        if not await self.until(lambda: not daemon.alive, PROBE_S):
            self.account.add(f"a daemon does not end within {PROBE_S:.0f} s of {number.name}")
        daemon.signal(signal.SIGKILL)  # one that was stopped on its way, as its kubelet does
        await daemon.process.wait()
        self.account.lost.clear()  # the simulated GPUs end with it

    async def _replace_halted(self) -> None:
        """Start a daemon for one that ended or hangs, as a DaemonSet does."""
        for daemon in self.daemons:
            if daemon.stopped:
                await self._end_daemon(daemon, signal.SIGKILL)
        if self._server() is None:
            await self.start()


def _at(step: str, by: str) -> str:
    return at(step, signal.Signals[f"SIG{by}"])


_list = PodResourcesV1.list


@asynccontextmanager
async def chaos(folder: Path, plant: str = "") -> AsyncIterator[SimulatedChaos]:
    """Run a node with its first daemon while the block lasts; no process of it is left."""
    driver = folder / "driver.json"
    (folder / "node.yaml").write_text(f"gpus: [{GPUS}]\nstateFile: {driver}\n")
    (folder / "metagpu.yaml").write_text(CONFIGURATIONS["all"])
    node = build_node(str(folder / "node.yaml"))
    driver.unlink(missing_ok=True)
    cluster = SingleNodeCluster(node, folder)
    account = Account(tuple(str(gpu.id) for gpu in node.gpus), driver)
    delay = list[Callable[[], float]]()
    answers = cluster.api._guarded

    @web.middleware
    async def slowly(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
        await anyio.sleep(delay[0]() if delay else 0.0)
        return await answers(request, handler)

    cluster.api._guarded = slowly  # type: ignore[method-assign]
    async with cluster.running(), anyio.create_task_group() as group:
        (folder / "host").mkdir()
        work = Work(SimHost(folder / "host"))
        found = SimulatedChaos(
            account=account,
            run_folder=folder,
            folder=folder,
            cluster=cluster,
            group=group,
            work=work,
            plant=plant,
        )
        delay.append(lambda: found.api_delay)
        found._set_clock(0)
        really = cluster.kubelet.admit
        cluster.kubelet.admit = lambda pod: found.admit(pod, really)  # type: ignore[method-assign]

        class Lister(PodResourcesV1):
            async def list(
                self, message: v1.ListPodResourcesRequest
            ) -> v1.ListPodResourcesResponse:
                return await found.list_pods(self, message)

        setattr(kubelet_process, "PodResourcesV1", Lister)  # noqa: B010 - for mypy
        replace_checkpoint = kubelet_process._replace
        kubelet_process._replace = found.write_checkpoint
        await cluster.restart_kubelet()
        group.start_soon(found.watch)
        group.start_soon(found.tend)
        try:
            await found.start()
            yield found
        finally:
            setattr(kubelet_process, "PodResourcesV1", PodResourcesV1)  # noqa: B010 - for mypy
            kubelet_process._replace = replace_checkpoint
            with anyio.CancelScope(shield=True):
                for daemon in found.daemons:
                    if daemon.process.returncode is None:
                        daemon.process.kill()
                        await daemon.process.wait()
                work.end()
                await to_thread.run_sync(_end_stand_ins, folder)
            group.cancel_scope.cancel()


def _limit_files(pid: int, spare: int | None) -> None:
    """Limit the files of a process to some more than now, or to as many as may be."""
    with suppress(OSError):
        number = None if spare is None else len(list(Path(f"/proc/{pid}/fd").iterdir())) + spare
        _limit(pid, RLIMIT_NOFILE, number)


def _limit(pid: int, of: int, number: int | None) -> None:
    """Limit a resource of a process, or give it as much as may be."""
    with suppress(OSError):
        _, most = prlimit(pid, of)
        prlimit(pid, of, (most if number is None else number, most))


def _end_stand_ins(folder: Path) -> None:
    """Kill the stand-ins of MPS that killed daemons left, by the folder in their environment."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and bytes(folder) in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)

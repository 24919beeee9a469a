"""A kubelet with pods that arrive, and daemons of the node as processes that end in many ways."""

import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import Process

from metagpu.agent.exchange import read_standby
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from tests.agent.test_daemon import command_line

FRACTION: Final = "cnvrg.io/metagpu"
SLICED: Final = "nvidia.com/gpu.shared"
WHOLE: Final = "nvidia.com/gpu"
PART: Final = "cnvrg.io/part"
CONFIG: Final = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - {name: parts, gpus: {index: 0}, backends: [{backend: fraction, sharesPerGpu: 100}]}
  - {name: slices, gpus: {index: 1}, backends: [{backend: timeslice, replicas: 4}]}
  - name: mixed
    gpus: {index: 2-3}
    offer: all
    backends: [{backend: whole}, {backend: fraction, resource: cnvrg.io/part, sharesPerGpu: 10}]
"""
RESOURCES: Final = (FRACTION, SLICED, WHOLE, PART)
"""The resources of four GPUs; those of the last two GPUs exclude each other."""
NODE: Final = ("--simulate", "a100-40gb:4")

AT = """
import importlib, inspect, os

module, name = importlib.import_module({module!r}), {name!r}
owner = getattr(module, {owner!r}) if {owner!r} else module
place = getattr(owner, name)

def stop(when):
    if {when!r} == when:
        os.kill(os.getpid(), {number})

async def here(self, *arguments, **options):
    stop("before")
    try:
        answer = place(self, *arguments, **options)
        return await answer if inspect.isawaitable(answer) else answer
    finally:
        stop("after")

def here_in_a_thread(*arguments, **options):
    stop("before")
    try:
        return place(*arguments, **options)
    finally:
        stop("after")

setattr(owner, name, here if {owner!r} else here_in_a_thread)
"""
"""Python that sends a signal to the daemon itself before or after one of its functions: a method
that is awaited, or a function of a module, which a thread calls."""

PLACES: Final = {
    "prepare": ("metagpu.agent.preparation", "Preparation", "look", "before"),
    "standby": ("metagpu.agent.exchange", "Exchange", "_hold", "before"),
    "take": ("metagpu.agent.layout_manager", "LayoutManager", "begin", "before"),
    "registered": ("metagpu.plugins.kubelet.endpoint", "Endpoint", "_register", "after"),
    "withdraw": ("metagpu.agent.exchange", "Exchange", "withdraw", "before"),
    "released": ("metagpu.agent.agent", "Agent", "run", "after"),
}
"""Where a daemon is at each step of an exchange."""
AT_WORK: Final = {
    "allocate": ("metagpu.plugins.kubelet.device_plugin", "DevicePluginService", "_grant"),
    "prepare": ("metagpu.plugins.dra.preparer", "ClaimPreparer", "_hold"),
    "unprepare": ("metagpu.plugins.dra.preparer", "ClaimPreparer", "unprepare"),
    "create": ("metagpu.nvml.mig", "", "create_instance"),
    "destroy": ("metagpu.nvml.mig", "", "destroy_instance"),
    "mps": ("metagpu.backends.common.mps_daemon.supervisor", "DaemonSupervisor", "_start"),
}
"""Where a daemon is while it serves pods."""


def at(step: str, number: signal.Signals) -> str:
    """Return Python that has a daemon get a signal at a step."""
    return _stop(*PLACES[step], number)


def at_work(step: str, when: str, number: signal.Signals) -> str:
    """Return Python that has a daemon get a signal before or after a step of its work."""
    return _stop(*AT_WORK[step], when, number)


def _stop(module: str, owner: str, name: str, when: str, number: signal.Signals) -> str:
    return AT.format(module=module, owner=owner, name=name, when=when, number=int(number))


@dataclass
class Daemon:
    """One daemon, as a process."""

    process: Process
    log: str = ""
    seen: anyio.Event = field(default_factory=anyio.Event)

    async def read(self) -> None:
        """Read its log until it ends."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log += line.decode(errors="replace")  # a part may end within a letter
            self.seen.set()
            self.seen = anyio.Event()

    async def logged(self, *texts: str) -> None:
        """Wait until its log has all these texts."""
        with anyio.fail_after(90):
            while not all(text in self.log for text in texts):
                await self.seen.wait()

    @property
    def alive(self) -> bool:
        """True if it has neither ended nor been stopped."""
        return self.process.returncode is None and not self.stopped

    @property
    def stopped(self) -> bool:
        """True while SIGSTOP holds it."""
        with suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "T"
        return False

    async def halted(self) -> None:
        """Wait until it has ended or been stopped."""
        with anyio.fail_after(60):
            while self.alive:  # noqa: ASYNC110 - a stop has no event
                await anyio.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self) -> int:
        """End it as its kubelet does: SIGTERM, and SIGKILL for one that does not answer."""
        hangs = self.stopped
        self.signal(signal.SIGKILL if hangs else signal.SIGTERM)
        with anyio.fail_after(60):
            return await self.process.wait()


@dataclass
class Exchanges:
    """A kubelet with pods that arrive all the time, and the daemons that serve it in turn.

    Attributes:
        resources: the resources that are served.
        more: further options of all daemons.
        failed: the reasons of the pods that the kubelet did not admit, although nothing was held
            that excludes them.
        admitted: the number of pods that it did.
        checks: the number of pods that a test admitted to check the service.
        twice: what two pods held that exclude each other.
        paused: whether no pod arrives, and those that did have ended.
    """

    folder: Path
    kubelet: SimKubelet
    resources: Collection[str] = RESOURCES
    more: tuple[str, ...] = NODE
    failed: list[str] = field(default_factory=list)
    admitted: int = 0
    checks: int = 0
    twice: list[str] = field(default_factory=list)
    paused: bool = False

    @asynccontextmanager
    async def daemon(
        self, first: str = "", *options: str, config: Path | None = None
    ) -> AsyncIterator[Daemon]:
        """Run a daemon that waits for the node while the block lasts; `first` is Python before."""
        program = ("-c", f"{first}\nfrom metagpu.cli.metagpu import main; exit(main())")
        command = [*command_line(self.folder, program), "--take-over", *self.more, *options]
        if config is not None:
            command[command.index("--config") + 1] = str(config)
        async with await anyio.open_process(command) as process:
            found = Daemon(process)
            async with anyio.create_task_group() as group:
                group.start_soon(found.read)
                try:
                    yield found
                finally:
                    if process.returncode is None:
                        process.kill()
                    with anyio.CancelScope(shield=True):
                        await process.wait()
                group.cancel_scope.cancel()

    async def until_ready(self) -> None:
        """Wait until a daemon waits for the node that could take it."""
        await until(lambda: (standby := read_standby(self.folder)) is not None and standby.ready)

    async def until_served(self) -> None:
        """Wait until the kubelet has a list of each resource, and any of its shares."""

        def served() -> bool:
            shown = self.kubelet.allocatable()
            return all(
                self.kubelet.open_streams.get(resource) == 1 and shown.get(resource, 0) > 0
                for resource in self.resources
            )

        # A new daemon that misses a pod of the checkpoint ends no lease until no pod has arrived
        # for a minute (`KubeletTiming.readiness`), and resources of a GPU exclude each other.
        self.paused = True
        await self.kubelet.wait_for(served, within=150)
        self.paused = False

    async def arrive(self, period: float) -> None:
        """Admit pods of each resource in turn, one each period, until cancelled; older ones end."""
        pods: list[SimPod] = []
        number = 0
        while True:
            while self.paused:
                while pods:
                    await self.kubelet.delete(pods.pop())
                await anyio.sleep(period)
            resource = RESOURCES[number % len(RESOURCES)]
            pod, number = SimPod.single(f"pod-{number}", {resource: 1}), number + 1
            try:
                await self.kubelet.admit(pod)
            except Exception as error:  # noqa: BLE001 - counted
                self.failed += [str(error)] if resource in {FRACTION, SLICED} else []
            else:
                self.admitted += 1
                pods.append(pod)
                self.check()
            if len(pods) > 2:
                await self.kubelet.delete(pods.pop(0))
            await anyio.sleep(period)

    def check(self) -> None:
        """Note GPUs that pods of two resources hold at once: no two of ours share a GPU."""
        holders = defaultdict[str, set[str]](set)
        for pod in self.kubelet.pods:
            for held in self.kubelet.devices(pod).values():
                for resource, ids in held.items():
                    for share in ids:
                        holders[share.partition("::")[0]].add(resource)
        self.twice += [f"{gpu}: {found}" for gpu, found in holders.items() if len(found) > 1]


@asynccontextmanager
async def exchanges(
    folder: Path,
    period: float | None = 0.2,
    first: str = "",
    *,
    config: str = CONFIG,
    resources: Collection[str] = RESOURCES,
    options: tuple[str, ...] = NODE,
) -> AsyncIterator[tuple[Exchanges, Daemon]]:
    """Run a kubelet with a daemon and, with a period, arriving pods while the block lasts."""
    await anyio.Path(folder / "metagpu.yaml").write_text(config)
    kubelet = SimKubelet(folder / "dp", pod_resources=folder / "pr.sock")
    found = Exchanges(folder, kubelet, resources, options)
    async with (
        kubelet.running(),
        found.daemon(first) as old,
        anyio.create_task_group() as group,
    ):
        await found.until_served()
        if period is not None:
            group.start_soon(found.arrive, period)
        yield found, old
        group.cancel_scope.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    with anyio.fail_after(60):
        while not is_so():  # noqa: ASYNC110 - of several causes
            await anyio.sleep(0.01)


def pid_of_lock(folder: Path) -> int | None:
    """Return the process that has the lock of a run folder, by the kernel's list."""
    inode = (folder / "metagpu.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        parts = line.split()
        if parts[1] == "FLOCK" and parts[3] == "WRITE" and parts[5].endswith(f":{inode}"):
            return int(parts[4])
    return None

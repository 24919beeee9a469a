"""MIG instances made when pods ask: how long an admission takes, and how long until a start."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import client, daemon
from bench.client import Client
from bench.daemon import Daemon
from bench.figures import Figure, Samples
from bench.plan import Plan
from bench.pod_resources import PodResources

_GPUS: Final = 8
_INSTANCES: Final = 15
"""Numbers that the driver has for GPU instances of a GPU."""
_PATIENCE: Final = 60.0
_RESOURCE: Final = "nvidia.com/mig-2g.10gb"
_WAYS: Final = {
    "envvar, create: allocate": ("envvar", "allocate"),
    "CDI, create: allocate": ("cdi-cri", "allocate"),
    "CDI, create: start": ("cdi-cri", "start"),
}
_CONFIG: Final = """\
version: metagpu/v1
deviceListStrategy: {}
pools:
  - name: mig
    backends:
      - {{backend: mig, profiles: [2g.10gb, 7g.40gb], keepWarm: 0s, create: {}}}
"""
_NODE: Final = "gpus: [{{board: a100-40gb, count: {}, mig: true, making: {{takes: {}s}}}}]\n"


@dataclass(frozen=True)
class _Way:
    """How containers are given instances, and how many seconds the driver takes for each."""

    name: str
    strategy: str
    create: str
    takes: int

    def __str__(self) -> str:
        return f"{self.takes} s, {self.name}"


@dataclass(frozen=True)
class _Node:
    """A daemon whose instances nobody holds at first; the first `shares` are one of each GPU."""

    way: _Way
    subject: Daemon
    told: PodResources
    client: Client
    shares: list[str]

    def admit(self, count: int) -> None:
        """Ask for the next share, as the kubelet does when it admits a pod; `count` are held."""
        self.told.hold({_RESOURCE: self.shares[: count + 1]})
        self.client.allocate(client.allocate_request([self.shares[count]]))

    def start(self, number: int) -> None:
        """Start a container, as far as it concerns a plugin."""
        if self.way.create == "start":
            self.client.pre_start(client.pre_start_request([self.shares[number]]))

    def empty(self) -> None:
        """Let all pods end, and wait until there is no instance any more."""
        self.told.await_question()  # a lease whose holder was never told lasts longer
        self.told.hold({})
        deadline = time.monotonic() + _PATIENCE
        while any(gpu["owner"] or gpu["made"] for gpu in self._gpus()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"instances stay:\n{self.subject.said}")
            time.sleep(0.05)

    def _gpus(self) -> list[dict[str, object]]:
        status = self.subject.ask("status")
        assert isinstance(status, dict)
        gpus: list[dict[str, object]] = status["gpus"]
        return gpus


def mig(plan: Plan) -> list[Figure]:
    """Measure each way with instances that NVML makes at once, and with such that take a second."""
    return [
        figure
        for takes, rounds in ((0, plan.count(6, 1)), (1, plan.count(2, 1)))
        for name, (strategy, create) in _WAYS.items()
        for figure in _measured(plan, _Way(name, strategy, create, takes), rounds)
    ]


def _measured(plan: Plan, way: _Way, rounds: int) -> list[Figure]:
    plan.say(f"mig: instances in {way}")
    admissions, starts, all_starts = Samples(), Samples(), Samples()

    with _serving(way) as node:
        for turn in range(-1, rounds):
            for number in range(len(node.shares)):
                began = time.perf_counter()
                node.admit(number)
                admitted = time.perf_counter()
                node.start(number)
                if turn >= 0:
                    admissions.seconds.append(admitted - began)
                    starts.seconds.append(time.perf_counter() - began)
            node.empty()

        for _ in range(max(1, rounds // 2)):
            began = time.perf_counter()
            for number in range(_GPUS):  # the kubelet admits one pod after the other
                node.admit(number)
            for number in range(_GPUS):
                node.start(number)
            all_starts.seconds.append(time.perf_counter() - began)
            node.empty()

    return [
        admissions.figure(f"Allocate, instance in {way}", target=None),
        starts.figure(f"container could start, instance in {way}", target=None),
        all_starts.figure(f"{_GPUS} containers could start, instances in {way}", target=None),
    ]


@contextmanager
def _serving(way: _Way) -> Iterator[_Node]:
    told = PodResources()
    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        _furnish(folder)
        socket = folder / "pods.sock"
        (folder / "node.yaml").write_text(_NODE.format(_GPUS, way.takes))
        stack.enter_context(told.served(socket))
        subject = daemon.start(
            folder,
            config=_CONFIG.format(way.strategy, way.create),
            simulate=str(folder / "node.yaml"),
            pod_resources=socket,
            further={"--dev-root": folder, "--cdi-dir": folder / "cdi"},
        )
        stack.enter_context(subject)
        to = stack.enter_context(client.connected(subject.socket_of(_RESOURCE)))
        to.options(b"")  # by its answer it is known whether starts are told
        lists = stack.enter_context(to.lists())
        while b"Unhealthy" in (message := lists.take().message):
            pass
        # First one of each GPU, then the others.
        shares = sorted(client.ids_in(message), key=lambda share: share.rpartition("@")[2])
        yield _Node(way, subject, told, to, shares[:_GPUS] if way.takes else shares)


def _furnish(root: Path) -> None:
    """Put device nodes below a root, as plain files: what is not there is not named by CDI."""
    instances = [f"gpu{gpu}/gi{number}" for gpu in range(_GPUS) for number in range(_INSTANCES)]
    opened = [f"{it}/{of}" for it in instances for of in ("access", "ci0/access")]
    caps = [f"nvidia-caps/nvidia-cap{number}" for number in range(1, len(opened) + 1)]
    (root / "dev/nvidia-caps").mkdir(parents=True)
    for name in (*(f"nvidia{number}" for number in range(_GPUS)), "nvidiactl", "nvidia-uvm", *caps):
        (root / "dev" / name).touch()

    listed = root / "proc/driver/nvidia-caps/mig-minors"
    listed.parent.mkdir(parents=True)
    listed.write_text("".join(f"{name} {number}\n" for number, name in enumerate(opened, 1)))

"""MIG instances on demand: the time of an admission, and until a start."""

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
_TIMEOUT: Final = 60.0
_RESOURCE: Final = "nvidia.com/mig-2g.10gb"
_VARIANTS: Final = {
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
_NODE: Final = (
    "gpus: [{{model: a100-40gb, count: {}, mig: true, provisioning: {{duration: {}s}}}}]\n"
)


@dataclass(frozen=True)
class _Variant:
    """The device list strategy, the time of creation, and seconds per instance."""

    name: str
    strategy: str
    create: str
    seconds: int

    def __str__(self) -> str:
        return f"{self.seconds} s, {self.name}"


@dataclass(frozen=True)
class _Node:
    """A daemon whose instances are free at first; the first `shares` are one per GPU."""

    variant: _Variant
    subject: Daemon
    pod_resources: PodResources
    client: Client
    shares: list[str]

    def admit(self, count: int) -> None:
        """Allocate the next share, as the kubelet admits a pod; `count` are held."""
        self.pod_resources.hold({_RESOURCE: self.shares[: count + 1]})
        self.client.allocate(client.allocate_request([self.shares[count]]))

    def start(self, number: int) -> None:
        """Start a container, as far as the plugin takes part."""
        if self.variant.create == "start":
            self.client.pre_start(client.pre_start_request([self.shares[number]]))

    def empty(self) -> None:
        """End all pods, and wait until no instance is left."""
        self.pod_resources.wait_for_list()  # a lease whose holder was never listed lasts longer
        self.pod_resources.hold({})
        deadline = time.monotonic() + _TIMEOUT
        while any(gpu["owner"] or gpu["devices"] for gpu in self._gpus()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"instances stay:\n{self.subject.log_tail}")
            time.sleep(0.05)

    def _gpus(self) -> list[dict[str, object]]:
        status = self.subject.ask("status")
        assert isinstance(status, dict)
        gpus: list[dict[str, object]] = status["gpus"]
        return gpus


def mig(plan: Plan) -> list[Figure]:
    """Measure each variant with instances that NVML creates at once, and in a second."""
    return [
        figure
        for takes, rounds in ((0, plan.count(6, 1)), (1, plan.count(2, 1)))
        for name, (strategy, create) in _VARIANTS.items()
        for figure in _measure(plan, _Variant(name, strategy, create, takes), rounds)
    ]


def _measure(plan: Plan, variant: _Variant, rounds: int) -> list[Figure]:
    plan.report(f"mig: instances in {variant}")
    admissions, starts, all_starts = Samples(), Samples(), Samples()

    with _serving(variant) as node:
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
        admissions.figure(f"Allocate, instance in {variant}", target=None),
        starts.figure(f"container could start, instance in {variant}", target=None),
        all_starts.figure(f"{_GPUS} containers could start, instances in {variant}", target=None),
    ]


@contextmanager
def _serving(variant: _Variant) -> Iterator[_Node]:
    pod_resources = PodResources()
    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        _create_device_nodes(folder)
        socket = folder / "pods.sock"
        (folder / "node.yaml").write_text(_NODE.format(_GPUS, variant.seconds))
        stack.enter_context(pod_resources.served(socket))
        subject = daemon.start(
            folder,
            config=_CONFIG.format(variant.strategy, variant.create),
            simulate=str(folder / "node.yaml"),
            pod_resources=socket,
            further={"--dev-root": folder, "--cdi-dir": folder / "cdi"},
        )
        stack.enter_context(subject)
        to = stack.enter_context(client.connected(subject.socket_of(_RESOURCE)))
        to.options(b"")  # the answer enables the calls of PreStartContainer
        lists = stack.enter_context(to.lists())
        while b"Unhealthy" in (message := lists.take().message):
            pass
        # First one of each GPU, then the others.
        shares = sorted(client.ids_in(message), key=lambda share: share.rpartition("@")[2])
        yield _Node(
            variant, subject, pod_resources, to, shares[:_GPUS] if variant.seconds else shares
        )


def _create_device_nodes(root: Path) -> None:
    """Create device nodes as plain files: CDI names only what exists."""
    instances = [f"gpu{gpu}/gi{number}" for gpu in range(_GPUS) for number in range(_INSTANCES)]
    opened = [f"{instance}/{of}" for instance in instances for of in ("access", "ci0/access")]
    caps = [f"nvidia-caps/nvidia-cap{number}" for number in range(1, len(opened) + 1)]
    (root / "dev/nvidia-caps").mkdir(parents=True)
    for name in (*(f"nvidia{number}" for number in range(_GPUS)), "nvidiactl", "nvidia-uvm", *caps):
        (root / "dev" / name).touch()

    listed = root / "proc/driver/nvidia-caps/mig-minors"
    listed.parent.mkdir(parents=True)
    listed.write_text("".join(f"{name} {number}\n" for number, name in enumerate(opened, 1)))

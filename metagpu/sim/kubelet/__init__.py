"""A small kubelet: device plugins, admission, PodResources, restarts, and nothing else.

It behaves as the device manager of Kubernetes v1.36.2 does, as far as a device plugin can tell,
hazards included; "§" here and in the modules beside is a section of the written contract,
docs/kubelet.md, and "case" a number in docs/acceptance.md. No cgroups, no runtime, no API server:
pods come by `admit` and go by `delete`, their containers start by `start_container`.
"""

import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio

from metagpu.sim.kubelet.life import SOCKET, Life, Settings, begin
from metagpu.sim.kubelet.pods import (
    AdmissionError,
    Container,
    ContainerStartError,
    Pod,
    RunOptions,
)
from metagpu.sim.kubelet.registration import Tally
from metagpu.sim.kubelet.topology import TopologyPolicy

__all__ = [
    "AdmissionError",
    "Container",
    "ContainerStartError",
    "KubeletDownError",
    "Pod",
    "RunOptions",
    "SimKubelet",
]


class KubeletDownError(Exception):
    """The kubelet is not running, or stopped while it was asked."""


class SimKubelet:
    """A node's kubelet, over any number of lifetimes.

    `directory` stands for /var/lib/kubelet/device-plugins, `pod_resources` is the path of the
    PodResources socket. `clock` counts the grace period of stopped endpoints and the rate limit,
    so tests may turn it by hand; the node-status loop is `tick`. Pods, the numbers that the node
    last reported and the counters outlive a lifetime; devices and endpoints do not.
    """

    def __init__(
        self,
        directory: Path,
        *,
        pod_resources: Path | None = None,
        numa_nodes: Collection[int] = (0,),
        topology_policy: TopologyPolicy = "none",
        stop_grace: float = 300.0,
        dial_timeout: float = 10.0,
        pre_start_timeout: float = 30.0,
        fixed_clashes: bool = False,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.directory = directory
        self.socket = directory / SOCKET
        self.failed: dict[str, AdmissionError] = {}
        self._settings = Settings(
            directory=directory,
            pod_resources=pod_resources,
            numa_nodes=numa_nodes,
            topology_policy=topology_policy,
            stop_grace=stop_grace,
            dial_timeout=dial_timeout,
            pre_start_timeout=pre_start_timeout,
            fixed_clashes=fixed_clashes,
            clock=clock,
            rng=rng or random.Random(),  # noqa: S311  it stands for Go's map order
        )
        self._tally = Tally()
        self._pods: dict[str, Pod] = {}
        self._started: set[tuple[str, str]] = set()
        self._capacity: dict[str, int] = {}
        self._allocatable: dict[str, int] = {}
        self._admitting = anyio.Lock()
        self._life: Life | None = None

    # ---- lifetimes -------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run for the length of the block; its end is a crash, since a kubelet knows no other.

        Raises:
            OSError: a socket cannot be bound.
        """
        await self._start()
        try:
            yield self
        finally:
            await self.crash()

    async def crash(self) -> None:
        """Die as by SIGKILL: connections drop, socket files stay and refuse. May be repeated."""
        life, self._life = self._life, None
        if life is None:
            return
        self._report(life)
        with anyio.CancelScope(shield=True):
            await life.end()
        self._tally.changed()

    async def restart(self, *, reboot: bool = False) -> None:
        """Die, if alive, and start again (§2). After a reboot no container runs.

        What was admitted is admitted again by `readmit`, at the latest before the next `admit`.
        """
        await self.crash()
        if reboot:
            self._started.clear()
        await self._start()

    async def _start(self) -> None:
        life, is_new = await begin(
            self._settings, self._tally, pods=self._pods, started=frozenset(self._started)
        )
        if is_new:  # the kubelet takes the node for a new one (case 59)
            self._capacity = dict.fromkeys(self._capacity, 0)
            self._allocatable = dict.fromkeys(self._allocatable, 0)
        self._life = life
        self._tally.changed()

    # ---- the node's numbers ----------------------------------------------------------------

    def capacity(self) -> Mapping[str, int]:
        """Count devices per resource; a resource that is gone stays, with 0 (§1.4)."""
        live = self._life.ledger.capacity() if self._life else {}
        return {**self._capacity, **live}

    def allocatable(self) -> Mapping[str, int]:
        """Count healthy devices per resource, held ones included."""
        live = self._life.ledger.allocatable() if self._life else {}
        return {**self._allocatable, **live}

    async def tick(self) -> None:
        """Do what the node-status loop does every 10 s: drop what is over its grace period.

        Raises:
            KubeletDownError: there is no kubelet to do it.
        """
        life = self._up()
        gone = life.ledger.expire()
        self._report(life)
        for resource in gone:
            self._capacity[resource] = 0
            self._allocatable[resource] = 0
        if gone:
            await life.save()
        self._tally.changed()

    def _report(self, life: Life) -> None:
        self._capacity.update(life.ledger.capacity())
        self._allocatable.update(life.ledger.allocatable())

    # ---- what was seen ---------------------------------------------------------------------

    @property
    def registrations(self) -> Mapping[str, int]:
        """Successful registrations per resource, 0 for a name never seen."""
        return self._tally.registrations

    @property
    def refusals(self) -> list[str]:
        """The texts of refused registrations."""
        return self._tally.refusals

    @property
    def lists(self) -> Mapping[str, int]:
        """ListAndWatch messages per resource, 0 for a name never seen."""
        return self._tally.lists

    @property
    def open_streams(self) -> Mapping[str, int]:
        """ListAndWatch streams open now per resource, 0 for a name never seen."""
        return self._tally.open_streams

    async def wait_for(self, predicate: Callable[[], bool], *, within: float = 30.0) -> None:
        """Wait until the predicate holds; it is asked after each change of anything here.

        Raises:
            TimeoutError: it did not hold in time.
        """
        await self._tally.wait_for(predicate, within=within)

    # ---- pods ------------------------------------------------------------------------------

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The active pods, in the order of their admission."""
        return tuple(self._pods.values())

    def devices(self, pod: Pod) -> dict[str, dict[str, frozenset[str]]]:
        """Tell what is held, by container and resource; containers without devices are left out.

        Raises:
            KubeletDownError: there is no kubelet to tell.
        """
        found: dict[str, dict[str, frozenset[str]]] = {}
        for (uid, container, resource), entry in self._up().ledger.entries.items():
            if uid == pod.uid:
                found.setdefault(container, {})[resource] = entry.ids
        return found

    async def admit(self, pod: Pod) -> Mapping[str, RunOptions]:
        """Admit a pod; tell what each container will be created with. One pod at a time.

        Raises:
            AdmissionError: the pod is Failed; so it stays.
            KubeletDownError: the kubelet is not running, or died meanwhile.
        """
        async with self._admitting:
            life = self._up()
            await self._readmit(life)
            await self._admit(life, pod)
            self._pods[pod.uid] = pod
            self._tally.changed()
            return {c.name: life.admission.options(pod, c) for c in pod.in_order()}

    async def readmit(self) -> Mapping[str, AdmissionError]:
        """Admit again, once per lifetime, what was admitted before; tell the lost pods by UID.

        A container that the runtime has running keeps its devices unchecked; every other one
        needs a registered resource with healthy devices now (§2).

        Raises:
            KubeletDownError: the kubelet is not running, or died meanwhile.
        """
        async with self._admitting:
            return await self._readmit(self._up())

    async def delete(self, pod: Pod) -> None:
        """End a pod. Its devices are freed at the next admission or List; no plugin is told."""
        self._pods.pop(pod.uid, None)
        self._started = {key for key in self._started if key[0] != pod.uid}
        self._tally.changed()

    async def start_container(self, pod: Pod, name: str) -> RunOptions:
        """Create a container, for the first time or again: PreStartContainer, stored answers.

        Raises:
            ContainerStartError: the container waits; starting it again may succeed.
            KubeletDownError: the kubelet is not running, or died meanwhile.
            KeyError: the pod has no such container.
        """
        life = self._up()
        options = await life.admission.start(pod, pod.container(name))
        if not life.alive:
            raise KubeletDownError
        self._started.add((pod.uid, name))
        return options

    def stop_container(self, pod: Pod, name: str) -> None:
        """Let a container end, as an init container does when it is done."""
        self._started.discard((pod.uid, name))

    def _up(self) -> Life:
        if self._life is None:
            raise KubeletDownError
        return self._life

    async def _readmit(self, life: Life) -> dict[str, AdmissionError]:
        lost: dict[str, AdmissionError] = {}
        if life.ledger.ready:
            return lost
        for pod in self.pods:
            try:
                await self._admit(life, pod)
            except AdmissionError as error:
                lost[pod.uid] = error
                await self.delete(pod)
        life.ledger.ready = True
        return lost

    async def _admit(self, life: Life, pod: Pod) -> None:
        try:
            await life.admission.admit(pod, lambda: dict(self.allocatable()))
        except AdmissionError as error:
            if not life.alive:
                raise KubeletDownError from error
            self.failed[pod.uid] = error
            raise
        if not life.alive:
            raise KubeletDownError

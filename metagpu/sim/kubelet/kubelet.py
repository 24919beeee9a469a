"""The simulated kubelet: device plugins, admission, PodResources, and restarts.

The simulated kubelet behaves as the device manager of Kubernetes v1.36.2 does, hazards included, as
far as a device plugin can see. "§" in this package is a section of docs/development/kubelet.md, and
"case" is a number in docs/development/acceptance.md. The simulated kubelet has no cgroups, no
container runtime and no API server: pods come by `admit`, go by `delete`, and their containers
start by `start_container`. `metagpu.sim.cluster` calls these for the pods of an API server.
"""

import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio

from metagpu.sim.kubelet.pod_resources import Claimed
from metagpu.sim.kubelet.pods import (
    AdmissionError,
    ContainerRunOptions,
    ContainerStartError,
    SimContainer,
    SimPod,
)
from metagpu.sim.kubelet.process import (
    CHECKPOINT,
    SOCKET,
    KubeletProcess,
    KubeletSettings,
    start_kubelet,
)
from metagpu.sim.kubelet.registration import KubeletStats
from metagpu.sim.kubelet.topology import TopologyPolicy

__all__ = [
    "AdmissionError",
    "ContainerRunOptions",
    "ContainerStartError",
    "KubeletDownError",
    "SimContainer",
    "SimKubelet",
    "SimPod",
]


class KubeletDownError(Exception):
    """Raised when the kubelet does not run, or stopped during the call."""


class SimKubelet:
    """A node's kubelet, over any number of process lifetimes.

    `directory` stands for /var/lib/kubelet/device-plugins, `pod_resources` is the path of the
    PodResources socket. `clock` measures the grace period of stopped endpoints and the rate limit,
    so that tests may set it; `sync_node_status` is one round of the node-status loop; `claimed`
    returns what a container has by claims. Pods, the last reported resources and the statistics
    outlive a process; devices and endpoints do not.
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
        claimed: Claimed = lambda _uid, _container: (),
    ) -> None:
        self.directory = directory
        self.socket = directory / SOCKET
        self.failed: dict[str, AdmissionError] = {}
        self._settings = KubeletSettings(
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
            claimed=claimed,
        )
        self._stats = KubeletStats()
        self._pods: dict[str, SimPod] = {}
        self._started: set[tuple[str, str]] = set()
        self._capacity: dict[str, int] = {}
        self._allocatable: dict[str, int] = {}
        self._admitting = anyio.Lock()
        self._process: KubeletProcess | None = None

    def resume(self, pod: SimPod) -> None:
        """Count a pod as admitted and its containers as running, before the first start."""
        self._pods[pod.uid] = pod
        self._started |= {(pod.uid, container.name) for container in pod.listed()}

    # ---- lifetimes -------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run the kubelet until the block ends; its end is a crash, as for any kubelet.

        Raises:
            OSError: a socket cannot be bound.
        """
        await self._start()
        try:
            yield self
        finally:
            await self.crash()

    async def crash(self) -> None:
        """Kill the kubelet: connections drop, socket files stay. May be repeated."""
        process, self._process = self._process, None
        if process is None:
            return
        self._report(process)
        with anyio.CancelScope(shield=True):
            await process.end()
        self._stats.changed()

    async def restart(self, *, reboot: bool = False, forget: bool = False) -> None:
        """Kill the kubelet if it runs, and start it (§2); a reboot ends containers.

        Pods are admitted again by `readmit`, at the latest before the next `admit`. With `forget`
        the checkpoint is lost meanwhile: the kubelet takes all devices for free, and those of
        running containers may be allocated again.
        """
        await self.crash()
        if reboot:
            self._started.clear()
        if forget:
            await anyio.Path(self.directory / CHECKPOINT).unlink(missing_ok=True)
        await self._start()

    async def _start(self) -> None:
        process, is_new = await start_kubelet(
            self._settings, self._stats, pods=self._pods, started=frozenset(self._started)
        )
        if is_new:  # the kubelet takes the node for a new one (case 59)
            self._capacity = dict.fromkeys(self._capacity, 0)
            self._allocatable = dict.fromkeys(self._allocatable, 0)
        self._process = process
        self._stats.changed()

    @property
    def is_up(self) -> bool:
        """Return whether the kubelet runs."""
        return self._process is not None

    # ---- the node's numbers ----------------------------------------------------------------

    def capacity(self) -> Mapping[str, int]:
        """Return the devices per resource; a resource that is gone stays, with 0 (§1.4)."""
        live = self._process.state.capacity() if self._process else {}
        return {**self._capacity, **live}

    def allocatable(self) -> Mapping[str, int]:
        """Return the healthy devices per resource, held ones included."""
        live = self._process.state.allocatable() if self._process else {}
        return {**self._allocatable, **live}

    async def tick(self) -> None:
        """Run one round of the node-status loop (every 10 s): remove expired resources.

        Raises:
            KubeletDownError: the kubelet does not run.
        """
        process = self._up()
        gone = process.state.remove_expired()
        self._report(process)
        for resource in gone:
            self._capacity[resource] = 0
            self._allocatable[resource] = 0
        if gone:
            await process.save()
        self._stats.changed()

    def _report(self, process: KubeletProcess) -> None:
        self._capacity.update(process.state.capacity())
        self._allocatable.update(process.state.allocatable())

    # ---- what was seen ---------------------------------------------------------------------

    @property
    def registrations(self) -> Mapping[str, int]:
        """Return the successful registrations per resource, 0 for an unknown name."""
        return self._stats.registrations

    @property
    def refusals(self) -> list[str]:
        """Return the texts of refused registrations."""
        return self._stats.refusals

    @property
    def lists(self) -> Mapping[str, int]:
        """Return the ListAndWatch messages per resource, 0 for an unknown name."""
        return self._stats.lists

    @property
    def open_streams(self) -> Mapping[str, int]:
        """Return the open ListAndWatch streams per resource, 0 for an unknown name."""
        return self._stats.open_streams

    async def wait_for(self, predicate: Callable[[], bool], *, within: float = 30.0) -> None:
        """Wait until the predicate holds; each change here evaluates it again.

        Raises:
            TimeoutError: the predicate did not hold in time.
        """
        await self._stats.wait_for(predicate, within=within)

    # ---- pods ------------------------------------------------------------------------------

    @property
    def pods(self) -> tuple[SimPod, ...]:
        """Return the active pods, in the order of their admission."""
        return tuple(self._pods.values())

    def devices(self, pod: SimPod) -> dict[str, dict[str, frozenset[str]]]:
        """Return the held devices by container and resource, without empty containers.

        Raises:
            KubeletDownError: the kubelet does not run.
        """
        found: dict[str, dict[str, frozenset[str]]] = {}
        for (uid, container, resource), entry in self._up().state.allocations.items():
            if uid == pod.uid:
                found.setdefault(container, {})[resource] = entry.ids
        return found

    async def admit(self, pod: SimPod) -> Mapping[str, ContainerRunOptions]:
        """Admit a pod; return each container's options. One pod at a time.

        Raises:
            AdmissionError: the pod is Failed, and stays so.
            KubeletDownError: the kubelet does not run, or died during the call.
        """
        async with self._admitting:
            process = self._up()
            await self._readmit(process)
            await self._admit(process, pod)
            self._pods[pod.uid] = pod
            self._stats.changed()
            return {c.name: process.admission.options(pod, c) for c in pod.in_order()}

    async def readmit(self) -> Mapping[str, AdmissionError]:
        """Admit the earlier pods again, once per process; return the lost pods by UID.

        A container that runs keeps its devices unchecked; every other container needs a registered
        resource with healthy devices now (§2).

        Raises:
            KubeletDownError: the kubelet does not run, or died during the call.
        """
        async with self._admitting:
            return await self._readmit(self._up())

    async def delete(self, pod: SimPod) -> None:
        """End a pod; the next admission or List releases its devices, without a call."""
        self._pods.pop(pod.uid, None)
        self._started = {key for key in self._started if key[0] != pod.uid}
        self._stats.changed()

    async def start_container(self, pod: SimPod, name: str) -> ContainerRunOptions:
        """Start a container, first or again: PreStartContainer, then the stored answers.

        Raises:
            ContainerStartError: the container waits; starting it again may succeed.
            KubeletDownError: the kubelet does not run, or died during the call.
            KeyError: the pod has no such container.
        """
        process = self._up()
        options = await process.admission.start(pod, pod.container(name))
        if not process.alive:
            raise KubeletDownError
        self._started.add((pod.uid, name))
        return options

    def options(self, pod: SimPod, name: str) -> ContainerRunOptions:
        """Return the options that a container has of the device plugins.

        Raises:
            KubeletDownError: the kubelet does not run.
        """
        return self._up().admission.options(pod, pod.container(name))

    def stop_container(self, pod: SimPod, name: str) -> None:
        """Stop a container, as an init container stops when it is done."""
        self._started.discard((pod.uid, name))

    def _up(self) -> KubeletProcess:
        if self._process is None:
            raise KubeletDownError
        return self._process

    async def _readmit(self, process: KubeletProcess) -> dict[str, AdmissionError]:
        lost: dict[str, AdmissionError] = {}
        if process.state.ready:
            return lost
        for pod in self.pods:
            try:
                await self._admit(process, pod)
            except AdmissionError as error:
                error.has_run = any(uid == pod.uid for uid, _ in self._started)
                lost[pod.uid] = error
                await self.delete(pod)
        process.state.ready = True
        return lost

    async def _admit(self, process: KubeletProcess, pod: SimPod) -> None:
        try:
            await process.admission.admit(pod, lambda: dict(self.allocatable()))
        except AdmissionError as error:
            if not process.alive:
                raise KubeletDownError from error
            self.failed[pod.uid] = error
            raise
        if not process.alive:
            raise KubeletDownError

"""The kubelet of a simulated cluster: it follows Pods and writes their status.

It also writes the Node's numbers.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from metagpu.sim.apiserver.objects import Object
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.cluster.containers import PodContainers, VisibleDevice, visible_devices
from metagpu.sim.cluster.pod_objects import (
    Patch,
    key_of,
    kubelet_pod,
    node_of,
    phase,
    phase_of,
    pod_claims,
    rejected,
    remaining_time,
    running,
    seconds_of_grace,
    waiting,
)
from metagpu.sim.kubelet.claims import ClaimManager, ClaimPrepareError
from metagpu.sim.kubelet.kubelet import (
    AdmissionError,
    ContainerStartError,
    KubeletDownError,
    SimKubelet,
)
from metagpu.sim.kubelet.pods import SimPod
from metagpu.sim.machine.gpu import SimError
from metagpu.sim.machine.node import SimNode

STATUS_PERIOD: Final = 10.0
"""Seconds between two reports of the Node's numbers (nodeStatusUpdateFrequency)."""
READMIT_AFTER: Final = 0.1
"""Seconds from a kubelet's start to the admission of its earlier pods."""
PLUGINS_WITHIN: Final = 10.0
"""Seconds that this admission waits for plugins whose devices the pods need again. A plugin that
inotify wakes up is in time (§2), but on a busy machine it needs more than `READMIT_AFTER`."""
RETRY_START: Final = 1.0
"""Seconds between two tries to start a container, or to end a pod with claims."""
RETRY_PREPARE: Final = 60.0
"""Seconds to the next try to prepare refused claims, unless the pod is annotated before."""


@dataclass(eq=False)
class KubeletSync:
    """Keeps a kubelet's pods as the API server has them, and the Node up to date.

    Attributes:
        claims: prepares the claims of pods.
        containers: runs the containers of pods.
        record: writes a warning about a Pod: its reason and note.
    """

    api: SimApiServer
    kubelet: SimKubelet
    claims: ClaimManager
    containers: PodContainers
    node: str
    record: Callable[[Object, str, str], None]
    _pods: dict[str, SimPod] = field(default_factory=dict)
    _ends: dict[str, float] = field(default_factory=dict)
    _syncing: anyio.Lock = field(default_factory=anyio.Lock)

    def resume(self) -> None:
        """Resume the pods that ran when the last daemon ended."""
        for document in self.api.pods():
            if node_of(document) == self.node and phase_of(document) == "Running":
                pod = self._pods[document["metadata"]["uid"]] = kubelet_pod(document)
                self.kubelet.resume(pod)
                self.containers.start(pod)
                with suppress(ClaimPrepareError):
                    self.claims.track(pod_claims(document, self.api.store.objects))
                self._set_end(document)

    async def run(self) -> None:
        """Follow the API server until cancelled; without a kubelet nothing happens."""
        self._delete_slices()
        async with anyio.create_task_group() as group:
            group.start_soon(self._report)
            group.start_soon(self.claims.run)
            await self._readmit()
            while True:
                changed = self.api.next_change()
                async with self._syncing:
                    with suppress(KubeletDownError):
                        await self._sync(group)
                with anyio.move_on_after(self._seconds_to_end()):
                    await changed.wait()

    def _seconds_to_end(self) -> float:
        """Return the seconds until a pod ends by itself; without a kubelet none does."""
        if not self.kubelet.is_up:
            return float("inf")
        return max(0.0, min(self._ends.values(), default=float("inf")) - anyio.current_time())

    async def stop(self) -> None:
        """Kill the kubelet, also while it waits for a plugin; containers go on."""
        await self.kubelet.crash()
        self.api.wake()

    async def restart(self, *, forget: bool = False, reboot: bool = False) -> None:
        """Start the kubelet again; it admits its pods as at any start."""
        await self.kubelet.crash()  # before the lock: an admission may wait for a plugin
        served = {name for name, count in self.kubelet.allocatable().items() if count}
        if reboot:
            await self.containers.end_processes(lambda _: True)
        async with self._syncing:
            await self.kubelet.restart(forget=forget, reboot=reboot)
            self.claims.forget_drivers()
            self._delete_slices()
            if forget or reboot:
                await self._wait_for_plugins(served)
            await self._readmit()
            for pod in self.kubelet.pods if reboot else ():
                with suppress(ContainerStartError, KubeletDownError):
                    await self._start_containers(pod)
        self.api.wake()

    def devices_of(
        self, document: Object, container: str, node: SimNode
    ) -> Sequence[VisibleDevice]:
        """Return the devices that a container of a running pod sees.

        Raises:
            SimError: the kubelet does not run.
        """
        pod = kubelet_pod(document)
        claimed = [
            part.device_name
            for resource in self.claims.dynamic_resources(pod.uid, container)
            for part in resource.claim_resources
        ]
        try:
            return visible_devices(node, self.kubelet.options(pod, container), claimed)
        except KubeletDownError:
            raise SimError("no process can start: the kubelet does not run") from None

    def held_devices(self, uid: str) -> Mapping[str, frozenset[str]]:
        """Return the ids that a pod holds, by resource; none without a kubelet."""
        pod = self._pods.get(uid)
        if pod is None or not self.kubelet.is_up:
            return {}
        held: dict[str, frozenset[str]] = {}
        for devices in self.kubelet.devices(pod).values():
            for resource, ids in devices.items():
                held[resource] = held.get(resource, frozenset()) | ids
        return held

    def _delete_slices(self) -> None:
        """Delete the node's ResourceSlices: a kubelet that starts has no driver yet."""
        objects = self.api.store.objects
        for key in [key for key in objects if key[0] == "resourceslices"]:
            if objects[key]["spec"].get("nodeName") == self.node:
                self.api.store.delete(key)

    async def _wait_for_plugins(self, served: Collection[str]) -> None:
        """Wait until the resources of pods that had devices before have some again."""
        names = {name for pod in self.kubelet.pods for name in pod.resources()}.intersection(served)
        with suppress(TimeoutError):
            await self.kubelet.wait_for(
                lambda: not self.kubelet.is_up or all(map(self.kubelet.allocatable().get, names)),
                within=PLUGINS_WITHIN,
            )

    async def _readmit(self) -> None:
        """Admit the earlier pods at a kubelet that has just started and lives on."""
        await anyio.sleep(READMIT_AFTER)
        with suppress(KubeletDownError):
            for uid, error in (await self.kubelet.readmit()).items():
                if pod := self._pods.get(uid):
                    await self._reject(pod, error)

    # ---- pods ------------------------------------------------------------------------------

    async def _sync(self, group: TaskGroup) -> None:
        """End, finish and admit pods, in the order of their creation."""
        if not self.kubelet.is_up:
            return
        now = anyio.current_time()
        bound = [pod for pod in self.api.pods() if node_of(pod) == self.node]
        for document in bound:
            uid = document["metadata"]["uid"]
            if "deletionTimestamp" in document["metadata"]:
                if (left := seconds_of_grace(document, time.time())) > 0:
                    self._ends[uid] = now + left
                elif await self._end(document):
                    self.api.store.delete(key_of(document))
            elif self._ends.get(uid, now + 1) <= now:
                if await self._end(document):
                    self._set(document, phase("Succeeded"))
            elif uid not in self._pods and phase_of(document) == "Pending":
                await self._admit(document, group)

    async def _admit(self, document: Object, group: TaskGroup) -> None:
        pod = kubelet_pod(document)
        try:
            await self.kubelet.admit(pod)
        except AdmissionError as error:
            await self._reject(pod, error)
            return
        self._pods[pod.uid] = pod
        self._set(document, waiting("ContainerCreating"))
        group.start_soon(self._start, document, pod)

    async def _start(self, document: Object, pod: SimPod) -> None:
        """Start a pod's container, again and again: PreStartContainer may take its time."""
        while pod.uid in self._pods:
            try:
                await self.claims.prepare(pod_claims(document, self.api.store.objects))
                await self._start_containers(pod)
            except ClaimPrepareError as error:
                self._set(document, waiting("ContainerCreating", str(error)))
                self.record(document, "FailedPrepareDynamicResources", str(error))
                await self._wait_annotation(document)
                continue
            except ContainerStartError as error:
                self._set(document, waiting(error.reason, error.message))
            except KubeletDownError:
                pass
            else:
                if pod.uid in self._pods:
                    self.containers.start(pod)
                    self._set(document, running(document, time.time()))
                    self._set_end(self.api.store.objects[key_of(document)])
                return
            await anyio.sleep(RETRY_START)

    async def _start_containers(self, pod: SimPod) -> None:
        for container in pod.in_order():
            await self.kubelet.start_container(pod, container.name)
            if container in pod.init_containers and not container.restartable:
                self.kubelet.stop_container(pod, container.name)

    async def _wait_annotation(self, document: Object) -> None:
        """Wait until somebody annotates a pod, as a real kubelet waits for its next sync."""
        key, before = key_of(document), document["metadata"].get("annotations")
        objects = self.api.store.objects

        def has_changed() -> bool:
            now = objects.get(key)
            return now is None or now["metadata"].get("annotations") != before

        with suppress(TimeoutError):
            await self.api.until(has_changed, within=RETRY_PREPARE)

    def _set_end(self, document: Object) -> None:
        """Note when a running pod's container ends by itself, if it does."""
        left = remaining_time(document, time.time())
        if left is not None:
            self._ends[document["metadata"]["uid"]] = anyio.current_time() + left

    async def _end(self, document: Object) -> bool:
        """End a pod; return whether it could: its claims are released before."""
        uid = document["metadata"]["uid"]
        self._ends.pop(uid, None)
        try:
            await self.claims.release(uid)
        except ClaimPrepareError as error:
            self.record(document, "FailedUnprepareDynamicResources", str(error))
            self._ends[uid] = anyio.current_time() + RETRY_START
            return False
        await self.containers.end(uid)
        if pod := self._pods.pop(uid, None):
            await self.kubelet.delete(pod)
        return True

    async def _reject(self, pod: SimPod, error: AdmissionError) -> None:
        await self.containers.end(pod.uid)
        self._pods.pop(pod.uid, None)
        self._ends.pop(pod.uid, None)
        document = self.api.store.objects.get(("pods", pod.namespace, pod.name))
        if document is None or document["metadata"]["uid"] != pod.uid:
            return  # it was deleted while the plugin answered
        ended = phase("Succeeded")  # simulated containers end without an error at SIGTERM
        self._set(document, ended if error.has_run else rejected(error.reason, error.message))
        self.record(document, error.reason, error.message)

    def _set(self, document: Object, status: Patch) -> None:
        """Write a Pod's status, unless it was deleted meanwhile."""
        if key_of(document) in self.api.store.objects:
            self.api.store.merge(key_of(document), status, status=True, manager="kubelet")

    # ---- the Node --------------------------------------------------------------------------

    async def _report(self) -> None:
        """Report the Node's numbers every 10 s, and a new resource at once.

        After the start the first list comes first: until then the kubelet has no device.
        """
        with suppress(TimeoutError):
            await self.kubelet.wait_for(
                lambda: any(self.kubelet.capacity().values()), within=STATUS_PERIOD
            )
        while True:
            with suppress(KubeletDownError):
                await self.kubelet.tick()
                self.api.report(self.node, self.kubelet.capacity(), self.kubelet.allocatable())
            reported = self.kubelet.capacity().keys()
            with suppress(TimeoutError):
                has_more = partial(self._has_more_than, reported)
                await self.kubelet.wait_for(has_more, within=STATUS_PERIOD)

    def _has_more_than(self, reported: Collection[str]) -> bool:
        return not self.kubelet.capacity().keys() <= set(reported)

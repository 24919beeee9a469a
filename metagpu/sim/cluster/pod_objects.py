"""Pods of a simulated cluster as objects; the kubelet that writes their status.

The simulated kubelet follows Pods at the API server, and writes the Node's numbers.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.cluster.pod_manifest import SLEEP
from metagpu.sim.kubelet.claims import ClaimManager, ClaimPrepareError, ClaimUse, PodClaims
from metagpu.sim.kubelet.kubelet import (
    AdmissionError,
    ContainerStartError,
    KubeletDownError,
    SimKubelet,
)
from metagpu.sim.kubelet.pods import SimContainer, SimPod

Patch = Mapping[str, Any]
"""A merge patch of an object, or of its status."""
ENDED: Final = frozenset({"Succeeded", "Failed"})


def key_of(pod: Object) -> Key:
    """Return the key of a Pod."""
    return "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]


def title(pod: Object) -> str:
    """Return a Pod's name, with its namespace if that is not `default`."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    return str(name) if namespace == "default" else f"{namespace}/{name}"


def requests_of(pod: Object) -> Mapping[str, int]:
    """Return the number of devices that a Pod requests, by resource name."""
    containers, first = _containers(pod)
    asking = SimPod("", containers=containers, init_containers=first)
    return {resource: asking.request(resource) for resource in sorted(asking.resources())}


def _devices_of(container: Object) -> Mapping[str, int]:
    """Return the devices that a container requests, without processors and memory."""
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: int(count) for name, count in amounts.items() if "/" in name}


def remaining_time(pod: Object, now: float) -> float | None:
    """Return the seconds until a running Pod ends by itself; `None` for never."""
    command: list[str] = pod["spec"]["containers"][0].get("command") or []
    try:
        program, seconds = command[0], float(command[1])
    except (IndexError, ValueError):
        return None  # a pod of a file: nothing of it runs
    if len(command) > len((program, seconds)) or program != SLEEP:
        return None
    started = datetime.fromisoformat(pod["status"]["startTime"]).timestamp()
    return None if math.isinf(seconds) else max(0.0, started + seconds - now)


def seconds_of_grace(pod: Object, now: float) -> float:
    """Return the seconds until the kubelet kills the containers of a deleted Pod."""
    return datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]).timestamp() - now


def timestamp(at: float) -> str:
    """Return a Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def kubelet_pod(pod: Object) -> SimPod:
    """Return a Pod as its kubelet admits it."""
    metadata = pod["metadata"]
    return SimPod(metadata["name"], metadata["namespace"], metadata["uid"], *_containers(pod))


def _containers(pod: Object) -> tuple[tuple[SimContainer, ...], tuple[SimContainer, ...]]:
    """Return the containers of a Pod, and its init containers."""
    spec = pod["spec"]
    containers = tuple(
        SimContainer(container["name"], _devices_of(container))
        for container in spec.get("containers") or ()
    )
    return containers, tuple(
        SimContainer(
            container["name"], _devices_of(container), container.get("restartPolicy") == "Always"
        )
        for container in spec.get("initContainers") or ()
    )


def node_of(pod: Object) -> str:
    """Return the node that a Pod is bound to, empty without one."""
    return str(pod["spec"].get("nodeName") or "")


def phase_of(pod: Object) -> str:
    """Return a Pod's phase."""
    return str(pod["status"]["phase"])


def is_unschedulable(pod: Object) -> bool:
    """Return whether the scheduler found no node for a Pod."""
    return any(
        condition["status"] == "False" for condition in pod["status"].get("conditions") or ()
    )


def is_settled(pod: Object) -> bool:
    """Return whether scheduler and kubelet have decided what becomes of a Pod for now."""
    return phase_of(pod) != "Pending" or is_unschedulable(pod) or bool(pod["status"].get("message"))


def binding(node: str) -> Patch:
    """Return the change of a Pod that the scheduler binds to a node."""
    return {"spec": {"nodeName": node}}


def scheduled(message: str = "") -> Patch:
    """Return the status of a Pod that is bound, or unschedulable for a reason."""
    found: dict[str, Any] = {"type": "PodScheduled", "status": "False" if message else "True"}
    if message:
        found |= {"reason": "Unschedulable", "message": message}
    return {"status": {"conditions": [found]}}


def rejected(reason: str, message: str) -> Patch:
    """Return the status of a Pod that its kubelet does not admit."""
    text = f"Pod was rejected: {message}"
    return {"status": {"phase": "Failed", "reason": reason, "message": text}}


def waiting(reason: str, message: str = "") -> Patch:
    """Return the status of a Pod whose container waits."""
    return {"status": {"reason": reason, "message": message or None}}


def running(since: float) -> Patch:
    """Return the status of a Pod whose container runs since a Unix time."""
    return {"status": {**phase("Running")["status"], "startTime": timestamp(since)}}


def phase(name: str) -> Patch:
    """Return the status of a Pod in another phase, without a reason."""
    return {"status": {"phase": name, "reason": None, "message": None}}


def event_object(pod: Object, reason: str, note: str) -> Object:
    """Return a warning about a Pod, as scheduler and kubelet write it."""
    metadata = pod["metadata"]
    regarding = {"kind": "Pod", **{part: metadata[part] for part in ("name", "namespace", "uid")}}
    return {"type": "Warning", "reason": reason, "note": note, "regarding": regarding}


def pod_claims(pod: Object, objects: Mapping[Key, Object]) -> PodClaims:
    """Return the claims of a pod as its kubelet prepares them.

    Raises:
        ClaimPrepareError: a claim is gone, or not reserved for the pod.
    """
    metadata = pod["metadata"]
    names = _claim_names(pod)
    refs, drivers = {}, {}
    for entry, name in names.items():
        claim = objects.get(("resourceclaims", metadata["namespace"], name))
        if claim is None:
            raise ClaimPrepareError(f'resourceclaims.resource.k8s.io "{name}" not found')
        status = claim.get("status") or {}
        if metadata["uid"] not in {consumer["uid"] for consumer in status.get("reservedFor") or ()}:
            raise ClaimPrepareError(f"ResourceClaim {name} is not reserved for the pod")
        refs[entry] = ResourceClaimRef(metadata["namespace"], name, claim["metadata"]["uid"])
        results = status["allocation"]["devices"]["results"]
        drivers[refs[entry]] = tuple(dict.fromkeys(result["driver"] for result in results))
    spec = pod["spec"]
    every = (*(spec.get("initContainers") or ()), *spec["containers"])
    containers = {container["name"]: _uses(container, refs) for container in every}
    return PodClaims(metadata["uid"], drivers, containers)


def _claim_names(pod: Object) -> Mapping[str, str]:
    """Return the name of each claim by its entry in the Pod."""
    made = pod["status"].get("resourceClaimStatuses") or ()
    entries = [*(pod["spec"].get("resourceClaims") or ()), *made]
    return {
        entry["name"]: entry["resourceClaimName"]
        for entry in entries
        if entry.get("resourceClaimName")
    }


def _uses(container: Mapping[str, Any], refs: Mapping[str, ResourceClaimRef]) -> Sequence[ClaimUse]:
    used = (container.get("resources") or {}).get("claims") or ()
    return [
        ClaimUse(refs[use["name"]], use.get("request", "")) for use in used if use["name"] in refs
    ]


STATUS_PERIOD: Final = 10.0
"""Seconds between two reports of the Node's numbers (nodeStatusUpdateFrequency)."""
READMIT_AFTER: Final = 0.1
"""Seconds from a kubelet's start to the admission of its earlier pods."""
RETRY_START: Final = 1.0
"""Seconds between two tries to start a container, or to end a pod with claims."""
RETRY_PREPARE: Final = 60.0
"""Seconds to the next try to prepare refused claims, unless the pod is annotated before."""


@dataclass(eq=False)
class KubeletSync:
    """Keeps a kubelet's pods as the API server has them, and the Node up to date.

    Attributes:
        claims: prepares the claims of pods.
        record: writes a warning about a Pod: its reason and note.
    """

    api: SimApiServer
    kubelet: SimKubelet
    claims: ClaimManager
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
        async with self._syncing:
            await self.kubelet.restart(forget=forget, reboot=reboot)
            self.claims.forget_drivers()
            self._delete_slices()
            await self._readmit()
            for pod in self.kubelet.pods if reboot else ():
                with suppress(ContainerStartError, KubeletDownError):
                    await self._start_containers(pod)
        self.api.wake()

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

    async def _readmit(self) -> None:
        """Admit the earlier pods at a kubelet that has just started and lives on."""
        await anyio.sleep(READMIT_AFTER)
        with suppress(KubeletDownError):
            for uid, error in (await self.kubelet.readmit()).items():
                if pod := self._pods.get(uid):
                    self._reject(pod, error)

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
            self._reject(pod, error)
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
                    self._set(document, running(time.time()))
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
        if pod := self._pods.pop(uid, None):
            await self.kubelet.delete(pod)
        return True

    def _reject(self, pod: SimPod, error: AdmissionError) -> None:
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
